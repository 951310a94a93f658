"""State dicts of modules under canonical names: the same with wrappers as without, in whatever order."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from ..._load import LoadMismatch
from ._matching import matched
from ._wrappers import walk, wrapped

_naming: ContextVar[bool] = ContextVar("shardmesh_naming", default=False)

__all__ = ["load_state_dict", "state_dict"]


def state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by canonical name, each of a tie's names too; they share the model's memory,
    but for weights that are not there between calls (residency="bucket"), of which these are copies.

    torch's own has the wrappers' segments in its names, and get_model_state_dict() of torch.distributed.checkpoint
    takes some of them off a user's own names, too. AlreadyExists: two tensors have one name.
    """
    found = list(_tensors(model))
    elsewhere = {name: value for _, name, value in _own(model, found) if value is not None}
    return {name: elsewhere.get(name, tensor).detach() for name, _, tensor in found}


def load_state_dict(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Puts a state dict into the model, in place, whichever of both has wrappers; its Optimizer takes it up.

    Wrappers (_orig_mod, _checkpoint_wrapped_module, _fsdp_wrapped_module, module) are taken off names where that makes
    them the model's. All names are read together, so a child of the model that is called like a wrapper is told from
    one. Of a tie, one name is enough.
    LoadMismatch: names that are missing or unexpected, and other shapes, all of them; nothing was loaded.
    """
    found = list(_tensors(model))
    tensors = [(name, tensor) for name, _, tensor in found]
    wanted = dict(tensors)
    given: dict[str, torch.Tensor] = {}
    unexpected = []
    for raw, name in matched(state, wanted, {raw: name for name, raw, _ in found}).items():
        if name is None:
            unexpected.append(raw)
        else:
            given[name] = whole(state[raw])
    of_tensor: dict[int, str] = {}  # by which name it is given
    for name, tensor in tensors:
        if name in given:
            of_tensor.setdefault(id(tensor), name)
    first: dict[int, str] = {}
    for name, tensor in tensors:
        first.setdefault(id(tensor), name)
    missing = [name for key, name in first.items() if key not in of_tensor]
    misfits = [
        f"{name} is of {tuple(wanted[name].shape)} in the module, of {tuple(value.shape)} in the state"
        for name, value in given.items() if tuple(value.shape) != tuple(wanted[name].shape)
    ]
    if missing or unexpected or misfits:
        raise LoadMismatch(missing, unexpected, misfits)
    # By the names of this very model's own state_dict(): so its modules' hooks run.
    own = [(raw, id(wanted[name])) for raw, name, _ in _own(model, found)]
    if lost := first.keys() - {tensor for _, tensor in own}:
        raise LoadMismatch(mismatched=[
            f"{name} is left out by the model's own state_dict(), of which a hook took two names for one, or dropped it"
            for tensor, name in first.items() if tensor in lost
        ])
    model.load_state_dict({raw: given[of_tensor[tensor]] for raw, tensor in own}, strict=False)


def _own(
    model: torch.nn.Module, found: Sequence[tuple[str, str, torch.Tensor]]
) -> Iterator[tuple[str, str, torch.Tensor | None]]:
    """Names of the model's own state_dict(), the canonical ones, and values where a hook gives others than the tensors."""
    name_of = {id(tensor): name for name, _, tensor in reversed(found)}
    token = _naming.set(True)
    try:
        own = model.state_dict(keep_vars=True)
    finally:
        _naming.reset(token)
    by_name = matched(own, {name for name, _, _ in found}, {raw: name for name, raw, _ in found})
    for raw, value in own.items():
        if id(value) in name_of:
            yield raw, name_of[id(value)], None
        elif (name := by_name[raw]) is not None and isinstance(value, torch.Tensor):
            yield raw, name, value


def is_naming() -> bool:
    """Whether a state_dict() is asked for the names of parameters alone: then its hooks leave those in it."""
    return _naming.get()


def whole(value: Any) -> Any:
    """A DTensor as the tensor that it is a part of, which is for every rank of it to ask; anything else as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Canonical name, the name with wrappers, tensor."""
    for one in walk(model).found:
        yield one.name, one.given, one.tensor
    yield from _buffers(model, (), ())


def buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Persistent ones, each under all of its canonical names."""
    for name, _, buffer in _buffers(module, (), ()):
        yield name, buffer


def _buffers(
    module: torch.nn.Module, name: tuple[str, ...], given: tuple[str, ...]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield ".".join((*name, key)), ".".join((*given, key)), buffer
    segment = wrapped(module)
    for key, child in module._modules.items():
        if child is not None:
            yield from _buffers(child, name if key == segment else (*name, key), (*given, key))
