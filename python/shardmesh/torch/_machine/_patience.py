"""Waiting for other ranks: without end for those that are alive, up to the timeout for others, not at all for one that
has left the job."""
from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional, TypeVar

from ... import errors
from ._others import Others

LOG = logging.getLogger("shardmesh.torch")

_LOOK = 0.5  # seconds between two looks at those who have not come
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
    """Of one session."""

    def __init__(
        self, core: Any, job: str, own: Optional[Sequence[int]], timeout: float, others: Optional[Others]
    ) -> None:
        """own: the slots of this rank, of which each rank has as many; None: slots are pulled. others: the other ranks;
        None: `core` is no attached session, and is not told who is alive."""
        self._core, self._job, self._own, self._timeout, self._ranks = core, job, own, timeout, others
        self._first = timeout if others is None else min(_FIRST_WARNING, timeout)

    def wait(self, what: str, call: Callable[[float], _T]) -> tuple[_T, bool]:
        """What call(seconds) returns, which is repeated after DeadlineExceeded; and whether it was repeated.

        FailedPrecondition: a rank has left. DeadlineExceeded: `timeout` seconds passed in which not all that are waited
        for were known to be alive.
        """
        begin = time.monotonic()
        deadline, interval, repeated = begin + self._timeout, self._first, False
        warning, others = begin + interval, list[Awaited]()
        while True:
            limit = min(warning, deadline) - time.monotonic()
            if self._ranks is not None and self._ranks.are_known:
                limit = min(limit, _LOOK)
            try:
                return call(max(limit, 0.001)), repeated
            except errors.FailedPrecondition as error:
                self._check_left(what, self._others(), error)
                raise
            except errors.DeadlineExceeded as error:
                others, now, repeated = self._others() or others, time.monotonic(), True
                self._check_left(what, others, error)
                alive = bool(others) and all(one.alive for one in others)
                if alive:
                    deadline = now + self._timeout
                elif now >= deadline:
                    raise self._late(what, others, error) from error
                if now < warning:
                    continue
                if alive:
                    LOG.warning("%s of job %s has waited %.0f s for %s, which is alive; it waits on", what, self._job,
                                now - begin, self._named(others))
                interval = min(2 * interval, _LONGEST)
                warning = now + interval

    def _check_left(self, what: str, others: Sequence[Awaited], error: errors.Error) -> None:
        """FailedPrecondition: one of them has left."""
        left = [one for one in others if one.state == "left"]
        if left:
            raise errors.FailedPrecondition(
                f"{what} of job {self._job} needs {self._named(left)}, which left the job: its process ended, or it "
                "closed its optimizer. Every rank calls step() equally often, so look at how that rank ended, or give "
                "each rank as many batches. Where that rank is started again, this call can be repeated"
            ) from error

    def _others(self) -> list[Awaited]:
        own = self._own or ()
        return [self._known(one) for one in (Awaited(*each) for each in self._core.awaited) if one.slot not in own]

    def _known(self, one: Awaited) -> Awaited:
        """With what its rank said beside the job, which knows nobody who has not come to it."""
        if one.state != "absent" or self._own is None or self._ranks is None:
            return one
        pid = self._ranks.left(one.slot // len(self._own))
        return one if pid is None else one._replace(state="left", pid=pid)

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
