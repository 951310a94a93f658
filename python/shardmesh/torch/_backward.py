"""The end of a backward."""
from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Optional

import torch
from torch.utils import checkpoint

_REENTRANT = checkpoint.CheckpointFunction.backward.__code__


def at_end_of_backward(ended: Callable[[], None], nested: Callable[[], None]) -> None:
    """From a hook of the backward that runs: calls `ended` after it. A checkpoint with use_reentrant=True runs a backward
    inside one: after that, which is no end, calls `nested`."""

    def call() -> None:
        (nested if _within_another_backward() else ended)()

    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def _within_another_backward() -> bool:
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None:
        if frame.f_code is _REENTRANT:
            return True
        frame = frame.f_back
    return False
