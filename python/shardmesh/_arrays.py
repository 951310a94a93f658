"""Arrays of NumPy and tensors of PyTorch as NumPy arrays over the same memory. PyTorch is never imported here."""
from __future__ import annotations

import sys
from typing import Any

from .errors import InvalidArgument

try:
    import numpy as np
except ImportError as _missing:
    _text = "shardmesh.numerics needs NumPy: pip install numpy; Debian's package is python3-numpy"
    raise ImportError(_text) from _missing

__all__ = ["floats", "np", "numbers", "part", "view"]

# Types that NumPy lacks, as integers of their size: bfloat16 as its upper 16 bits, 8-bit floats as their codes.
_AS_CODES = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "float8_e8m0fnu": "uint8"}


def view(what: str, value: Any) -> np.ndarray[Any, Any]:
    """`value` without a copy. InvalidArgument: a tensor of another device, or not contiguous."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = _of_tensor(torch, what, value)
    array = np.asarray(value)
    if not array.flags.c_contiguous:
        raise InvalidArgument(f"{what} is not contiguous; give what contiguous() or numpy.ascontiguousarray() returns")
    return array


def _of_tensor(torch: Any, what: str, tensor: Any) -> Any:
    if tensor.device.type != "cpu":
        raise InvalidArgument(f"{what} lies on {tensor.device}; give what cpu() returns")
    tensor = tensor.detach()
    codes = _AS_CODES.get(str(tensor.dtype).rpartition(".")[2])
    return (tensor if codes is None else tensor.view(getattr(torch, codes))).numpy()


def numbers(what: str, value: Any) -> np.ndarray[Any, Any]:
    """fp32 numbers, or bf16 ones as uint16 codes. InvalidArgument: of another type, or as view()."""
    array = view(what, value)
    if array.dtype == np.float32 or array.dtype == np.uint16:
        return array
    raise InvalidArgument(f"{what} is of {array.dtype}; give float32, or bfloat16 (in NumPy: its codes as uint16)")


def floats(what: str, value: Any) -> np.ndarray[Any, Any]:
    """The same as fp32; bf16 is copied. Errors as numbers()."""
    array = numbers(what, value)
    if array.dtype == np.float32:
        return array
    return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)


def part(what: str, value: Any, dtype: str, shape: tuple[int, ...], writable: bool) -> np.ndarray[Any, Any]:
    """One stored array, in its shape. InvalidArgument: another type or number of elements, read-only, or as view()."""
    array = view(what, value)
    if array.dtype != np.dtype(dtype):
        raise InvalidArgument(f"{what} is of {array.dtype}; it must be of {dtype}")
    if array.size != int(np.prod(shape)):
        raise InvalidArgument(f"{what} has the shape {array.shape}; it must have {shape}, or as many elements")
    if writable and not array.flags.writeable:
        raise InvalidArgument(f"{what} is read-only; a step writes it")
    return array.reshape(shape)
