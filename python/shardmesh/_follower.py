"""One version of a job after the other."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Optional

from . import _arguments, _client
from ._version import Version
from .errors import InvalidArgument

__all__ = ["Follower", "OnVersion", "choice", "seconds"]

_WAYS = ("any", "attached", "pulled")
_MOST_SECONDS = 1e7
OnVersion = Callable[[Version], Optional[bool]]


def seconds(what: str, value: Any) -> float:
    """A time limit. InvalidArgument: below 0, no number, or beyond 115 days."""
    number = _arguments.number(what, value)
    if math.isnan(number) or not 0 <= number <= _MOST_SECONDS:
        raise InvalidArgument(f"{what} is {number:g}; it is of 0 to {_MOST_SECONDS:g} seconds")
    return number


Choice = tuple[str, int, int]  # kind, step, and the epoch that "newer" compares with


def newer(epoch: int, step: int) -> Choice:
    """A version of a later epoch, or of a later step of this one."""
    return "newer", step, epoch


def choice(exact: Any, at_least: Any, latest: Any, since: Any = None) -> Choice:
    """Which version. InvalidArgument: more than one is given."""
    given = {"exact": exact, "at_least": at_least, "since": since, "latest": latest or None}
    chosen = {name: value for name, value in given.items() if value is not None}
    if len(chosen) > 1:
        raise InvalidArgument(f"{' and '.join(chosen)} are given; a version is chosen by one of them")
    if not chosen or latest:
        return "latest", 0, 0
    ((name, value),) = chosen.items()
    step = _arguments.integer(name, value)
    if name == "since":
        return "at_least", max(0, step + 1), 0
    return name, step, 0


class Follower(Iterator[Version]):
    """The versions of a job, each newer than the one before. Those that come while the caller works, but the newest,
    are passed over. After a trainer has loaded an older state, the next version has a later epoch, and its step may be
    older.

        with job.follow() as follower:
            for version in follower:
                engine.use(version)

    A version stays as it is until the caller asks for the second one after it, so that an engine can go from the old
    one to the new one between two requests; then it is closed, and only arrays that were taken of it keep its memory.
    (Of a job with one publication a mapped version is closed when the next one is asked for, which needs its memory.)
    While a worker is started again, or the job goes on with others, versions just take longer. DeadlineExceeded: none
    came in time; the follower can be asked again. NotFound: the job was deleted. Unavailable: it failed.
    close(), by any thread, ends the iteration.
    """

    def __init__(self, job: _client.Job, first: Choice, timeout: float, way: str, ttl: float) -> None:
        if way not in _WAYS:
            raise InvalidArgument(f"way is {way!r:.40}; it is one of {', '.join(_WAYS)}")
        self._reader = _client.Reader(job, way=way, ttl=seconds("ttl", ttl))
        self._next, self._timeout = first, timeout
        self._closed = False
        self._held: list[Version] = []  # the one before, and this one

    @property
    def attached(self) -> bool:
        """Whether versions are mapped; else they are copies."""
        return self._reader.attached

    @property
    def _stay(self) -> int:
        """How many versions stay while the next one is waited for."""
        return 0 if self.attached and self._reader.publications == 1 else 1

    def _take(self) -> Version:
        return Version(self._reader.take(*self._next, timeout=self._timeout))

    def __iter__(self) -> Follower:
        return self

    def __next__(self) -> Version:
        while len(self._held) > self._stay:
            self._held.pop(0).close()
        if self._closed:
            raise StopIteration
        try:
            version = self._take()
        except Exception:
            if self._closed:
                raise StopIteration from None
            raise
        self._held.append(version)
        self._next = newer(version.epoch, version.step)
        return version

    def run(self, callback: OnVersion) -> None:
        """Calls `callback` with each version, and closes the follower at the end: when the callback returns False or
        raises, when close() is called, or when an error of the iteration comes, DeadlineExceeded among them."""
        with self:
            for version in self:
                if callback(version) is False:
                    return

    def close(self) -> None:
        """Ends the iteration, a wait of another thread too, and lets its versions go."""
        self._closed = True
        self._reader.close()
        while self._held:
            self._held.pop().close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
