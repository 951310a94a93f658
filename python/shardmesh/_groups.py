"""The parameter groups and the names of states in a directory of torch.distributed.checkpoint, in each way that torch
writes them, as the optimizers of a job."""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from . import errors
from ._dcp_read import Directory

STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
_STATE = re.compile(r"state\.(.+)\.([^.]+)")
_LISTED = re.compile(r"param_groups\.(\d+)\.([^.]+)")
_FLAT = re.compile(r"param_groups\.(.+)\.([^.]+)")  # flatten_optimizer_state_dict
_MUON = {"ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5, "adjust_lr_fn": "original"}
OPTIMIZERS = ("adamw", "adam", "sgd", "lion", "muon")


@dataclass
class Group:
    """A parameter group of torch: its values, and the names of its parameters as they are there."""

    values: dict[str, Any]
    names: list[str] = field(default_factory=list)


@dataclass
class Optimizer:
    groups: list[Group]
    states: dict[str, dict[str, str]]  # parameter's name -> state's name -> key in the directory


def read(directory: Directory, prefix: str, parameters: Optional[Sequence[str]]) -> Optimizer:
    """None there: no groups. `parameters`: the names that states are numbered by, where the directory has numbers alone."""
    keys = {key[len(prefix):]: key for key in directory.entries if prefix and key.startswith(prefix)}
    groups = _listed(directory, keys) or _flat(directory, keys)
    numbered: dict[str, str] = {}
    for group in groups:
        numbered.update(_name_numbers(directory.path, group, parameters))
    states: dict[str, dict[str, str]] = {}
    for name, key in keys.items():
        match = _STATE.fullmatch(name)
        if match:
            states.setdefault(numbered.get(match[1], match[1]), {})[match[2]] = key
    return Optimizer(groups, states)


def _listed(directory: Directory, keys: Mapping[str, str]) -> list[Group]:
    groups: dict[int, Group] = {}
    found = {key: match for name, key in keys.items() if (match := _LISTED.fullmatch(name))}
    for key, value in directory.values(found).items():
        groups.setdefault(int(found[key][1]), Group({})).values[found[key][2]] = value
    return [groups[number] for number in sorted(groups)]


def _flat(directory: Directory, keys: Mapping[str, str]) -> list[Group]:
    found = {key: match for name, key in keys.items() if (match := _FLAT.fullmatch(name))}
    values: dict[str, dict[str, Any]] = {}
    for key, value in directory.values(found).items():
        values.setdefault(found[key][1], {})[found[key][2]] = value
    groups: dict[str, Group] = {}
    for name, of_name in values.items():  # parameters with the same values are a group
        group = groups.setdefault(repr(sorted(of_name.items())), Group({**of_name, "params": []}))
        group.values["params"].append(name)
    return list(groups.values())


def _name_numbers(path: str, group: Group, parameters: Optional[Sequence[str]]) -> dict[str, str]:
    """Sets the group's names. Returns those of numbers."""
    members = group.values.get("params", [])
    if all(isinstance(member, str) for member in members):
        group.names = list(members)
        return {}
    group.names = list(group.values.get("param_names", []))
    if not group.names and parameters is not None and all(0 <= member < len(parameters) for member in members):
        group.names = [parameters[member] for member in members]
    if len(group.names) != len(members):
        raise errors.InvalidArgument(f"{path} numbers its optimizer states and has no names for them; say parameters=[...], their "
                                     "names in the optimizer's order, or save what get_state_dict returns")
    return {str(member): name for member, name in zip(members, group.names)}


def _kind(values: Mapping[str, Any], optimizer: Optional[str]) -> str:
    if "ns_steps" in values:
        return "muon"
    if "momentum" in values:
        return "sgd"
    if "betas" not in values:
        raise errors.InvalidArgument(f"a parameter group has {', '.join(sorted(values))}: of no optimizer that jobs have; they "
                                     f"have {', '.join(OPTIMIZERS)}")
    if "eps" not in values:
        return "lion"
    if "decoupled_weight_decay" in values:
        return "adamw" if values["decoupled_weight_decay"] else "adam"
    if float(values.get("weight_decay", 0)) == 0:
        return optimizer or "adamw"  # without decay they are one
    if optimizer is not None:
        return optimizer
    raise errors.InvalidArgument("a parameter group with weight decay does not say whether it is Adam's or AdamW's, as torchao's; "
                                 'say optimizer="adamw" or "adam"')


def job_optimizer(group: Group, optimizer: Optional[str]) -> dict[str, Any]:
    """As an Optimizer of proto/shardmesh/v1/job.proto in JSON. `optimizer`: adam or adamw, where the group does not say."""
    values = group.values
    kind = _kind(values, optimizer)
    result = {"kind": f"OPTIMIZER_KIND_{kind.upper()}", "learning_rate": float(values["lr"]),
              "weight_decay": float(values.get("weight_decay", 0)), "maximize": bool(values.get("maximize", False))}
    if kind in ("adamw", "adam", "lion"):
        result["beta1"], result["beta2"] = (float(beta) for beta in values["betas"])
    if kind in ("adamw", "adam"):
        result["amsgrad"] = bool(values.get("amsgrad", False))
    if kind in ("adamw", "adam", "muon"):
        result["epsilon"] = float(values["eps"])
    if kind in ("sgd", "muon"):
        result["momentum"], result["nesterov"] = float(values["momentum"]), bool(values["nesterov"])
    if kind == "sgd":
        result["dampening"] = float(values["dampening"])
    for name, needed in _MUON.items() if kind == "muon" else ():
        value = values.get(name, needed)
        if value is not None and (tuple(value) if isinstance(value, (list, tuple)) else value) != needed:
            raise errors.InvalidArgument(f"Muon with {name} {value!r}; a job's has {needed!r}")
    return result


def states_of(optimizer: Mapping[str, Any]) -> tuple[str, ...]:
    """The states of a parameter that it steps, in a job's order."""
    kind = optimizer["kind"].rpartition("_")[2].lower()
    if kind in ("adamw", "adam"):
        return STATES[:3] if optimizer["amsgrad"] else STATES[:2]
    if kind == "sgd":
        return STATES[3:] if optimizer["momentum"] else ()
    return STATES[:1] if kind == "lion" else STATES[3:]
