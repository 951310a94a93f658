"""Waiting for other ranks: without end for those that are alive, up to the timeout for others, not at all for one that
has left the job."""
from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional, TypeVar

from .. import errors

LOG = logging.getLogger("shardmesh.torch")

_FIRST_WARNING, _LONGEST = 10.0, 300.0  # seconds; each interval between two warnings is twice the one before
_WHY = {
    "stopped": "whose process is stopped (SIGSTOP)",
    "absent": "which has not come, or computes on a host without a worker",
    "left": "which has left the job",
    "attached": "which is alive",
}
_T = TypeVar("_T")


class Awaited(NamedTuple):
    """The trainer of a slot that is waited for."""

    slot: int
    state: str  # "attached", "stopped", "left" or "absent"
    pid: int  # 0: unknown

    @property
    def alive(self) -> bool:
        """Whether it can come while this process waits: one in this very process may never."""
        return self.state == "attached" and self.pid != os.getpid()


class Patience:
    """Of one session. `core`: of an attached session; others are not told who is alive."""

    def __init__(self, core: Any, job: str, own: Optional[Sequence[int]], timeout: float, *, is_told: bool) -> None:
        """own: the slots of this rank, of which each rank has as many; None: slots are pulled."""
        self._core, self._job, self._own, self._timeout = core, job, own, timeout
        self._first = min(_FIRST_WARNING, timeout) if is_told else timeout

    def wait(self, what: str, call: Callable[[float], _T]) -> tuple[_T, bool]:
        """What call(seconds) returns, which is repeated after DeadlineExceeded; and whether it was repeated.

        FailedPrecondition: a rank has left. DeadlineExceeded: `timeout` seconds passed in which not all that are waited
        for were known to be alive.
        """
        begin = time.monotonic()
        deadline, interval, repeated = begin + self._timeout, self._first, False
        while True:
            try:
                return call(max(min(interval, deadline - time.monotonic()), 0.001)), repeated
            except errors.FailedPrecondition as error:
                left = [one for one in self._others() if one.state == "left"]
                if not left:
                    raise
                raise errors.FailedPrecondition(
                    f"{what} of job {self._job} needs {self._named(left)}, which left the job: its process ended, or "
                    "it closed its optimizer. Every rank calls step() equally often, so look at how that rank ended, "
                    "or give each rank as many batches. Where that rank is started again, this call can be repeated"
                ) from error
            except errors.DeadlineExceeded as error:
                others, now = self._others(), time.monotonic()
                if others and all(one.alive for one in others):
                    deadline = now + self._timeout
                    LOG.warning("%s of job %s has waited %.0f s for %s, which is alive; it waits on", what, self._job,
                                now - begin, self._named(others))
                elif now >= deadline:
                    raise self._late(what, others, error) from error
                interval, repeated = min(2 * interval, _LONGEST), True

    def _others(self) -> list[Awaited]:
        own = self._own or ()
        return [one for one in (Awaited(*each) for each in self._core.awaited) if one.slot not in own]

    def _late(self, what: str, others: list[Awaited], error: errors.Error) -> errors.Error:
        if not others:
            return error
        slots = ", ".join(str(one.slot) for one in others)
        who = "; ".join(f"{self._named([one])}, {_WHY[one.state]}" for one in others)
        return errors.DeadlineExceeded(
            f"{what} of job {self._job} was not done within {self._timeout:g} s; missing slots: {slots}: {who}"
        )

    def _named(self, trainers: Sequence[Awaited]) -> str:
        """By rank, where that is known."""
        named: dict[str, None] = {}
        for one in trainers:
            pid = f"pid {one.pid}" if one.pid else "on another host"
            where = "" if one.state == "absent" else f" ({pid})"
            who = f"rank {one.slot // len(self._own)}" if self._own else f"the trainer of slot {one.slot}"
            named[who + where] = None
        return ", ".join(named)
