"""torch.amp.GradScaler beside a job that decides for all ranks whether a step's gradients are finite."""
from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Optional

import torch

_STEP = torch.amp.GradScaler.step.__code__


def loss_scale(optimizer: torch.optim.Optimizer) -> float:
    """By what the gradients are too large, as GradScaler.step() says it. None: unscale_() has divided them already."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def tell(optimizer: torch.optim.Optimizer, skipped: bool) -> None:
    """The scaler whose step() of this optimizer this is: update() then does the same on every rank. It has looked at
    this rank's gradients alone, of one slot. A step of another optimizer, which called this one's, is not meant."""
    if not hasattr(optimizer, "found_inf"):
        return  # there is none, or it is not enabled
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None and not (frame.f_code is _STEP and frame.f_locals["optimizer"] is optimizer):
        frame = frame.f_back
    if frame is not None:
        scaler: Any = frame.f_locals["self"]
        found = torch.tensor(float(skipped), dtype=torch.float32, device="cpu")
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {torch.device("cpu"): found}
