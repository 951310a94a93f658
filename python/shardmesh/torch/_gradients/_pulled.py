"""Slots that this rank pulls, one after the other, as long as the step has some."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional, Union

import torch

from ... import errors
from .._job._memory import put_gradient
from .._job._session import Reply, TrainerSession
from .._machine._ranks import check_process
from .._modules._model import Parameter
from .._weights._residence import Residence
from ._shown import SEVERAL, Shown
from ._windows import Windows


class SlotPuller:
    """Each slot has a window of its own while it is written; gradients go there as in _assigned.py."""

    def __init__(self, parameters: Sequence[Parameter], count: int, token_weights: bool, world: int) -> None:
        """count: slots of a step, over all ranks. world: ranks that take them."""
        self._parameters, self._pid, self._world = list(parameters), os.getpid(), world
        self._met = world == 1  # all ranks have come
        self._session: Optional[TrainerSession] = None
        self._count = count
        self._open: Optional[int] = None  # the slot that the loop's body is at
        self.token_weights = token_weights  # then a slot may be without tokens, and without gradients
        self._windows: Optional[Windows] = None  # of the slot that is taken
        self._written = [False] * len(parameters)
        self._reply: Optional[Reply] = None  # of a step that step() was not asked about
        self._step = -1  # that this rank is done with; other ranks may be further
        self._taken: Optional[tuple[int, int]] = None  # a slot and its step, of a later one than this rank is at
        self._shown = Shown(self._parameters, self._arrived)
        if count > 1:
            self._shown.withhold(SEVERAL, self._to_add_to, first=True)
        self._residence: Optional[Residence] = None
        self._residence_index: list[int] = []

    def reside(self, residence: Residence, indices: Sequence[int]) -> None:
        """Weights are there while they are used. indices: those that the residence has for the parameters."""
        self._residence, self._residence_index = residence, list(indices)

    def attach(self, session: TrainerSession) -> None:
        self._session, self._windows, self._taken = session, None, None
        if self._step < 0:
            self._step = session.first

    whole = False  # `.grad` is all that this rank hands over

    @property
    def taking(self) -> bool:
        return self._open is not None

    @property
    def over(self) -> bool:
        """The loop came to its end, and step() was not asked about it."""
        return self._reply is not None

    def begun(self) -> bool:
        if self._open is not None:
            raise errors.FailedPrecondition(
                f"slot {self._open} was taken and is not finished: the loop over optimizer.slots() was left before its "
                "end, or step() was called in it; loop over optimizer.slots(batches) again, to the end, and then call "
                "step()"
            )
        if not self.over and self._world > 1:
            raise errors.FailedPrecondition(
                "step() was called without a loop over optimizer.slots(), so that this rank would stay behind the "
                "others; loop over optimizer.slots(batches) for each step"
            )
        self._check_shown()
        return self.over

    def _check_shown(self) -> None:
        """FailedPrecondition: a gradient was put into `.grad`, or taken out of it, which nobody would see."""
        for index in range(len(self._parameters) if self._count > 1 else 0):
            self._shown.check(index, None)

    def _to_add_to(self, index: int) -> Optional[torch.Tensor]:
        return self._windows.window(index) if self._windows is not None and self._written[index] else None

    def join(self, joining: bool) -> bool:
        raise errors.FailedPrecondition(
            "pulled slots end with the loop's body, and all backwards of it belong together"
        )

    def take(
        self,
        batches: Union[Sequence[Any], Callable[[int, int], Any]],
        learning_rates: Callable[[], list[float]],
        tokens: Callable[[], int],
    ) -> Iterator[Any]:
        _check_batches(batches, self._count)
        batch_of = batches if callable(batches) else lambda step, slot: batches[slot]
        return self._take(batch_of, lambda: (learning_rates(), 1.0, tokens()))

    def _take(
        self, batch_of: Callable[[int, int], Any], settings: Callable[[], tuple[list[float], float, int]]
    ) -> Iterator[Any]:
        session, self._open = self._session, None
        assert session is not None
        if self._residence is not None:
            self._residence.begin()
        while (slot := self._next(session)) is not None:
            self._begin(session)
            self._open = slot
            yield batch_of(self._step + 1, slot)
            self._check_shown()
            if not any(self._written) and not self.token_weights:
                raise errors.FailedPrecondition(f"slot {slot} had no backward in the body of the loop; each needs one")
            self._take_shown()
            self._zero_rest()
            session.core.finish(*settings(), session.timeout)
            self._open = None
            self.clear()
        if self._count > 1:
            self._shown.hide_all()

    def _next(self, session: TrainerSession) -> Optional[int]:
        """A slot of the step that this rank is at; None: that is over, and `_reply` says how it went."""
        if not self._met:
            session.meet(self._world)
            self._met = True
        wanted = self._step + 1
        while self._taken is None and session.committed < wanted:
            slot, step, reply = session.take()
            if slot is not None:
                self._taken = slot, step
            elif step == wanted:
                self._reply = session.noted(Reply(*reply))
                return None
        if self._taken is not None and self._taken[1] == wanted:
            slot, self._taken = self._taken[0], None
            return slot
        self._reply = Reply(wanted, True, False, "", None)  # the others did without this rank
        return None

    def _begin(self, session: TrainerSession) -> None:
        self._windows = windows = Windows(
            self._parameters, [session.gradient(None, one.name, one.tensor.shape) for one in self._parameters]
        )
        self.clear()
        for index, parameter in enumerate(self._parameters):
            parameter.tensor.grad_dtype = windows.shown(index).dtype

    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        check_process(self._pid)
        if self._open is None:
            self._shown.drop(index)
            raise errors.FailedPrecondition(
                "a backward outside of a slot: `for batch in optimizer.slots(batches):` takes one"
            )
        assert self._windows is not None
        if self._residence is not None:
            try:
                self._residence.check_open(self._residence_index[index])
            except errors.Error:
                self._shown.drop(index)
                raise
        put_gradient(self._parameters[index].name, parameter, self._windows.window(index))
        self._written[index] = True
        if self._count > 1:
            self._shown.hide(index)

    def _take_shown(self) -> None:
        """Of the only slot of a step, whose `.grad` a program may change."""
        assert self._windows is not None
        if self._count == 1:
            self._written = self._windows.take()

    def _zero_rest(self) -> None:
        assert self._windows is not None
        for index, written in enumerate(self._written):
            if not written:
                self._windows.zero(index)

    def complete(self) -> None:
        """Slots are complete when they were finished."""

    def commit(self, session: TrainerSession, learning_rates: list[float], loss_scale: float, tokens: list[int]) -> Reply:
        assert self._reply is not None
        return self._reply

    def stepped(self) -> None:
        self._reply = None
        self._step += 1
        self._shown.clear()
        if self._residence is not None:
            self._residence.begin()

    def clear(self) -> None:
        self._shown.clear()
        self._written = [False] * len(self._parameters)

    def zeroed(self) -> None:
        self.clear()

    def release(self) -> None:
        self._shown.release()
        self._windows = None


def _check_batches(batches: Any, count: int) -> None:
    """InvalidArgument: they are neither a function nor a sequence of one for each slot."""
    if callable(batches):
        return
    if not (hasattr(batches, "__len__") and hasattr(batches, "__getitem__")):
        raise errors.InvalidArgument(
            f"batches is a {type(batches).__name__}; it must be a sequence of one for each of the {count} slots of a "
            "step, or a function of step and slot. Of a DataLoader, the same on every rank: `loader = iter(loader)`, "
            f"and for each step `optimizer.slots([next(loader) for _ in range({count})])`"
        )
    if len(batches) != count:
        raise errors.InvalidArgument(
            f"there are {len(batches)} batches, and the job has {count} slots in a step; give one for each slot"
        )
