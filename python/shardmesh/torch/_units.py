"""The units of a model: what is gathered and dropped together with bucket residency. They are the blocks of its
outermost lists of modules; all other parameters are the root's, which has them from its first forward on."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ._model import Parameter
from ._wrappers import wrapped


class Unit(NamedTuple):
    module: torch.nn.Module  # as the model calls it: the outermost wrapper
    parameters: tuple[int, ...]  # indices


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """In the model's order; of a model that was compiled as a whole, none: nobody sees its blocks being called."""
    return [] if type(model).__name__ == "OptimizedModule" else list(_blocks(model))


def _blocks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        inner = child
        while (name := wrapped(inner)) is not None:
            inner = inner._modules[name] or inner
        if isinstance(inner, torch.nn.ModuleList):
            yield from inner
        elif isinstance(inner, torch.nn.Sequential) and _alike(inner):
            yield from inner
        else:
            yield from _blocks(inner)


def _alike(modules: torch.nn.Sequential) -> bool:
    """Layers of a stack, not the parts of one."""
    kinds = {type(module) for module in modules}
    return len(modules) > 1 and len(kinds) == 1 and all(any(True for _ in module.children()) for module in modules)


def units(model: torch.nn.Module, parameters: Sequence[Parameter]) -> tuple[list[Unit], tuple[int, ...]]:
    """Those of the blocks, and the parameters of the root. One that two of them have is the root's."""
    index_of = {id(parameter.tensor): index for index, parameter in enumerate(parameters)}
    users: dict[int, set[int]] = {}
    found = blocks(model)
    for number, block in enumerate(found):
        for tensor in block.parameters():
            if id(tensor) in index_of:
                users.setdefault(index_of[id(tensor)], set()).add(number)
    inside = {id(parameter) for block in found for parameter in block.parameters()}
    outside = {
        index_of[id(tensor)] for module in model.modules() for tensor in module.parameters(recurse=False)
        if id(tensor) in index_of and id(tensor) not in inside
    }
    shared = {index for index, numbers in users.items() if len(numbers) > 1}
    result = [
        Unit(block, tuple(sorted(index for index, numbers in users.items() if numbers == {number})))
        for number, block in enumerate(found)
    ]
    return [unit for unit in result if unit.parameters], tuple(sorted(outside | shared))


def bucket_elements(model: torch.nn.Module, parameters: Sequence[Parameter]) -> tuple[int, int]:
    """How large buckets are to be: a quarter of a block, since one that begins within a block is held for two of them.
    And how many a rank may hold beside the one in use: the root's, and those of two blocks."""
    found, root = units(model, parameters)
    largest = max((_elements(parameters, unit.parameters) for unit in found), default=0)
    each = max(1024, largest // 4 if largest else 1 << 20)
    return each, -(-_elements(parameters, root) // each) + 2 * (4 + 1 + _KINDS)


def _elements(parameters: Sequence[Parameter], indices: Sequence[int]) -> int:
    return sum(parameters[index].tensor.numel() for index in indices)


_KINDS = 4  # of parameters (formats, states, groups), about: those of one share no bucket with another
