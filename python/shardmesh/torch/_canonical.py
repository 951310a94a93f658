"""State dicts of modules under canonical names: the same with wrappers as without, in whatever order."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch

from .. import names
from .._load import LoadMismatch
from ._wrappers import walk, wrapped

_naming: ContextVar[bool] = ContextVar("shardmesh_naming", default=False)

__all__ = ["load_state_dict", "state_dict"]


def state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by canonical name, each of a tie's names too; they share the model's memory.

    torch's own has the wrappers' segments in its names, and get_model_state_dict() of torch.distributed.checkpoint
    takes some of them off a user's own names, too. AlreadyExists: two tensors have one name.
    """
    return {name: tensor.detach() for name, tensor in _tensors(model)}


def load_state_dict(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Puts a state dict into the model, in place, whichever of both has wrappers; its Optimizer takes it up.

    Names that are not the model's are read without wrappers (_orig_mod, _checkpoint_wrapped_module,
    _fsdp_wrapped_module; `module` at the head). Of a tie, one name is enough.
    LoadMismatch: names that are missing or unexpected, and other shapes, all of them; nothing was loaded.
    """
    tensors = list(_tensors(model))
    wanted = dict(tensors)
    given: dict[str, torch.Tensor] = {}
    unexpected = []
    for raw, value in state.items():
        name = _name_of(raw, wanted)
        if name is None:
            unexpected.append(raw)
        else:
            given[name] = whole(value)
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
    token = _naming.set(True)
    try:
        own = model.state_dict(keep_vars=True)
    finally:
        _naming.reset(token)
    model.load_state_dict(
        {raw: given[of_tensor[id(one)]] for raw, one in own.items() if id(one) in of_tensor}, strict=False
    )


def is_naming() -> bool:
    """Whether a state_dict() is asked for the names of parameters alone: then its hooks leave those in it."""
    return _naming.get()


def whole(value: Any) -> Any:
    """A DTensor as the tensor that it is a part of, which is for every rank of it to ask; anything else as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _name_of(raw: str, wanted: Mapping[str, Any]) -> str | None:
    if raw in wanted:
        return raw
    for root in (), ("module",), ("_orig_mod", "module"), ("module", "_orig_mod"):
        try:
            name = names.canonical(raw, root_wrappers=root)
        except ValueError:
            continue
        if name in wanted:
            return name
    return None


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for one in walk(model).found:
        yield one.name, one.tensor
    yield from buffers(model)


def buffers(module: torch.nn.Module, name: tuple[str, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Persistent ones, each under all of its canonical names."""
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield ".".join((*name, key)), buffer
    segment = wrapped(module)
    for key, child in module._modules.items():
        if child is not None:
            yield from buffers(child, name if key == segment else (*name, key))
