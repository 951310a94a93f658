"""A model's persistent buffers in a checkpoint: BatchNorm's statistics, for one. The service does not have them: the
trainer that saves hands its own over, and every rank of a trainer that resumes gets those."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch

from .. import _client, errors
from ._job._session import LOG
from ._modules._canonical import buffers

_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}
_OF_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_LISTED = 5  # names in a message

Stored = tuple[str, str, Sequence[int], bytes]  # name, dtype as safetensors files call it, shape, bytes


class _Form(NamedTuple):
    """How a buffer is stored."""

    dtype: str
    shape: list[int]


def warn_of_missing(model: Optional[torch.nn.Module]) -> None:
    """Of what a checkpoint will not have."""
    if model is None:
        LOG.warning(
            "checkpoints have no buffers (BatchNorm's statistics, for one): the optimizer was given parameters and no "
            "model; make it with the model, or with model="
        )
        return
    extra = [name for name, module in model.named_modules() if _has_extra_state(module)]
    if extra:
        LOG.warning(
            "checkpoints do not have what get_extra_state() of %s returns; save that beside them", listed(extra)
        )


def to_save(model: Optional[torch.nn.Module]) -> list[Stored]:
    """Each under all of its canonical names. InvalidArgument: some that no file can hold; names them."""
    if model is None:
        return []
    found = list(buffers(model))
    strange = [f"{name} ({tensor.dtype}, {tensor.layout})" for name, tensor in found if _form(tensor) is None]
    if strange:
        raise errors.InvalidArgument(
            f"a checkpoint cannot hold the buffers {listed(strange)}; register them with persistent=False and save "
            "them elsewhere, or convert them"
        )
    return [_stored(name, tensor) for name, tensor in found]


class Saved:
    """The buffers of a checkpoint. DataLoss: they are not what was saved. NotFound: the checkpoint is not there."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stored: dict[str, Stored] = {one[0]: one for one in _client.checkpoint_buffers(path)}

    def check(self, model: Optional[torch.nn.Module]) -> None:
        """InvalidArgument: they are of another model; lists all differences. A checkpoint without any fits all."""
        if not self._stored:
            return
        if model is None:
            raise errors.InvalidArgument(
                f"{self._path} has the buffers {listed(list(self._stored))}, and the optimizer was given parameters "
                "and no model; make it with the model, or with model="
            )
        here = {name: _form(tensor) for name, tensor in buffers(model)}
        there = {name: _Form(dtype, list(shape)) for name, dtype, shape, _ in self._stored.values()}
        problems = [
            ("not in the checkpoint", [name for name in here if name not in there]),
            ("not in the model", [name for name in there if name not in here]),
            ("of another shape or dtype", [
                f"{name} {_words(there[name])} there, {_words(form)} here"
                for name, form in here.items() if name in there and form != there[name]
            ]),
        ]
        if any(names for _, names in problems):
            raise errors.InvalidArgument(
                f"{self._path} is of a model with other buffers; nothing was loaded:\n  "
                + "\n  ".join(f"{what}: {listed(names)}" for what, names in problems if names)
            )

    def load(self, model: Optional[torch.nn.Module]) -> None:
        """Into the model, in place. REQUIRES: check()."""
        if model is None:
            return
        found = list(buffers(model))
        if found and not self._stored:
            LOG.warning(
                "%s has no buffers: those of the model stay as they are: %s. An older build saved it, or shardctl, "
                "which has no model; optimizer.save() saves them", self._path, listed([name for name, _ in found])
            )
        with torch.no_grad():
            for name, tensor in found:
                if name in self._stored:
                    _put(name, tensor, self._stored[name])


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _has_extra_state(module: torch.nn.Module) -> bool:
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def _plain(tensor: torch.Tensor) -> Optional[torch.Tensor]:
    """The tensor, or a view of its memory, in a dtype that files have. None: there is no such view."""
    if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if tensor.dtype in _DTYPES:
        return tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach())
    return tensor.detach().view(torch.uint8) if tensor.dtype.is_floating_point and tensor.itemsize == 1 else None


def _form(tensor: torch.Tensor) -> Optional[_Form]:
    plain = _plain(tensor)
    return None if plain is None else _Form(_DTYPES[plain.dtype], list(plain.shape))


def _words(form: Optional[_Form]) -> str:
    return "of no dtype that files have" if form is None else f"{form.dtype} {form.shape}"


def _stored(name: str, tensor: torch.Tensor) -> Stored:
    plain = _plain(tensor)
    assert plain is not None
    flat = plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return name, _DTYPES[plain.dtype], list(plain.shape), flat.view(torch.uint8).numpy().tobytes()


def _put(name: str, tensor: torch.Tensor, stored: Stored) -> None:
    _, dtype, shape, data = stored
    plain = _plain(tensor)
    assert plain is not None
    flat = torch.frombuffer(bytearray(data), dtype=_OF_NAME[dtype]) if data else torch.empty(0, dtype=_OF_NAME[dtype])
    try:
        plain.copy_(flat.reshape(list(shape)))
    except RuntimeError as error:  # its elements share memory, say
        raise errors.InvalidArgument(f"buffer {name} cannot be written to in place: {error}") from None
