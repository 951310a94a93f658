"""Optimizer states and weights of other libraries as a job stores them: torchao's with the same codes and scales."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Optional

from . import _arrays, errors, numerics
from ._dcp_read import Chunk

np = _arrays.np

# torchao's classes: our format, and elements with one scale.
_CODED = {"OptimState8bit": ("dyn8", 256), "OptimState4bit": ("dyn4", 128), "OptimStateFp8": ("fp8", 256)}
_FLOATS = ("float32", "bfloat16", "float16")
FORMATS = ("fp32", "bf16_sr", "dyn8", "dyn4", "fp8", "fp8x32")
WEIGHTS = ("fp32", "bf16", "bf16_sr", "bf16+16", "bf16+8sr", "int8_row")  # that can be trained
SIGNED = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False, "momentum_buffer": True}
_DECODE = 'states="fp32" takes its decoded values'


@dataclass(frozen=True)
class Stored:
    """Tensors as a file of a checkpoint has them."""

    format: str
    codes: Any
    extra: Any = None  # scales, or the remainder


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).rpartition(".")[2]


def _kind(tensor: Any) -> Optional[tuple[str, int]]:
    kind = type(tensor)
    return _CODED.get(kind.__name__) if kind.__module__.startswith("torchao.") else None


def _plain(torch: Any, name: str, tensor: Any) -> Any:
    if _kind(tensor):
        return tensor.dequantize().float()
    if type(tensor) is not torch.Tensor or _dtype(tensor) not in _FLOATS:
        kind = _dtype(tensor) if type(tensor) is torch.Tensor else type(tensor).__name__
        raise errors.InvalidArgument(f"{name} is of {kind}; float32, bfloat16, float16, and torchao's optimizer states are read")
    return tensor


def floats(torch: Any, name: str, sizes: tuple[int, ...], chunks: list[Chunk]) -> Any:
    """The tensor that the chunks are boxes of: bf16 if all are, else fp32."""
    plain = [_plain(torch, name, chunk.tensor) for chunk in chunks]
    bf16 = bool(plain) and all(_dtype(tensor) == "bfloat16" for tensor in plain)
    whole = torch.empty(sizes, dtype=torch.bfloat16 if bf16 else torch.float32, device="cpu")
    filled = 0
    for chunk, tensor in zip(chunks, plain):
        whole[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, tensor.shape))] = tensor
        filled += tensor.numel()
    if filled != whole.numel():
        raise errors.InvalidArgument(f"{name} is there with {filled} of its {whole.numel()} elements")
    return whole


def _levels(format: str, signed: bool) -> Any:
    codes = np.arange(256, dtype=np.uint8) if format == "dyn8" else np.arange(0, 256, 34, dtype=np.uint8) + np.uint8(1)
    parts = {"codes": codes, "scales": np.ones(1, np.float32)}
    return numerics.decode(parts, format, (256 if format == "dyn8" else 16,), signed=signed, compat="torchao")


def _check(name: str, tensor: Any, format: str, block: int, signed: bool) -> None:
    """That its codes mean here what they mean there."""
    if tensor.numel() != tensor.scale.numel() * block:
        raise errors.InvalidArgument(f"{name} has a scale for {tensor.numel() // max(tensor.scale.numel(), 1)} elements; "
                                     f"{format} has one for {block}; {_DECODE}")
    if _dtype(tensor.scale) != "float32":
        raise errors.InvalidArgument(f"{name} has scales of {_dtype(tensor.scale)}; {format} has them in fp32; {_DECODE}")
    if format == "fp8":
        return
    ours, theirs = _levels(format, signed), tensor.qmap.numpy()
    # Tables differ in the last places from machine to machine (docs/numerics.md).
    if bool(tensor.signed) != signed or not np.allclose(theirs, ours, rtol=1e-6, atol=0):
        raise errors.InvalidArgument(f"{name} has other levels than {format}, as of another version of torchao, or made while the "
                                     f"default dtype was not fp32; {_DECODE}")


def _quantized(torch: Any, name: str, sizes: tuple[int, ...], chunks: list[Chunk], signed: bool) -> Stored:
    """The same codes and scales, of chunks that are all of one kind."""
    kinds = {_kind(chunk.tensor) for chunk in chunks}
    kind = kinds.pop()
    if kind is None or kinds:
        raise errors.InvalidArgument(f"{name} is quantized on some ranks and not on others, as torchao does with small shards; "
                                     f"{_DECODE}")
    format, block = kind
    elements, row, seen = math.prod(sizes), math.prod(sizes[1:]), 0
    for chunk in chunks:
        _check(name, chunk.tensor, format, block, signed)
        if tuple(chunk.tensor.shape[1:]) != sizes[1:] or any(chunk.offsets[1:]) or (sizes and chunk.offsets[0] * row != seen):
            raise errors.InvalidArgument(f"{name} is sharded along another dimension than the first, so that its blocks are not "
                                         f"those of the whole tensor; {_DECODE}")
        seen += chunk.tensor.numel()
    if seen != elements:
        raise errors.InvalidArgument(f"{name} is there with {seen} of its {elements} elements")
    codes = torch.cat([chunk.tensor.codes.reshape(-1).view(torch.uint8) for chunk in chunks])
    scales = torch.cat([chunk.tensor.scale for chunk in chunks])
    return _shaped(torch, format, sizes, codes, scales)


def _shaped(torch: Any, format: str, sizes: tuple[int, ...], codes: Any, scales: Any) -> Stored:
    if format != "dyn4":
        codes = codes.reshape(sizes)
    return Stored(format, codes.view(torch.float8_e4m3fn) if format == "fp8" else codes, scales)


def state(torch: Any, name: str, sizes: tuple[int, ...], chunks: list[Chunk], signed: bool, wanted: Optional[str]) -> Stored:
    """A state in the format that is wanted, or as it is: codes where it has them, else fp32 or bf16_sr."""
    kinds = [_kind(chunk.tensor) for chunk in chunks]
    if any(kinds) and (wanted is None or all(kind and kind[0] == wanted for kind in kinds)):
        return _quantized(torch, name, sizes, chunks, signed)
    values = floats(torch, name, sizes, chunks)
    if wanted is None:
        wanted = "bf16_sr" if _dtype(values) == "bfloat16" else "fp32"
    return encoded_state(torch, values, wanted, signed)


def encoded_state(torch: Any, values: Any, format: str, signed: bool) -> Stored:
    if format == "fp32":
        return Stored(format, values.float())
    if format == "bf16_sr":
        return Stored(format, values.to(torch.bfloat16))
    parts = numerics.encode(values.float().contiguous(), format, signed=signed)
    scales = torch.from_numpy(parts["scales"].reshape(-1))
    if format == "fp8x32":
        scales = scales.view(torch.bfloat16)
    return _shaped(torch, format, tuple(values.shape), torch.from_numpy(parts["codes"].reshape(-1)), scales)


def weights(torch: Any, values: Any, format: str) -> Stored:
    """Rounded to nearest where the format has less than they have."""
    if format == "fp32":
        return Stored(format, values.float())
    if format in ("bf16", "bf16_sr"):
        return Stored(format, values.to(torch.bfloat16))
    parts = numerics.encode(values.float().contiguous(), format)
    codes = torch.from_numpy(parts["codes"])
    if format == "nf4":  # its scales as a job stores them: the largest magnitudes of 64 elements
        flat = values.detach().float().reshape(-1)
        whole = torch.nn.functional.pad(flat, (0, -flat.numel() % 64))
        return Stored(format, codes, whole.reshape(-1, 64).abs().amax(dim=1))
    if format == "int8_row":
        return Stored(format, codes.view(torch.int8), torch.from_numpy(parts["scales"].reshape(-1)))
    remainder = torch.from_numpy(parts["remainder"])
    return Stored(format, codes.view(torch.bfloat16), remainder.view(torch.uint16 if format == "bf16+16" else torch.uint8))


def decoded(torch: Any, state_name: str, format: str, shape: tuple[int, ...], codes: Any, scales: Any) -> Any:
    """The fp32 values of a state as a checkpoint has it: what the job steps from."""
    if format in ("fp32", "bf16_sr"):
        return codes.float()
    # Copied: in a file they begin anywhere.
    parts = {"codes": codes.reshape(-1), "scales": scales.reshape(-1).clone()}
    return torch.from_numpy(numerics.decode(parts, format, shape, signed=SIGNED.get(state_name, True)))
