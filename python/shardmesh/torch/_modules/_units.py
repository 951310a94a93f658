"""The units of a model: what is gathered and dropped together with bucket residency. They are the blocks of its
outermost lists and dicts of modules; all other parameters are the root's, which has them from its first forward on."""
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
    """In the model's order. What is compiled with the blocks in it has none: nobody sees them being called."""
    return [] if is_compiled(model) else list(_blocks(model))


def _blocks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        inner = child
        while (name := wrapped(inner)) is not None and not is_compiled(inner):
            inner = inner._modules[name] or inner
        if is_compiled(inner):
            continue
        if _is_stack(inner):
            yield from _elements_of(inner)
        else:
            yield from _blocks(inner)


def _is_stack(module: torch.nn.Module) -> bool:
    """Whether its elements are blocks. A dict that has lists beside other modules is the frame of a model."""
    if isinstance(module, torch.nn.Sequential):
        return _alike(module)
    if isinstance(module, torch.nn.ModuleDict):
        nested = [not _is_called(child) for child in module.children()]
        return all(nested) or not any(nested)
    return isinstance(module, torch.nn.ModuleList)


def _elements_of(stack: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """An element that is itself a list or a dict is never called; those in it are."""
    for element in stack.children():
        if _is_called(element):
            yield element
        else:
            yield from _elements_of(element)


def _is_called(module: torch.nn.Module) -> bool:
    """Containers, such as ModuleList and ParameterDict, have no forward."""
    return getattr(module.forward, "__func__", None) is not torch.nn.Module.forward


def is_compiled(module: torch.nn.Module) -> bool:
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def eager(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """It and the modules in it, but for what is compiled."""
    if not is_compiled(module):
        yield module
        for child in module.children():
            yield from eager(child)


def _alike(modules: torch.nn.Sequential) -> bool:
    """Layers of a stack, not the parts of one."""
    kinds = {type(module) for module in modules}
    return len(modules) > 1 and len(kinds) == 1 and all(any(True for _ in module.children()) for module in modules)


def units(model: torch.nn.Module, parameters: Sequence[Parameter]) -> tuple[list[Unit], tuple[int, ...]]:
    """Those of the blocks, and the parameters of the root. One that two of them have is the root's, and so is one that
    a block and a module outside of all blocks have."""
    index_of = {id(parameter.tensor): index for index, parameter in enumerate(parameters)}
    users: dict[int, set[int]] = {index: set() for index in index_of.values()}
    found = blocks(model)
    inside: set[int] = set()  # modules
    for number, block in enumerate(found):
        inside.update(id(module) for module in block.modules())
        for tensor in block.parameters():
            if id(tensor) in index_of:
                users[index_of[id(tensor)]].add(number)
    for module in model.modules():
        if id(module) not in inside:
            for tensor in module.parameters(recurse=False):
                if id(tensor) in index_of:
                    users[index_of[id(tensor)]].add(_ROOT)
    result = [
        Unit(block, tuple(sorted(index for index, numbers in users.items() if numbers == {number})))
        for number, block in enumerate(found)
    ]
    root = (index for index, numbers in users.items() if len(numbers) > 1 or _ROOT in numbers)
    return [unit for unit in result if unit.parameters], tuple(sorted(root))


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
_ROOT = -1
