"""What a job needs to know of a model: its parameters under canonical names, their ties, their groups."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Optional, Union

import torch

from ... import errors, names
from ._checks import check, check_apart
from ._wrappers import Found, Rules, Tree, walk

NO_GROUP = -1
Parameters = Union[torch.nn.Module, Iterable[Any]]


class Parameter(NamedTuple):
    """A tensor with memory of its own."""

    name: str  # canonical
    given: str  # as the module has it, wrappers included
    tensor: torch.nn.Parameter
    frozen: bool  # it asks for no gradient, or is in no group
    ties: tuple[str, ...]  # further canonical names of the same Parameter object
    group: int  # index of its parameter group; NO_GROUP: none was given it
    contiguous: bool = True  # False: in another order in memory, such as channels_last
    ties_given: tuple[str, ...] = ()  # of each of `ties`, as the module has it


class Facts(NamedTuple):
    parameters: list[Parameter]  # in the model's order: the same on every rank, and for every order of wrapping
    rules: Rules  # of names as given; names.canonical(given, **rules._asdict())
    groups: list[dict[str, Any]]  # the options of each group, as given


class _Member(NamedTuple):
    """A parameter as it was given to an optimizer."""

    where: str
    group: int
    name: Optional[str]
    tensor: Any


def facts(params: Parameters, model: Optional[torch.nn.Module] = None) -> Facts:
    """The facts of a module, or of the parameters that an optimizer would be given.

    params: a module; (name, Parameter) pairs, as of named_parameters(); or parameter groups, dicts whose "params" are
    such pairs. With `model`, whose tree then has the names, also plain parameters, in groups or not. Parameters of the
    model that are in no group are frozen: part of its weights, and not trained. Without a model, pairs are taken to be
    all there is, in their order, and only wrappers that no one can mistake are taken off names (`module` is kept).

    InvalidArgument: no parameters, or none that asks for a gradient; one in two groups, or that is none of the model's;
    plain ones and no model; two that share memory. AlreadyExists: two have one name. Unimplemented: one that is of a
    kind which jobs do not have. Messages name the parameter, and say what would be right.
    """
    if isinstance(params, torch.nn.Module):
        if model is not None and model is not params:
            raise errors.InvalidArgument("two models; give the one, or parameters of it and model=")
        tree = walk(params)
        members = [_Member(f'"{one.given}"', 0, one.given, one.tensor) for one in tree.found]
        return _facts(tree, {id(member.tensor): 0 for member in members}, [{}])
    groups, members = _members(params)
    if model is None:
        tree = _tree_of(members)
    elif isinstance(model, torch.nn.Module):
        tree = walk(model)
    else:
        raise errors.InvalidArgument(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
    return _facts(tree, _group_of(members, tree, model is None), groups)


def _members(params: Any) -> tuple[list[dict[str, Any]], list[_Member]]:
    if isinstance(params, (torch.Tensor, Mapping, str)) or not isinstance(params, Iterable):
        raise errors.InvalidArgument(f"params is a {type(params).__name__}; give a module, its named_parameters(), or "
                                     'a list of parameter groups {"params": [(name, parameter), ...], "lr": ...}')
    given = list(params)
    if not any(isinstance(one, Mapping) for one in given):
        return [{}], _members_of(given, 0, None)
    groups, members = [], []
    for index, group in enumerate(given):
        if not isinstance(group, Mapping) or "params" not in group:
            raise errors.InvalidArgument(f'group {index} is no dict with "params"; give each group as one, or none')
        inside = group["params"]
        inside = [inside] if isinstance(inside, torch.Tensor) else inside
        if isinstance(inside, (Mapping, str, set)) or not isinstance(inside, Iterable):
            raise errors.InvalidArgument(f'"params" of group {index} is a {type(inside).__name__}; give a list of '
                                         "(name, parameter)")
        members += _members_of(list(inside), index, group.get("param_names"))
        groups.append({key: value for key, value in group.items() if key not in ("params", "param_names")})
    return groups, members


def _members_of(given: list[Any], group: int, param_names: Optional[Iterable[str]]) -> list[_Member]:
    """param_names: as torch.optim's groups have them beside plain parameters."""
    if param_names is not None:
        listed = list(param_names)
        if len(listed) != len(given):
            raise errors.InvalidArgument(f'group {group} has {len(given)} "params" and {len(listed)} "param_names"')
        given = [one if isinstance(one, tuple) else (name, one) for name, one in zip(listed, given)]
    members = []
    for index, one in enumerate(given):
        where = f"parameter {index} of group {group}"
        if isinstance(one, torch.Tensor):
            members.append(_Member(where, group, None, one))
        elif isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str):
            members.append(_Member(f'"{one[0]}" in group {group}', group, *one))
        else:
            raise errors.InvalidArgument(f"{where} is a {type(one).__name__}; it must be (name, parameter)")
    return members


def _tree_of(members: list[_Member]) -> Tree:
    """Of pairs alone."""
    for member in members:
        if member.name is None:
            raise errors.InvalidArgument(f"{member.where} has no name; pass the model (model=), or "
                                         "model.named_parameters() instead of model.parameters()")
    given = [member.name for member in members if member.name is not None]
    found = [Found(*one) for one in zip(names.canonical_many(given), given, (member.tensor for member in members))]
    first: dict[str, Found] = {}
    for one in found:
        other = first.setdefault(one.name, one)
        if other.tensor is not one.tensor:
            raise errors.AlreadyExists(f'"{other.given}" and "{one.given}" are two parameters, and both are '
                                       f'"{one.name}" without wrappers; pass the model (model=), or rename one')
    return Tree(found, Rules())


def _group_of(members: list[_Member], tree: Tree, by_name: bool) -> dict[int, int]:
    """By the id of a parameter."""
    names_of: dict[int, str] = {id(one.tensor): one.given for one in reversed(tree.found)}
    first: dict[int, _Member] = {}
    seen: set[tuple[int, Optional[str]]] = set()
    for member in members:
        name = names_of.get(id(member.tensor))
        if name is None:
            raise errors.InvalidArgument(f"{member.where}, of shape {list(getattr(member.tensor, 'shape', []))}, is no "
                                         "parameter of the model; was it made anew after the groups were?")
        other = first.setdefault(id(member.tensor), member)
        if other.group != member.group:
            raise errors.InvalidArgument(f'parameter "{name}" is in group {other.group} and in group {member.group}; '
                                         "it can be in one")
        if (id(member.tensor), member.name) in seen:
            raise errors.InvalidArgument(f'parameter "{name}" is in group {member.group} twice; it can be in it once')
        seen.add((id(member.tensor), member.name))
    return {key: member.group for key, member in first.items()}


def _facts(tree: Tree, group_of: dict[int, int], groups: list[dict[str, Any]]) -> Facts:
    named: dict[int, list[Found]] = {}
    for one in tree.found:
        check(one.name, one.tensor)
        named.setdefault(id(one.tensor), []).append(one)
    check_apart({found[0].name: found[0].tensor for found in named.values()})
    parameters = []
    for key, found in named.items():
        owner, group = found[0], group_of.get(key, NO_GROUP)
        ties: dict[str, str] = {}
        for one in found:
            if one.name != owner.name:
                ties.setdefault(one.name, one.given)
        frozen = group == NO_GROUP or not owner.tensor.requires_grad
        parameters.append(Parameter(
            owner.name, owner.given, owner.tensor, frozen, tuple(ties), group, owner.tensor.is_contiguous(),
            tuple(ties.values())))
    if not parameters:
        raise errors.InvalidArgument("the model has no parameters; there is nothing to train")
    if all(parameter.frozen for parameter in parameters):
        raise errors.InvalidArgument(f"none of {len(parameters)} parameters is to be trained; requires_grad is False, "
                                     "or they are in no group")
    return Facts(parameters, tree.rules, groups)


def canonical_rules(of: Facts) -> Rules:
    """The rules for names that are canonical already, such as Parameter.name: a job that is made with these names and
    rules, and asked by them, never takes a user's own `_orig_mod` for a wrapper."""
    literal = names.canonical_many([f"{prefix}._" for prefix in of.rules.literal], **of.rules._asdict())
    return Rules(literal=tuple(dict.fromkeys(prefix[:-2] for prefix in literal)))
