"""Slots that this rank pulls, one after the other, as long as the step has some."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Optional, Union

import torch

from .. import errors
from ._model import Parameter
from ._session import Reply, Session


class PulledSlots:
    """Each slot has a window of its own while it is written; gradients go there as in _slots.py."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = list(parameters)
        self._session: Optional[Session] = None
        self._views: list[torch.Tensor] = []  # of the slot that is taken
        self._written = [False] * len(parameters)
        self._reply: Optional[Reply] = None  # of a step that step() was not asked about
        self._handles = [
            parameter.tensor.register_post_accumulate_grad_hook(partial(self._arrived, index))
            for index, parameter in enumerate(parameters)
        ]

    def attach(self, session: Session) -> None:
        self._session, self._views = session, []

    def begun(self) -> bool:
        return self._reply is not None

    def join(self, joining: bool) -> bool:
        raise errors.FailedPrecondition("pulled slots end with the loop's body, and all backwards of it belong together")

    def take(
        self,
        batches: Union[Sequence[Any], Callable[[int, int], Any]],
        learning_rates: Callable[[], list[float]],
        loss_scale: Callable[[], float],
        tokens: Callable[[], int],
    ) -> Iterator[Any]:
        session = self._session
        assert session is not None
        while True:
            slot, step, reply = session.core.take(session.timeout)
            if slot is None:
                self._reply = Reply(*reply)
                return
            self._begin(session)
            yield batches(step, slot) if callable(batches) else batches[slot]
            self._zero_rest()
            session.core.finish(learning_rates(), loss_scale(), tokens(), session.timeout)
            self.clear()

    def _begin(self, session: Session) -> None:
        self._views = [session.gradient(None, one.name, one.tensor.shape) for one in self._parameters]
        self.clear()
        for parameter, view in zip(self._parameters, self._views):
            parameter.tensor.grad_dtype = view.dtype

    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        if not self._views:
            raise errors.FailedPrecondition("a backward outside of a slot: `for batch in optimizer.slots(batches):` takes one")
        view, gradient = self._views[index], parameter.grad
        if gradient is not None and gradient is not view:
            if gradient.is_sparse:
                raise errors.Unimplemented(
                    f"the gradient of {self._parameters[index].name} is sparse; a job has dense ones: sparse=False"
                )
            view.copy_(gradient)
            parameter.grad = view
        self._written[index] = True

    def _zero_rest(self) -> None:
        for view, written in zip(self._views, self._written):
            if not written:
                view.zero_()

    def complete(self) -> None:
        """Slots are complete when they were finished."""

    def commit(self, session: Session, learning_rates: list[float], loss_scale: float, tokens: list[int]) -> Reply:
        assert self._reply is not None
        return self._reply

    def stepped(self) -> None:
        self._reply = None

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.tensor.grad = None
        self._written = [False] * len(self._parameters)

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.clear()
        self._views = []
