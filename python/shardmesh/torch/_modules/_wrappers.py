"""A module tree as it would be without wrappers: which child a wrapper holds, and which one a user happened to name so.

Decided by what a module is, never by what it is called; a wrapper's class that is not loaded has no instances.
"""
from __future__ import annotations

import sys
from typing import NamedTuple

import torch

from ... import errors, names

_MODULE = "module"
_SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# Segment under which the wrapped module lies, where the wrapper's class is, what it is called.
_CLASSES = (
    ("_orig_mod", "torch._dynamo.eval_frame", "OptimizedModule"),
    ("_checkpoint_wrapped_module", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"),
    ("_fsdp_wrapped_module", "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    (_MODULE, "torch.nn.parallel.distributed", "DistributedDataParallel"),
    (_MODULE, "torch.nn.parallel.data_parallel", "DataParallel"),
    (_MODULE, "deepspeed.runtime.engine", "DeepSpeedEngine"),
    (_MODULE, "megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel"),
)


class Rules(NamedTuple):
    """What shardmesh.names must know to make names of a model canonical: names.canonical(raw, **rules._asdict())."""

    root_wrappers: tuple[str, ...] = ()
    literal: tuple[str, ...] = ()
    wrapped_at: tuple[str, ...] = ()


class Found(NamedTuple):
    """A name of a parameter; several may be of one."""

    name: str  # canonical
    given: str  # wrappers included
    tensor: torch.nn.Parameter


class Tree(NamedTuple):
    found: list[Found]  # in the order of Module.named_parameters, with each of the names of each
    rules: Rules


def wrapped(module: torch.nn.Module) -> str | None:
    """The name of the child that `module` is a wrapper of; None: it is no wrapper."""
    for segment, where, name in _CLASSES:
        kind = getattr(sys.modules.get(where), name, None)
        if isinstance(kind, type) and isinstance(module, kind) and module._modules.get(segment) is not None:
            return segment
    return None


def walk(model: torch.nn.Module) -> Tree:
    """Every parameter of `model` under its names, and the rules that make them canonical.

    AlreadyExists: two parameters have one canonical name, as with a wrapper that has a parameter of its own.
    InvalidArgument: a parameter's name can be none of a job's.
    """
    root: list[str] = []
    at: torch.nn.Module | None = model
    while at is not None and (segment := wrapped(at)) is not None:
        root.append(segment)
        at = at._modules[segment]
    literal: list[str] = []
    wrapped_at: list[str] = []
    found: list[Found] = []
    _visit(model, (), (), [], found, literal, wrapped_at)
    rules = Rules(tuple(root), tuple(dict.fromkeys(literal)), tuple(dict.fromkeys(wrapped_at)))
    _check(found, rules)
    return Tree(found, rules)


def _visit(
    module: torch.nn.Module, given: tuple[str, ...], name: tuple[str, ...], above: list[torch.nn.Module],
    found: list[Found], literal: list[str], wrapped_at: list[str],
) -> None:
    if any(module is other for other in above):
        return  # a module that contains itself
    if isinstance(module, torch.jit.ScriptModule):
        raise errors.Unimplemented(f"{_quoted('.'.join(given))} is a ScriptModule, whose parameters cannot be "
                                   "replaced; pass the module that was scripted")
    for key, parameter in module._parameters.items():
        if parameter is not None:
            found.append(Found(".".join((*name, key)), ".".join((*given, key)), parameter))
    segment = wrapped(module)
    if segment == "_fsdp_wrapped_module" and getattr(module, "_handle", None) is not None:
        raise errors.Unimplemented(f"{_quoted('.'.join(given))} is under FullyShardedDataParallel, which cut its "
                                   "weights up already; jobs cut weights up themselves: pass the model before it is "
                                   "wrapped")
    for key, child in module._modules.items():
        if child is None:
            continue
        below = (*given, key)
        if key == segment and key == _MODULE and given:
            wrapped_at.append(".".join(given))
        if key != segment and key in _SEGMENTS:
            literal.append(".".join(below))
        _visit(child, below, name if key == segment else (*name, key), [*above, module], found, literal, wrapped_at)


def _check(found: list[Found], rules: Rules) -> None:
    first: dict[str, Found] = {}
    canonical = names.canonical_many([one.given for one in found], **rules._asdict())
    for one, by_rules in zip(found, canonical):
        if by_rules != one.name:
            raise errors.InvalidArgument(f"{_quoted(one.given)} reads {_quoted(by_rules)} without wrappers, but is "
                                         f"{_quoted(one.name)}; rename the module that is called like a wrapper")
        other = first.setdefault(one.name, one)
        if other.tensor is not one.tensor:
            raise errors.AlreadyExists(f"{_quoted(other.given)} and {_quoted(one.given)} are two parameters, and both "
                                       f"are {_quoted(one.name)} without wrappers; rename one")


def _quoted(name: str) -> str:
    return f'"{name}"' if name else "the model"
