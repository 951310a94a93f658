"""How an optimizer ends: at close(), or when nothing refers to it any more."""
from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Optional, TypeVar, Union

from .. import errors
from ._gradients._assigned import AssignedSlots
from ._gradients._pulled import SlotPuller
from ._machine._ranks import check_process
from ._modules._guard import Guard
from ._modules._modes import plainly
from ._setup import Started
from ._weights._loads import Loads
from ._weights._placed import Placed
from ._weights._residence import Residence


T = TypeVar("T")


def weakly(method: Callable[..., T]) -> Callable[..., Optional[T]]:
    """Calls it as long as its object is there. For what the model keeps, which is to keep no optimizer."""
    reference: Any = weakref.WeakMethod(method)

    def call(*args: Any) -> Optional[T]:
        found: Optional[Callable[..., T]] = reference()
        return None if found is None else found(*args)

    return call


class Ending:
    """Of one optimizer, in the process that made it. Once."""

    def __init__(
        self, optimizer: object, started: Started, guard: Guard, loads: Loads, slots: Union[AssignedSlots, SlotPuller],
        placed: Placed, residence: Optional[Residence],
    ) -> None:
        self._pid, self._started = os.getpid(), started
        started.at_once = False
        self._finalizer: Any = weakref.finalize(
            optimizer, _end, self._pid, started, guard, loads, slots, placed, residence
        )
        self._finalizer.atexit = False  # the service sees to that, and nobody needs copies of the weights then

    def check(self) -> None:
        """FailedPrecondition: it has ended, or is another process's."""
        if not self._finalizer.alive:
            raise errors.FailedPrecondition(
                "this optimizer is closed: close() was called, or its `with` block is over; make another one of the "
                "model"
            )
        check_process(self._pid)

    @property
    def is_open(self) -> bool:
        return bool(self._finalizer.alive)

    def close(self, at_once: bool = False) -> None:
        """at_once: without waiting for other ranks, which may still need the service."""
        if os.getpid() == self._pid:
            self._started.at_once = at_once
            self._finalizer()


@plainly
def _end(
    pid: int, started: Started, guard: Guard, loads: Loads, slots: Union[AssignedSlots, SlotPuller], placed: Placed,
    residence: Optional[Residence],
) -> None:
    if os.getpid() != pid:
        return
    try:
        guard.release()
        loads.release()
        slots.release()
        if residence is None:
            placed.release()
        else:
            residence.close()
        placed.let_go()
    finally:
        started.close()
