"""The optimizer's state, as torch.optim has it in a state_dict, and back into the job."""
from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Optional

import torch

from .. import _dcp, _groups, errors
from ._modules._canonical import whole
from ._modules._matching import matched
from ._modules._model import Parameter
from ._rewrite import Saved, rewrite
from ._setup import Started

_STATE_DICTS = "torch.distributed.checkpoint.state_dict"  # its import takes ten times as long as all else here


def plain(method: str) -> Callable[..., Any]:
    """A method of torch.optim.Optimizer without its wrapper, which imports torch's compiler: that takes seconds."""
    found: Callable[..., Any] = inspect.unwrap(getattr(torch.optim.Optimizer, method))
    return found


def states_of(started: Started) -> dict[torch.Tensor, dict[str, Any]]:
    """Of each trainable parameter, in fp32; none before the first step. The service saves a checkpoint for it."""
    if started.session.committed == 0:
        return {}
    with tempfile.TemporaryDirectory(prefix="shardmesh-") as folder:
        saved = Saved(started.checkpoint(folder))
        job = _dcp._Job(saved.job, list(saved.model))
        decoded = _dcp._optimizer_states(torch, saved.states, job, saved.model, "float", saved.step)
    return {
        parameter.tensor: decoded.get(parameter.name, {"step": torch.tensor(float(saved.step), dtype=torch.float32)})
        for parameter in started.facts.parameters if not parameter.frozen
    }


def load_states(
    started: Started, param_groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any],
    hyper: list[dict[str, Any]], changed: Sequence[Parameter] = (),
) -> None:
    """Puts the states of a state_dict into the job, of which every rank makes this call; those of rank 0 count.

    A state_dict without states, as of an optimizer before its first step, resets all to zeros and step 0. hyper: the
    optimizer of each group from now on. changed: whose weights the job takes from the model, too.
    InvalidArgument: states that are missing, of others' shapes, or of another step than the rest; lists them, and
    nothing is changed.
    """
    named = {id(parameter.tensor): parameter for parameter in started.facts.parameters}
    here = [named[id(tensor)] for group in param_groups for tensor in group["params"]]
    if state_dict["state"]:
        given = _given(here, state_dict, started)
    else:
        zeros, step = zeros_of(started, hyper), 0 if has_states(hyper) else started.session.committed
        given = {one.name: {**zeros.get(one.tensor, {}), "step": step} for one in here}
    trainable = [parameter for parameter in here if not parameter.frozen]
    needed = {parameter.name: _groups.states_of(hyper[parameter.group]) for parameter in trainable}
    problems = [
        problem for one in trainable for problem in _problems(one, given[one.name], needed[one.name])
    ]
    steps = {float(given[parameter.name].get("step", 0)) for parameter in trainable}
    if len(steps) > 1:
        listed = ", ".join(f"{step:g}" for step in sorted(steps))
        problems.append(f"parameters were stepped {listed} times; a job steps all together")
    if problems:
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise errors.InvalidArgument("this state_dict is none of this model's optimizer; nothing was loaded:\n  " +
                                     "\n  ".join(problems[:8]) + more)
    states = {name: {state: given[name][state] for state in wanted} for name, wanted in needed.items()}
    weights = {parameter.name: parameter.tensor for parameter in changed}
    with started.others.change():
        rewrite(started, weights=weights, states=states, step=int(steps.pop()), hyper=hyper)


def _given(here: Sequence[Parameter], state_dict: Mapping[str, Any], started: Started) -> dict[str, dict[str, Any]]:
    """The states of each parameter: by the order of the groups, or, where those have names, by these."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    found = dict(zip((parameter.name for parameter in here), keys))
    if keys and all(isinstance(key, str) for key in keys):
        name_of = matched(keys, found, {one.given: one.name for one in here})
        key_of = {name: key for key, name in name_of.items()}
        found = {name: key_of.get(name) for name in found}
    states = state_dict["state"]
    return {name: {state: whole(value) for state, value in states.get(key, {}).items()} for name, key in found.items()}


def has_states(hyper: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an optimizer of one of these groups keeps any: SGD without momentum has none, nor has its state_dict."""
    return any(_groups.states_of(one) for one in hyper)


def states_are_wanted(groups: Sequence[Mapping[str, Any]]) -> bool:
    """torch.distributed.checkpoint.state_dict makes a step of nothing to have states made; these are the service's."""
    maker = getattr(sys.modules.get(_STATE_DICTS), "_init_optim_state", None)
    if maker is None or any(group["lr"] != 0.0 for group in groups):
        return False
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None and frame.f_code is not maker.__code__:
        frame = frame.f_back
    return frame is not None


def zeros_of(started: Started, hyper: Sequence[Mapping[str, Any]]) -> dict[torch.Tensor, dict[str, Any]]:
    """As before the first step."""
    return {
        parameter.tensor: {"step": torch.tensor(0.0, dtype=torch.float32), **{
            state: torch.zeros(parameter.tensor.shape, dtype=torch.float32)
            for state in _groups.states_of(hyper[parameter.group])
        }}
        for parameter in started.facts.parameters if not parameter.frozen
    }


def _problems(parameter: Parameter, given: Mapping[str, Any], needed: Sequence[str]) -> list[str]:
    problems = [f"{parameter.name} has no {state}" for state in needed if state not in given]
    for state in needed:
        shape = tuple(getattr(given.get(state), "shape", parameter.tensor.shape))
        if shape != tuple(parameter.tensor.shape):
            right = list(parameter.tensor.shape)
            problems.append(f"{parameter.name}: {state} has the shape {list(shape)}; it must be {right}")
    return problems
