"""Which parameters a job can train, and what to do about those that it cannot."""
from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ... import errors, numerics

DTYPES = (torch.float32, torch.bfloat16)


class _Reach(NamedTuple):
    """The memory that a parameter's elements lie in: bytes [begin, end)."""

    space: tuple[str, int]  # addresses of two spaces have nothing to do with each other
    begin: int
    end: int
    name: str
    tensor: torch.Tensor


def check(name: str, tensor: object) -> None:
    """InvalidArgument, Unimplemented: no job can have it; the message says why and what would be right."""
    who = f'parameter "{name}"'
    if not isinstance(tensor, torch.Tensor):
        raise errors.InvalidArgument(f"{who} is a {type(tensor).__name__}; it must be a torch.nn.Parameter")
    _check_class(who, tensor)
    if not isinstance(tensor, torch.nn.Parameter):
        raise errors.InvalidArgument(f"{who} is a tensor and no torch.nn.Parameter; give parameters of a module")
    if tensor.layout != torch.strided:
        raise errors.Unimplemented(f"{who} has the layout {tensor.layout}; it must be strided: to_dense()")
    if tensor.dtype not in DTYPES:
        raise errors.Unimplemented(f"{who} has the dtype {tensor.dtype}; it is torch.float32 or torch.bfloat16: "
                                   f"{_instead(tensor.dtype)}")
    if tensor.numel() == 0:
        raise errors.InvalidArgument(f"{who} has no elements, shape {list(tensor.shape)}; remove it from the model")
    if _meets_itself(tensor):
        raise errors.InvalidArgument(f"{who} has elements that share memory, shape {list(tensor.shape)} with strides "
                                     f"{list(tensor.stride())}; make it of what contiguous() or clone() returns")


def _instead(dtype: torch.dtype) -> str:
    if dtype in (torch.float16, torch.float64):
        return "model.float() or model.to(torch.bfloat16)"
    if dtype.is_complex:
        return "make it of torch.view_as_real()"
    if dtype.is_floating_point:
        return 'keep it in one of these and have it gathered as codes, such as gather="fp8_row"'
    return "register what is not trained as a buffer; quantized weights are asked for with weights= and gather="


def _loaded(where: str, name: str) -> tuple[type, ...]:
    kind = getattr(sys.modules.get(where), name, None)
    return (kind,) if isinstance(kind, type) else ()


def _check_class(who: str, tensor: torch.Tensor) -> None:
    kind = type(tensor)
    what = f"{who} is a {kind.__module__}.{kind.__name__}"
    if torch.nn.parameter.is_lazy(tensor):
        raise errors.InvalidArgument(f"{who} is not initialized; run one batch through the lazy module first")
    if isinstance(tensor, _loaded("torch.distributed.tensor", "DTensor")):
        raise errors.Unimplemented(f"{what}, cut up already; jobs cut weights up themselves: pass the model before "
                                   "fully_shard() and parallelize_module()")
    if isinstance(tensor, _loaded("torch.distributed.fsdp._flat_param", "FlatParameter")):
        raise errors.Unimplemented(f"{what}, of several parameters and cut up already; jobs cut weights up themselves: "
                                   "pass the model before FullyShardedDataParallel")
    wrapper = torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)
    if wrapper or getattr(kind.__torch_dispatch__, "__func__", kind.__torch_dispatch__) is not _PLAIN_DISPATCH:
        raise errors.Unimplemented(f"{what}, which has no memory of plain elements; pass the model before it is "
                                   "converted (quantize_() of torchao), and ask for the format with weights= or "
                                   'gather=, such as weights="int8_row"')


_PLAIN_DISPATCH = getattr(torch.nn.Parameter.__torch_dispatch__, "__func__", torch.nn.Parameter.__torch_dispatch__)


def check_values(name: str, tensor: torch.Tensor, frozen: bool, formats: Mapping[str, str], begun: bool) -> None:
    """InvalidArgument: it has weights that are not finite, as they are or as they are stored, and is trained; or it is
    frozen and sent in a format without such values. formats: "format" and "gather", as a job's specification has them.
    begun: the job has weights already, which these are to replace."""
    tensor = tensor.detach()
    if tensor.is_meta:
        return
    advice = ("load or write finite weights; optimizer.revert() takes back what was written" if begun else
              "give it finite weights, or call requires_grad_(False) on it before the optimizer is made: frozen "
              "parameters may have any")
    given = {
        argument: formats[key][len(plain):].lower().replace("_plus_", "+")
        for argument, key, plain in (("weights", "format", "FORMAT_"), ("gather", "gather", "GATHER_FORMAT_"))
    }
    known = bool(torch.isfinite(tensor.sum(dtype=torch.float32)))  # else some are not, or their sum was too large
    bad = torch.empty(0) if known else (~torch.isfinite(tensor)).nonzero()
    if len(bad) == 0:
        if not frozen:
            _check_range(name, tensor, given, advice)
        return
    at = bad[0].tolist()
    what = f'parameter "{name}" has weights that are not finite, such as {tensor[tuple(at)].item()} at {at}'
    if not frozen:
        raise errors.InvalidArgument(f"{what}; {advice}")
    for argument, format in given.items():
        if format not in ("stored", "fp32") and not format.startswith("bf16"):
            raise errors.InvalidArgument(f'{what}, which {argument}="{format}" cannot hold; leave it as it is: give '
                                         f"{argument}= a function of a parameter's name that returns None for this one")


_NEAR_THE_END = 1e38  # of the range of fp32: no smaller weight has become infinite in any format


def _check_range(name: str, tensor: torch.Tensor, formats: Mapping[str, str], advice: str) -> None:
    """InvalidArgument: it has weights that are infinite as the job stores or sends them. REQUIRES: all are finite."""
    low, high = tensor.aminmax()
    if max(-float(low), float(high)) < _NEAR_THE_END:
        return
    for argument, format in formats.items():
        bad = (~_as_computed_with(tensor, format).isfinite()).nonzero()
        if len(bad) > 0:
            at = bad[0].tolist()
            raise errors.InvalidArgument(
                f'parameter "{name}" has weights that are infinite with {argument}="{format}", such as '
                f"{tensor[tuple(at)].item():g} at {at}; {advice}"
            )


def _as_computed_with(tensor: torch.Tensor, format: str) -> torch.Tensor:
    """Of a format in two parts, too, a model computes with the one that is bf16."""
    if format in ("fp32", "stored"):
        return tensor
    if format.startswith("bf16"):
        return tensor.to(torch.bfloat16)
    values = tensor.to("cpu", torch.float32).contiguous()
    return torch.from_numpy(numerics.decode(numerics.encode(values, format), format, tuple(values.shape))).to(tensor.device)


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last in memory, both counted."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


def _meets_itself(tensor: torch.Tensor) -> bool:
    last = 0
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1):
        if stride <= last:
            return True
        last += stride * (size - 1)
    return False


def check_apart(tensors: dict[str, torch.nn.Parameter]) -> None:
    """InvalidArgument: two of them have memory in common. REQUIRES: each passed check(), and no two are one object."""
    reaches = sorted((_reach(name, tensor) for name, tensor in tensors.items()), key=lambda reach: reach[:3])
    active: list[_Reach] = []
    for reach in reaches:
        active = [other for other in active if other.space == reach.space and other.end > reach.begin]
        for other in active:
            if _meet(other, reach):
                raise errors.InvalidArgument(
                    f'parameters "{other.name}" and "{reach.name}" are two objects that share memory; for a tie assign '
                    "the same Parameter object to both (a.weight = b.weight), else clone() one")
        active.append(reach)


def _reach(name: str, tensor: torch.nn.Parameter) -> _Reach:
    size = tensor.element_size()
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    begin = address + int(tensor.storage_offset()) * size
    space = 0 if address != 0 else storage._cdata  # without memory: on the meta device, or freed
    return _Reach((str(tensor.device), space), begin, begin + size * _extent(tensor), name, tensor)


def _meet(a: _Reach, b: _Reach) -> bool:
    """Whether two whose reaches overlap have an element in common: rows of one may lie between rows of the other."""
    size = a.tensor.element_size()
    if a.begin == b.begin or a.tensor.dtype != b.tensor.dtype or (b.begin - a.begin) % size:
        return True
    if a.tensor.is_contiguous() and b.tensor.is_contiguous():
        return True
    taken = torch.zeros((max(a.end, b.end) - a.begin) // size, dtype=torch.bool)
    taken.as_strided(a.tensor.shape, a.tensor.stride(), 0).fill_(True)
    return bool(taken.as_strided(b.tensor.shape, b.tensor.stride(), (b.begin - a.begin) // size).any())
