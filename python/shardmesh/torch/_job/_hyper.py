"""Hyperparameters under torch's names, with torch's defaults, as an Optimizer of proto/shardmesh/v1/job.proto."""
from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ... import errors

# torch's name -> default, of torch.optim (2.13); Lion's are its paper's.
_KNOWN: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False},
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False},
    "adamw": {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False, "maximize": False,
    },
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False},
    "muon": {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "eps": 1e-7},
}
# What torch lets one say, and has one value here. The first three say how torch computes, not what.
_FIXED: dict[str, tuple[Any, ...]] = {
    "foreach": (None, False, True), "fused": (None, False, True), "capturable": (False, True),
    "differentiable": (False,),
}
_FIXED_OF: dict[str, dict[str, tuple[Any, ...]]] = {
    "adam": {"decoupled_weight_decay": (False,)},
    "adamw": {"decoupled_weight_decay": (True,)},
    "muon": {"ns_coefficients": ((3.4445, -4.775, 2.0315),), "ns_steps": (5,), "adjust_lr_fn": (None, "original")},
}
# As core/job/optimizer.h has them.
_RANGES = {
    "lr": (0.0, 1e6, "[0, 1e6]"), "weight_decay": (0.0, sys.float_info.max, "[0, infinity)"),
    "momentum": (0.0, 1.0, "[0, 1]"), "dampening": (0.0, 1.0, "[0, 1]"),
    "eps": (1.1754943508222875e-38, 1e6, "[1.2e-38, 1e6]"),
}
# Of a group, for others than the optimizer.
_NOTES = ("algorithm", "initial_lr", "name")
_PROTO = {"lr": "learning_rate", "eps": "epsilon"}


def algorithm_name(algorithm: object) -> str:
    """"adamw" of "AdamW". InvalidArgument: there is none of that name; the message has those that there are."""
    name = algorithm.lower() if isinstance(algorithm, str) else ""
    if name not in _KNOWN:
        is_rate = isinstance(algorithm, (int, float)) and not isinstance(algorithm, bool)
        hint = f'; a learning rate is given by name: Optimizer(model, "AdamW", lr={algorithm!r})' if is_rate else ""
        raise errors.InvalidArgument(
            f"algorithm {algorithm!r} is none; there are SGD, Adam, AdamW, Lion and Muon{hint}"
        )
    return name


def check_known(algorithm: str, given: Iterable[str], where: str) -> None:
    """InvalidArgument: a hyperparameter that the algorithm has not."""
    for key in given:
        if key not in _KNOWN[algorithm] and key not in _FIXED and key not in _FIXED_OF.get(algorithm, {}):
            raise errors.InvalidArgument(f"{where}: {algorithm} has no hyperparameter {key!r}; it has "
                                         f"{', '.join(_KNOWN[algorithm])}")


def optimizers(algorithm: str, given: Mapping[str, Any], groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each group. A group's own value goes before one that is given for all, and that before torch's default.

    A group may have an "algorithm" of its own; of what is given for all it takes what its algorithm has.
    InvalidArgument: no such algorithm or hyperparameter, or a value that is none.
    """
    default = algorithm_name(algorithm)
    check_known(default, given, "the optimizer")
    result = []
    for index, group in enumerate(groups):
        kind = algorithm_name(group.get("algorithm", default))
        own = {key: value for key, value in group.items() if key not in _NOTES}
        check_known(kind, own, f"group {index}")
        shared = {key: value for key, value in given.items() if kind == default or key in _KNOWN[kind]}
        result.append(_optimizer(kind, {**shared, **own}, f"group {index}"))
    return result


def _optimizer(kind: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    fixed = {**_FIXED, **_FIXED_OF.get(kind, {})}
    for key in fixed.keys() & given.keys():
        value = tuple(given[key]) if isinstance(given[key], (list, tuple)) else given[key]
        if value not in fixed[key]:
            raise errors.InvalidArgument(f"{where}: {key} is {value!r}; of {kind} it is {fixed[key][0]!r}")
    result: dict[str, Any] = {"kind": f"OPTIMIZER_KIND_{kind.upper()}"}
    for key, default in _KNOWN[kind].items():
        value = given.get(key, default)
        if key == "betas":
            result["beta1"], result["beta2"] = _betas(kind, value, f"{where}: betas")
        elif isinstance(default, bool):
            result[key] = _flag(value, f"{where}: {key}")
        else:
            result[_PROTO.get(key, key)] = _within(key, number(value, f"{where}: {key}"), value, f"{where}: {key}")
    if kind == "sgd" and result["nesterov"] and (result["momentum"] == 0 or result["dampening"] != 0):
        raise errors.InvalidArgument(
            f"{where}: nesterov with momentum={result['momentum']:g} and dampening={result['dampening']:g}; it needs a "
            "momentum and no dampening"
        )
    return result


def _within(key: str, number: float, value: Any, what: str) -> float:
    lowest, highest, range = _RANGES[key]
    if lowest <= number <= highest:
        return number
    raise errors.InvalidArgument(f"{what} is {value!r}; it must lie in {range}")


def _betas(kind: str, value: Any, what: str) -> tuple[float, float]:
    if isinstance(value, str) or not isinstance(value, Iterable) or len(pair := list(value)) != 2:
        raise errors.InvalidArgument(f"{what} are {value!r}; they must be a pair of numbers")
    betas = number(pair[0], what), number(pair[1], what)
    if all(0 <= beta < 1 or (beta == 1 and kind == "lion") for beta in betas):
        return betas
    raise errors.InvalidArgument(f"{what} are {value!r}; both must lie in [0, 1{']' if kind == 'lion' else ')'}")


def _flag(value: Any, what: str) -> bool:
    if value is True or value is False:
        return value
    raise errors.InvalidArgument(f"{what} is {value!r}; it must be True or False")


def number(value: Any, what: str) -> float:
    """Also of a tensor of one element."""
    try:
        if not isinstance(value, (str, bool)):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise errors.InvalidArgument(f"{what} is {value!r}; it must be a number")


# What a job has for good; the learning rate is a step's own.
FIXED_BY_A_JOB = ("betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "amsgrad", "maximize")


def defaults(algorithm: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Of torch.optim's groups."""
    return {**_KNOWN[algorithm_name(algorithm)], **given}
