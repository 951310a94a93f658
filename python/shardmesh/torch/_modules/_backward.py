"""The end of a backward."""
from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Optional

import torch
from torch.utils import checkpoint

from ._modes import untraced

_REENTRANT = checkpoint.CheckpointFunction.backward.__code__


def hooked(tensor: torch.Tensor | torch.nn.Module) -> Any:
    """For its methods that take hooks, which torch has not typed."""
    return tensor


class Backwards:
    """Says once when a backward has ended. One that raised does not end: it is open until forget()."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._running: Optional[object] = None

    @property
    def open(self) -> bool:
        return self._running is not None

    def begun(self) -> None:
        """From hooks of a backward; the first counts."""
        if self._running is None:
            self._running = object()
            self._await_end(self._running)

    def forget(self) -> None:
        self._running = None

    def _await_end(self, running: object) -> None:
        """A checkpoint with use_reentrant=True runs a backward inside one: the end of that is none."""

        @untraced
        def call() -> None:
            if running is not self._running:
                return  # it was forgotten
            if (frame := _around()) is not None:
                _from_the_next(frame.f_locals["ctx"], lambda: self._await_end(running))
                return
            self._running = None
            self._ended()

        autograd: Any = torch.autograd
        autograd.Variable._execution_engine.queue_callback(call)


def _around() -> Optional[FrameType]:
    """The checkpoint whose backward this one is inside of."""
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None and frame.f_code is not _REENTRANT:
        frame = frame.f_back
    return frame


def _from_the_next(node: Any, call: Callable[[], None]) -> None:
    """Calls it once, from one of the nodes that come after this one in its backward. A checkpoint has one: it needs an
    input that requires gradients."""
    handles: list[Any] = []

    def first(_: Any) -> None:
        if handles:
            while handles:
                handles.pop().remove()
            call()

    for following, _ in node.next_functions:
        if following is not None:
            handles.append(following.register_prehook(first))
