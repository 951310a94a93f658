"""torch.amp.GradScaler beside a job that decides for all ranks whether a step's gradients are finite."""
from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Optional

import torch

from ... import errors

_STEP = torch.amp.GradScaler.step.__code__
_frames: Any = getattr(torch._C, "_dynamo").eval_frame
# torch.compile() leaves it as it is, which it does to what has no graph: else its frame would be another.
_frames.set_code_exec_strategy(_STEP, _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP))


class Scaling:
    """What the scaler has said of the step that it calls."""

    def __init__(self, scale: float, state: dict[str, Any]) -> None:
        self.scale = scale  # by what the gradients are too large
        self._state = state

    def tell(self, skipped: bool) -> None:
        """update() then does the same on every rank: the scaler has looked at this rank's gradients alone."""
        any_skipped = skipped or self._state.get("skipped", False)  # of all optimizers in one wrapper
        self._state["skipped"] = any_skipped
        found = torch.full((), float(any_skipped), dtype=torch.float32, device="cpu")
        self._state["found_inf_per_device"] = {torch.device("cpu"): found}


def scaling(optimizer: torch.optim.Optimizer, pulled: bool) -> Optional[Scaling]:
    """Of the step() that GradScaler.step() calls; None: no scaler calls it, or one that is not enabled.

    FailedPrecondition: the scaler cannot be found. Unimplemented: slots are pulled.
    """
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None and not (frame.f_code is _STEP and _has_groups_of(frame.f_locals["optimizer"], optimizer)):
        frame = frame.f_back
    if frame is None:
        if hasattr(optimizer, "found_inf"):
            raise errors.FailedPrecondition(
                "GradScaler.step() set found_inf, but it is not among the callers of this step(), so update() could "
                "not be told; call scaler.step(optimizer) itself, in the same thread"
            )
        return None
    if not frame.f_locals["self"].is_enabled():
        return None
    if pulled:
        raise errors.Unimplemented(
            "GradScaler.step() comes after pulled slots have handed over their gradients, which were scaled; train "
            "without a scaler, as bf16 allows, or make the optimizer with pulled=False"
        )
    scale = getattr(frame.f_locals["optimizer"], "grad_scale", None)  # None: unscale_() has divided them already
    return Scaling(1.0 if scale is None else float(scale), frame.f_locals["optimizer_state"])


def forget(optimizer: torch.optim.Optimizer) -> None:
    """What GradScaler.step() has set, and leaves behind when the optimizer's step() raises: one without it may follow."""
    for name in "grad_scale", "found_inf":
        optimizer.__dict__.pop(name, None)


def _has_groups_of(given: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is the optimizer, or a wrapper of it. The step of another optimizer may call this one's, too."""
    own = set(map(id, optimizer.param_groups))
    return any(id(group) in own for group in given.param_groups)
