"""Tensors of a version as PyTorch's, and whole versions into modules. PyTorch is imported when it is used."""
from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import names
from .errors import InvalidArgument

if TYPE_CHECKING:
    from ._version import Tensor, Version

__all__ = ["LoadMismatch", "load_into", "to_torch"]

_SHOWN = 8  # names of a kind, in one message


class LoadMismatch(InvalidArgument):
    """A module and a version do not fit. Nothing was written."""

    def __init__(
        self, missing: Sequence[str] = (), unexpected: Sequence[str] = (), mismatched: Sequence[str] = ()
    ) -> None:
        super().__init__(list(missing), list(unexpected), list(mismatched))
        self.missing = list(missing)  # parameters of the module that the version lacks, as the module has them
        self.unexpected = list(unexpected)  # canonical names of the version that the module lacks
        self.mismatched = list(mismatched)  # tensors that cannot take what the version has, with the reason

    def __str__(self) -> str:
        kinds = {
            "the version lacks": self.missing, "the module lacks": self.unexpected, "do not fit:": self.mismatched,
        }
        return "; ".join(f"{what} {_listed(found)}" for what, found in kinds.items() if found)


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def to_torch(tensor: Tensor, copy: bool) -> Any:
    torch: Any = importlib.import_module("torch")
    if tensor.quantized:
        return torch.from_numpy(tensor.decode())
    array = tensor.array
    made = torch.from_numpy(_claimed_writable(array if tensor.format == "fp32" else array.view("int16")))
    made = made if tensor.format == "fp32" else made.view(torch.bfloat16)
    return made.clone() if copy else made


class _Claim:
    """The memory of an array, said to be writable."""

    def __init__(self, array: Any) -> None:
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self.keeps = array


def _claimed_writable(array: Any) -> Any:
    """PyTorch has no read-only tensors, and warns of each; catching that is not for threads."""
    import numpy as np

    return np.asarray(_Claim(array))


def load_into(module: Any, version: Version, **rules: Sequence[str]) -> None:
    torch: Any = importlib.import_module("torch")
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = {name: value for name, value in module.named_buffers(remove_duplicate=False) if name not in parameters}
    targets = {**buffers, **parameters}
    canonical = dict(zip(targets, names.canonical_many(list(targets), **rules)))
    shapes = version.shapes
    copies = _copies(targets, canonical, shapes)
    _check(parameters, canonical, version, copies)
    with torch.no_grad():
        for target, name in copies.values():
            target.copy_(to_torch(version.tensor(name), copy=False))


def _copies(targets: dict[str, Any], canonical: dict[str, str], shapes: dict[str, Any]) -> dict[int, tuple[Any, str]]:
    """Each tensor of the module once, by its identity, with the name that the version has it by."""
    return {id(target): (target, canonical[raw]) for raw, target in targets.items() if canonical[raw] in shapes}


def _check(
    parameters: dict[str, Any], canonical: dict[str, str], version: Version, copies: dict[int, tuple[Any, str]]
) -> None:
    shapes, ties = version.shapes, version.ties
    missing = [raw for raw, target in parameters.items() if id(target) not in copies]
    had = set(canonical.values())
    had |= {ties[name] for name in had if name in ties}  # one tensor, whatever it is called
    unexpected = [name for name in shapes if name not in had and ties.get(name) not in had]
    mismatched = []
    for target, name in copies.values():
        reason = _unfit(target, shapes[name])
        if reason:
            mismatched.append(f"{name} {reason}")
    if missing or unexpected or mismatched:
        raise LoadMismatch(missing, unexpected, mismatched)


def _unfit(target: Any, shape: tuple[int, ...]) -> str:
    """Why a tensor cannot take values of that shape; "" when it can."""
    if hasattr(target, "to_local"):
        return "is a DTensor; load into a module that is not sharded"
    if target.device.type == "meta":
        return "is on the meta device; give it memory first"
    if not target.is_floating_point():
        return f"is of {target.dtype}"
    if tuple(target.shape) != tuple(shape):
        return f"is of {tuple(target.shape)} in the module, of {tuple(shape)} in the version"
    return ""
