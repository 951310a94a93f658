"""The job of an optimizer of this process, for readers: what is read of it is what the model has."""
from __future__ import annotations

import threading
from collections.abc import Callable

from ...client import Digest, Job


class OwnJob(Job):
    """A job whose newest weights may still wait in the model. In the thread that made this, publish() and digest() have
    them taken first; in another one they are of the job as it is."""

    def __init__(self, job: Job, settle: Callable[[str], object]) -> None:
        """settle: called with what is about to read the job. It raises where the job cannot have the model's weights."""
        super().__init__(job._core)
        self._settle, self._thread = settle, threading.get_ident()

    def _take(self, what: str) -> None:
        if threading.get_ident() == self._thread:
            self._settle(what)

    def publish(self, *, timeout: float = 60.0) -> int:
        self._take("job.publish()")
        return super().publish(timeout=timeout)

    def digest(self, *, timeout: float = 60.0) -> Digest:
        self._take("job.digest()")
        return super().digest(timeout=timeout)
