"""torch's modes, of which none is to change what an optimizer does: they are for the program's own tensors."""
from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Call = TypeVar("Call", bound=Callable[..., Any])


def plainly(call: Call) -> Call:
    """Calls it without inference mode, autocast and a default device. Gradients are recorded as before."""

    @functools.wraps(call)
    def within(*args: Any, **kwargs: Any) -> Any:
        recorded = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            with torch.set_grad_enabled(recorded):
                return call(*args, **kwargs)

    return within  # type: ignore[return-value]


def untraced(call: Call) -> Call:
    """torch.compile calls it as it is. Importing torch's compiler for that would take a second of a program without."""
    found: list[Any] = []

    @functools.wraps(call)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return call(*args, **kwargs)
        if not found:
            compiler: Any = torch.compiler
            found.append(compiler.disable(call))
        return found[0](*args, **kwargs)

    return outside  # type: ignore[return-value]
