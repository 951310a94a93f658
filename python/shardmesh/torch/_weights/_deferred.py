"""Models that were made on the meta device: their parameters get weights without any rank making room for them, but
rank 0, which gives the first ones.

    with torch.device("meta"):
        model = GPT(config)
    optimizer = shardmesh.torch.Optimizer(model, "AdamW")

First weights are what reset_parameters() of each module, then _init_weights() of the nearest module above it that has
one (as models of transformers do), or init=, makes of them: children before their parents, with a seed of the job's
seed and the module's canonical name. So they depend on neither ranks, mesh nor order of wrapping. Rank 0 has them all
once, in fp32, while it hands them over; that is so with residency="bucket", too. Buffers are made the same way on every
rank. A
job that has weights keeps them: nothing is drawn.

Parameters stay the same objects, in the model, in ties and in groups.
"""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Optional

import torch

from ... import errors, names
from .._modules._model import Facts
from ._quantized import without_memory

Init = Callable[[torch.nn.Module], Any]


class _Module(NamedTuple):
    module: torch.nn.Module
    name: str  # canonical
    ways: tuple[Init, ...]  # what gives it values, in order
    own: tuple[tuple[str, torch.nn.Parameter], ...]  # on the meta device
    buffers: tuple[tuple[str, torch.Tensor], ...]  # the same
    covered: bool  # it, or one above it, has a way


class Deferred:
    """Of a model with some parameters or buffers on the meta device, or with none: then nothing is done."""

    def __init__(self, model: Optional[torch.nn.Module], of: Facts, seed: int, init: Optional[Init]) -> None:
        """InvalidArgument: no model, a tensor that is neither parameter nor buffer."""
        self._seed, self._init = seed, init
        self._parameters = {id(one.tensor): one.tensor for one in of.parameters if one.tensor.is_meta}
        self._given = [one.tensor for one in of.parameters if not one.tensor.is_meta]
        self._modules: list[_Module] = []
        if model is None:
            if self._parameters:
                raise errors.InvalidArgument(
                    "parameters are on the meta device; give the model, or model=, for their first weights")
            return
        rules, seen = of.rules._asdict(), set[int]()

        def visit(module: torch.nn.Module, given: str, above: Optional[Init], covered: bool) -> bool:
            """Whether something in it is on the meta device."""
            if id(module) in seen:
                return False
            seen.add(id(module))
            above = getattr(module, "_init_weights", None) or above
            ways = _ways(module, init or above)
            covered = covered or bool(ways)
            inside = [visit(child, f"{given}{name}.", above, covered) for name, child in module.named_children()]
            own = tuple((name, one) for name, one in module._parameters.items() if one is not None and one.is_meta)
            buffers = tuple((name, one) for name, one in module._buffers.items() if one is not None and one.is_meta)
            if own or buffers or any(inside):
                canonical = names.canonical(given + "_", **rules)[:-1].rstrip(".")
                self._modules.append(_Module(module, canonical, ways, own, buffers, covered))
                return True
            return False

        visit(model, "", None, False)
        _check_plain(model)

    def make_buffers(self) -> None:
        """On every rank. InvalidArgument: nothing gives one its values."""
        for one in self._modules:
            if not one.buffers:
                continue
            for _, buffer in one.buffers:
                _give_memory(buffer)
            for _, parameter in one.own:
                _give_memory(parameter)
            self._call(one)
            for _, parameter in one.own:
                _take_memory(parameter)
            without = [name for name, buffer in one.buffers if _unset(buffer)]
            if without:
                raise _nothing_gives(one, "buffers", without)

    def check(self) -> None:
        """InvalidArgument: parameters whose first weights nothing gives."""
        for one in self._modules:
            if one.own and not one.covered:
                raise _nothing_gives(one, "parameters", [name for name, _ in one.own])

    def initialize(self) -> None:
        """Gives all their first weights, at rank 0 of a job that has none. InvalidArgument: as check()."""
        done: list[torch.Tensor] = []
        with _untouched(self._given if self._modules else []):
            for one in self._modules:
                shared = [parameter for _, parameter in one.own if not parameter.is_meta]  # tied to one that is done
                for _, parameter in one.own:
                    if parameter.is_meta:
                        _give_memory(parameter)
                        done.append(parameter)
                kept = [(buffer, buffer.clone()) for _, buffer in one.buffers]
                with _untouched(shared):
                    self._call(one)
                for buffer, before in kept:
                    buffer.copy_(before)
        for one in self._modules:
            without = [name for name, parameter in one.own if _unset(parameter)]
            if without:
                raise _nothing_gives(one, "parameters", without)

    def taken(self, tensor: torch.Tensor) -> None:
        """Its first weights are elsewhere."""
        if id(tensor) in self._parameters:
            tensor.data = without_memory(tensor)

    def finish(self) -> None:
        """All are on the CPU, without memory until they are placed."""
        for parameter in self._parameters.values():
            if parameter.is_meta:
                _swap(parameter, _like(parameter, without_memory(parameter)))
            else:
                parameter.data = without_memory(parameter)

    def _call(self, one: _Module) -> None:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            digest = hashlib.sha256(f"{self._seed}/{one.name}".encode()).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            for way in one.ways:
                way(one.module)


def _ways(module: torch.nn.Module, then: Optional[Init]) -> tuple[Init, ...]:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    first: tuple[Init, ...] = () if reset is None else (lambda _: reset(),)
    return first if then is None else (*first, then)


@contextmanager
def _untouched(tensors: list[torch.nn.Parameter]) -> Iterator[None]:
    """What is written to these within it has no effect."""
    stand_ins = [_like(tensor, torch.empty_like(tensor, device="meta")) for tensor in tensors]
    for tensor, stand_in in zip(tensors, stand_ins):
        _swap(tensor, stand_in)
    try:
        yield
    finally:
        for tensor, stand_in in zip(tensors, stand_ins):
            _swap(tensor, stand_in)


def _give_memory(tensor: torch.Tensor) -> None:
    """Of values that nothing gives a tensor on purpose."""
    memory = torch.empty_like(tensor, device="cpu")
    if memory.is_floating_point() or memory.is_complex():
        memory.fill_(torch.nan)
    elif memory.dtype != torch.bool:
        memory.fill_(torch.iinfo(memory.dtype).min)
    _swap(tensor, _like(tensor, memory))


def _take_memory(tensor: torch.Tensor) -> None:
    _swap(tensor, _like(tensor, torch.empty_like(tensor, device="meta")))


def _unset(tensor: torch.Tensor) -> bool:
    """Whether it has elements as _give_memory() left them."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    if tensor.dtype in (torch.bool, torch.uint8):
        return False
    return bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _like(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Another of the same kind."""
    data = data.detach()
    if isinstance(tensor, torch.nn.Parameter):
        data = torch.nn.Parameter(data, requires_grad=tensor.requires_grad)
    data.__dict__.update({name: value for name, value in tensor.__dict__.items() if name != "_is_hf_initialized"})
    return data


def _swap(tensor: torch.Tensor, other: torch.Tensor) -> None:
    try:
        utils: Any = torch.utils
        utils.swap_tensors(tensor, other)
    except RuntimeError as error:
        raise errors.Unimplemented(
            f"a tensor of the meta device, of shape {list(tensor.shape)}, is in use elsewhere ({error}); give the "
            "optimizer the model before anything is done with it"
        ) from error


def _check_plain(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise errors.InvalidArgument(
                    f'attribute {attribute} of module "{name}" is a tensor on the meta device, and neither parameter '
                    'nor '
                    "buffer; make it a buffer, which init= or reset_parameters() can fill"
                )


def _nothing_gives(one: _Module, what: str, without: list[str]) -> errors.InvalidArgument:
    return errors.InvalidArgument(
        f'module "{one.name}" ({type(one.module).__name__}) has {what} on the meta device, {", ".join(without[:3])}, '
        'and '
        "nothing gives them values: give it reset_parameters(), or the optimizer init=, a function that is called with "
        "each module"
    )
