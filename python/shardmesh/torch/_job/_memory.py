"""The service's memory as tensors, which keep the session that it belongs to."""
from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from ... import errors, numerics

# Of the parts of a tensor, and of formats of gradients. Codes of 16 bits are bf16.
_TYPES = {"float32": torch.float32, "uint16": torch.bfloat16, "uint8": torch.uint8, "int8": torch.int8}
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def tensor_of(memory: Any, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A view."""
    return torch.frombuffer(memoryview(memory), dtype=dtype).view(tuple(shape))


class Weights:
    """One parameter as a session has it: views of its parts, and its values."""

    def __init__(self, shape: Sequence[int], format: str, parts: Sequence[tuple[str, str, Sequence[int], Any]]) -> None:
        self.shape, self.format = tuple(shape), format
        self.parts = {name: tensor_of(memory, _TYPES[kind], sizes) for name, kind, sizes, memory in parts}

    @property
    def quantized(self) -> bool:
        return self.format not in FORMATS

    @property
    def view(self) -> torch.Tensor:
        """REQUIRES: not quantized."""
        return self.parts["codes"].view(self.shape)

    def write_to(self, tensor: torch.Tensor) -> None:
        """Its values, in whatever type that is."""
        tensor.copy_(self.values())

    def values(self) -> torch.Tensor:
        """A view, or decoded to fp32."""
        if not self.quantized:
            return self.view
        parts = {name: part.numpy() for name, part in self.parts.items()}
        return torch.from_numpy(numerics.decode(parts, self.format, self.shape))


def put_gradient(
    name: str, parameter: torch.Tensor, window: torch.Tensor, write: Optional[Callable[[Any], None]] = None
) -> None:
    """What autograd has left in `.grad` goes into the window, of which `.grad` is a view from then on.

    write: takes bytes there in less time than a copy does.

    Unimplemented: it is sparse, or has a graph. FailedPrecondition: it has another shape.
    """
    gradient = parameter.grad
    if gradient is None or gradient is window:
        return
    if gradient.requires_grad and torch.is_grad_enabled():
        parameter.grad = None
        raise errors.Unimplemented(
            f"the gradient of {name} has a graph, after backward(create_graph=True), and the service's memory has "
            "none; take gradients = torch.autograd.grad(loss, parameters, create_graph=True), and call backward() of "
            "what is made of them"
        )
    if gradient.is_sparse:
        raise errors.Unimplemented(f"the gradient of {name} is sparse; a job has dense ones: sparse=False")
    if gradient.shape != window.shape == parameter.shape:
        raise errors.FailedPrecondition(
            f".grad of {name} was given the shape {list(gradient.shape)}; the parameter has {list(window.shape)}: put a "
            "gradient of that shape there, or call optimizer.zero_grad() and begin the step's backwards again"
        )
    if gradient.shape != window.shape:
        raise errors.FailedPrecondition(
            f"{name} has the shape {list(gradient.shape)}; the job has {list(window.shape)}: optimizer.revert() takes "
            "the job's weights back"
        )
    as_it_is = gradient.dtype == window.dtype and gradient.device.type == "cpu" and gradient.is_contiguous()
    if write is not None and as_it_is:
        write(gradient.reshape(-1).view(torch.uint8).numpy())
    else:
        window.copy_(gradient)
    parameter.grad = window


def give_back() -> None:
    """What the model's parameters had before they became views is the system's again: malloc would keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
