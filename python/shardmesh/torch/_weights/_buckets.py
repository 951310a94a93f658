"""The buckets of a model's units: how many uses each unit has, what is gathered for them, and what is on its way."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ... import errors
from .._job._session import TrainerSession
from .._modules._units import Unit
from ._placed import Placed


class Buckets:
    """Of one model. Unit 0 is the root: the service's buckets of it stay with this process from the first use on, so
    that a step writes the new weights where they are."""

    def __init__(self, units: Sequence[Unit], placed: Placed) -> None:
        self._units, self._placed = units, placed

    def attach(self, session: TrainerSession, bucket_of: Sequence[int]) -> None:
        """At first, or when the job has other weights: nothing is in use. bucket_of: each parameter's."""
        self._session = session
        self._buckets = [sorted({bucket_of[index] for index in unit.parameters}) for unit in self._units]
        self._uses = [0] * len(self._units)
        self._root_held = False
        self._lent: list[int] = []  # units, the oldest first
        self._prefetched: set[int] = set()

    def there(self, unit: int) -> bool:
        """Whether its weights can be read."""
        return self._uses[unit] > 0

    def acquire(self, unit: int) -> None:
        if self._uses[unit] == 0:
            self._acquire_all(() if unit == 0 and self._root_held else self._buckets[unit])
            self._root_held = self._root_held or unit == 0
            self._placed.fill(self._units[unit].parameters)
        self._uses[unit] += 1

    def _acquire_all(self, buckets: Sequence[int]) -> None:
        """Or none of them."""
        for count, bucket in enumerate(buckets):
            try:
                self._find_room(partial(self._session.core.acquire, bucket, self._session.timeout))
            except BaseException:
                for acquired in buckets[:count]:
                    self._session.core.release(acquired)
                raise
            self._prefetched.discard(bucket)

    def _find_room(self, gather: Callable[[], None]) -> None:
        """Gathers a bucket. Where a rank has as many as it may, what is lent makes room."""
        while True:
            try:
                return gather()
            except errors.ResourceExhausted:
                if not self._lent:
                    raise
                self.release(self._lent.pop(0))

    def lend(self, unit: int) -> None:
        """Its weights are there until others need the room, or to the end of the step: views of them may be used at any
        time."""
        if unit in self._lent:
            self._lent.remove(unit)
        elif self._uses[unit] > 0:
            return
        else:
            self.acquire(unit)
        self._lent.append(unit)

    def acquire_root(self) -> None:
        """Once: it is used all the time, but by a step."""
        if self._uses[0] == 0:
            self.acquire(0)

    def release(self, unit: int) -> None:
        if self._uses[unit] == 0:
            return
        self._uses[unit] -= 1
        if self._uses[unit] > 0:
            return
        self._placed.empty(self._units[unit].parameters)
        for bucket in self._buckets[unit] if unit > 0 else ():
            self._session.core.release(bucket)

    def prefetch(self, unit: int) -> None:
        """Of the unit that is expected next. What was expected before it, and did not come, is dropped."""
        if not 0 < unit < len(self._units) or self._uses[unit] > 0:
            return
        self._drop(self._prefetched.difference(self._buckets[unit]))
        for bucket in self._buckets[unit]:
            if bucket not in self._prefetched and not self._in_use(bucket):
                self._find_room(partial(self._session.core.prefetch, bucket))
                self._prefetched.add(bucket)

    def _in_use(self, bucket: int) -> bool:
        held = (uses > 0 or (unit == 0 and self._root_held) for unit, uses in enumerate(self._uses))
        return any(bucket in of_unit for of_unit, is_held in zip(self._buckets, held) if is_held)

    def _drop(self, buckets: Iterable[int]) -> None:
        for bucket in list(buckets):
            if not self._in_use(bucket):
                self._session.core.release(bucket)
            self._prefetched.discard(bucket)

    def drop_prefetched(self) -> None:
        self._drop(self._prefetched)

    def release_all(self) -> None:
        self._lent.clear()
        for unit in range(len(self._units)):
            if self._uses[unit] > 0:
                self._uses[unit] = 1
                self.release(unit)
        self.drop_prefetched()
