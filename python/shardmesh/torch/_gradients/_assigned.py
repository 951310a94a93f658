"""The slots of a rank: where gradients go, one backward after the other.

A gradient is written into the window of its slot once, where autograd would have kept it. Autograd itself adds a second
backward of the same slot there. `.grad` is a view of the window if that is all the rank hands over; see _shown.py.
"""
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Optional

import torch

from ... import errors
from .._job._memory import put_gradient
from .._job._session import LOG, Reply, TrainerSession
from .._machine._ranks import check_process
from .._modules._backward import Backwards
from .._modules._model import Parameter
from .._weights._residence import Residence
from ._shown import HANDED_OVER, SEVERAL, Shown
from ._windows import Windows


class AssignedSlots:
    """Slots that are assigned to this rank, in order."""

    def __init__(
        self, parameters: Sequence[Parameter], numbers: Sequence[int], token_weights: bool, alone: bool
    ) -> None:
        """alone: no other rank has slots of the job."""
        self.numbers, self._pid, self._alone = list(numbers), os.getpid(), alone
        self._parameters = list(parameters)
        self._windows: list[Windows] = []
        self._written = [[False] * len(parameters) for _ in numbers]
        self._zero = [[True] * len(parameters) for _ in numbers]  # windows are zero at first
        self._filled = 0  # slots that are closed
        self._joining = False
        self._backwards = Backwards(self._backward_ended)
        self._residence: Optional[Residence] = None
        self._residence_index: list[int] = []
        self._number_of: dict[int, int] = {}  # the other way round
        self._token_weights = token_weights
        self._without = False  # a step had no gradient of this rank
        self._shown = Shown(self._parameters, self._arrived)
        if self.several:
            self._shown.withhold(SEVERAL, self._to_add_to, first=True)

    def reside(self, residence: Residence, indices: Sequence[int]) -> None:
        """Gradients are handed over as they come. indices: those that the residence has for the parameters."""
        self._residence, self._residence_index = residence, list(indices)
        self._number_of = {index: number for number, index in enumerate(indices)}
        self._shown.withhold(HANDED_OVER, self._to_add_to, first=False)

    def attach(self, session: TrainerSession) -> None:
        """To its windows, at first or when it was opened again: what is in the old ones is taken over."""
        windows = [
            Windows(self._parameters, [session.gradient(slot, one.name, one.tensor.shape) for one in self._parameters])
            for slot in self.numbers
        ]
        old, self._windows = self._windows, windows
        for before, now in zip(old, windows):
            for index, parameter in enumerate(self._parameters):
                window = before.window(index)
                now.shown(index).copy_(window)
                if parameter.tensor.grad is window:
                    parameter.tensor.grad = now.shown(index)
        for index, parameter in enumerate(self._parameters):
            parameter.tensor.grad_dtype = windows[0].shown(index).dtype

    taking = False  # a slot that was pulled is open

    @property
    def several(self) -> bool:
        return len(self.numbers) > 1

    @property
    def whole(self) -> bool:
        """`.grad` is all that this rank hands over."""
        return not self.several and self._residence is None

    def begun(self) -> bool:
        """Whether step() is to do a step. Other ranks wait for this one's slots, and without a backward they are zeros.

        FailedPrecondition: there are gradients that no backward has left, or that were taken away.
        """
        if self.several or self._residence is not None:
            self._check_shown()
        return not self._alone or self._any()

    def _any(self) -> bool:
        return self._filled > 0 or self._backwards.open or any(self._written[0]) or self._set_by_hand()

    def _set_by_hand(self) -> bool:
        return not self.several and any(parameter.tensor.grad is not None for parameter in self._parameters)

    def _check_shown(self) -> None:
        for index in range(len(self._parameters)):
            self._shown.check(index, self._seen(index))

    def _seen(self, index: int) -> Optional[torch.Tensor]:
        """What `.grad` is where it is not hidden."""
        return self._windows[0].shown(index) if not self.several and self._written[0][index] else None

    def _to_add_to(self, index: int) -> Optional[torch.Tensor]:
        """The window, if the open slot has a gradient there that the job has not yet. Autograd adds to it before
        _arrived() can refuse, and the workers may read it at any time once it was handed over."""
        slot = self._filled
        if slot == len(self.numbers) or not self._written[slot][index]:
            return None
        if self._residence is not None and self._residence.has_handed_over(self._residence_index[index]):
            return None
        return self._windows[slot].window(index)

    def join(self, joining: bool) -> bool:
        """Whether what comes now stays in its slot after a backward; returns what it was."""
        before, self._joining = self._joining, joining
        return before

    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        check_process(self._pid)
        try:
            wanted = self._is_wanted(index)
        except errors.Error:
            self._shown.drop(index)
            raise
        self._backwards.begun()
        if not wanted:
            self._shown.drop(index)
            return
        slot, name = self._filled, self._parameters[index].name
        write = None if self._residence is None else self._residence.writer(self.numbers[slot], name)
        put_gradient(name, parameter, self._windows[slot].window(index), write)
        self._written[slot][index], self._zero[slot][index] = True, False
        if self.several:
            self._shown.hide(index)
        if self._residence is not None and slot == len(self.numbers) - 1 and not self._joining:
            for handed_over in self._residence.arrived(self._residence_index[index], self._take):
                self._shown.hide(self._number_of[handed_over])

    def _take(self, index: int) -> None:
        """What `.grad` shows of a parameter of the residence, before it is handed over."""
        self._windows[-1].window(self._number_of[index])

    def _is_wanted(self, index: int) -> bool:
        """False: it was handed over before. FailedPrecondition: no slot is open for it."""
        if self._filled == len(self.numbers):
            raise errors.FailedPrecondition(
                f"this rank has {len(self.numbers)} slots, and all have their backward: call step(), or do what "
                "belongs together in no_sync()"
            )
        return self._residence is None or self._residence.check_open(self._residence_index[index])

    def _backward_ended(self) -> None:
        if self.several and not self._joining:
            self._close()

    def _close(self) -> None:
        """The slot is whole, and nobody sees it any more."""
        self._zero_rest(self._filled)
        self._filled += 1
        self._shown.hide_all()

    def _zero_rest(self, slot: int) -> None:
        if self._residence is not None:
            return  # after each step its windows are zero
        for index, (written, zero) in enumerate(zip(self._written[slot], self._zero[slot])):
            if not written and not zero:
                self._windows[slot].zero(index)
                self._zero[slot][index] = True

    def complete(self) -> None:
        """Before a step. FailedPrecondition: slots that had no backward, or one that raised."""
        if self._backwards.open:
            raise errors.FailedPrecondition(
                "a backward since the last step raised, so that a slot has a part of its gradients; begin the step's "
                "slots again after zero_grad()"
            )
        if not self._any():
            self._count_zeros()
        if self.several:
            if self._filled < len(self.numbers) and any(self._written[self._filled]):
                self._close()
            if self._filled < len(self.numbers):
                raise errors.FailedPrecondition(
                    f"{self._filled} of this rank's {len(self.numbers)} slots had their backward before step(); each "
                    "needs one, or slots= of the optimizer is to be smaller"
                )
            return
        if self._residence is not None:
            return
        self._written[0] = self._windows[0].take()
        self._zero[0] = [zero and not written for zero, written in zip(self._zero[0], self._written[0])]
        self._zero_rest(0)

    def _count_zeros(self) -> None:
        """A step of which this rank has nothing: to be one of its ranks it hands over zeros. The first is logged."""
        if not self._without:
            self._without = True
            LOG.warning("step() was called without a backward since the last one: this rank's slots count as zeros, "
                        "since other ranks wait for them")
        while self.several and self._filled < len(self.numbers):
            self._close()

    def commit(
        self, session: TrainerSession, learning_rates: list[float], loss_scale: float, tokens: list[int]
    ) -> Reply:
        if self._token_weights and not tokens and not any(map(any, self._written)):
            tokens = [0] * len(self.numbers)  # of no backward
        return session.step(learning_rates, loss_scale, tokens)

    def stepped(self) -> None:
        """After a step. With one slot gradients stay, as torch.optim has it."""
        if self._residence is not None:
            self._residence.stepped()
        if self.several or self._residence is not None:
            self.clear()

    def clear(self) -> None:
        """zero_grad(). FailedPrecondition: gradients that are handed over cannot be taken back."""
        if self._residence is not None and self._backwards.open:
            self._residence.begin_again()
        elif self._residence is not None and self._residence.handed_over:
            for index in range(len(self._parameters)):
                self._shown.show(index, self._seen(index))  # else step() would not take them
            raise errors.FailedPrecondition(
                "gradients of this step were handed over as they came, as residency=\"bucket\" has it, and cannot be "
                "taken back: call step(), then zero_grad(). For gradients that are another model's alone take "
                "backward(inputs=list(other.parameters())); a step with gradients that are not finite changes nothing "
                "anyway. residency=\"full\" can drop gradients"
            )
        self._shown.clear()
        self._backwards.forget()
        self._filled = 0
        for written in self._written:
            written[:] = [False] * len(written)

    def zeroed(self) -> None:
        """zero_grad(set_to_none=False) of one slot, after `.grad` was."""
        self._backwards.forget()

    def release(self) -> None:
        """No gradient of the model is in the windows any more: it has none."""
        self._shown.release()
        self._windows = []
