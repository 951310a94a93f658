"""Checkpoints from and to directories of torch.distributed.checkpoint (see checkpoint.py). PyTorch and safetensors are
imported when a function is called."""
from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from . import errors

_FLOATS = ("float32", "bfloat16", "float16")
_STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
_OPTIMIZERS = {"OPTIMIZER_KIND_ADAMW": "AdamW", "OPTIMIZER_KIND_ADAM": "Adam", "OPTIMIZER_KIND_SGD": "SGD",
               "OPTIMIZER_KIND_MUON": "Muon"}


def _torch() -> Any:
    try:
        import safetensors.torch  # noqa: F401
        import torch
        import torch.distributed.checkpoint  # noqa: F401
    except ImportError as error:
        raise ImportError("this needs PyTorch and safetensors: pip install 'shardmesh[dcp]'") from error
    return torch


def _load(folder: str, stem: str) -> dict[str, Any]:
    import safetensors.torch

    tensors: dict[str, Any] = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), stem + "*.safetensors"))):
        tensors.update(safetensors.torch.load_file(path))
    return tensors


def manifest(checkpoint: str) -> tuple[dict[str, Any], int]:
    """The job of a checkpoint, and its step. InvalidArgument: it is none."""
    try:
        with open(os.path.join(checkpoint, "manifest.json"), encoding="utf-8") as file:
            found = json.load(file)
        return dict(found["job"]), int(found["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise errors.InvalidArgument(f"{checkpoint} is no checkpoint: {error}") from error


class _Job:
    """What a manifest says of parameters; of a manifest without them, that they are all of one group."""

    def __init__(self, job: dict[str, Any], stored: list[str]) -> None:
        self.optimizers: list[dict[str, Any]] = [job.get("optimizer", {}), *job.get("more_groups", [])]
        parameters = {p["name"]: p for p in job.get("parameters", [])}
        self.tied: dict[str, str] = {name: p["tied_to"] for name, p in parameters.items() if p.get("tied_to")}
        owners = [name for name in parameters if name not in self.tied] or stored
        self.group = {name: int(parameters.get(name, {}).get("group", 0)) for name in owners
                      if not parameters.get(name, {}).get("frozen")}
        self.states = {name: parameters.get(name, {}).get("states", "STATE_FORMAT_FP32")[len("STATE_FORMAT_"):].lower()
                       for name in self.group}


def _owner(name: str, owners: Mapping[str, int]) -> str:
    """The longest of `owners` that a state's name begins with, before a dot; "": there is no such one."""
    at = name.rfind(".")
    while at > 0 and name[:at] not in owners:
        at = name.rfind(".", 0, at)
    return name[:max(at, 0)]


def _optimizer_states(torch: Any, stored: dict[str, Any], job: _Job, weights: dict[str, Any], states: str,
                      step: int) -> dict[str, Any]:
    from . import _states  # needs NumPy

    result: dict[str, dict[str, Any]] = {}
    for name, tensor in stored.items():
        owner = _owner(name, job.group)
        state = name[len(owner) + 1:]
        if not owner or state == "remainder" or (states == "float" and state not in _STATES):
            continue
        if states == "float":
            format, scales = job.states[owner], stored.get(f"{name}.scales")
            if scales is None and (format not in ("fp32", "bf16_sr") or str(tensor.dtype).rpartition(".")[2] not in _FLOATS):
                raise errors.InvalidArgument(f"the optimizer state {name!r} is of {tensor.dtype}, and its job does not say what "
                                             'they stand for; say states="stored", or states="none"')
            tensor = _states.decoded(torch, state, format, tuple(weights[owner].shape), tensor, scales)
        result.setdefault(owner, {"step": torch.tensor(float(step), dtype=torch.float32, device="cpu")})[state] = tensor
    return result


def _param_group(torch: Any, hyper: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """As torch's own optimizer of that kind has it, with this job's values. Of an optimizer that torch has not: lr alone."""
    lr = float(hyper.get("learning_rate", 0.0))
    kind = getattr(torch.optim, _OPTIMIZERS.get(str(hyper.get("kind", "")), "AdamW"))
    group = dict(kind([torch.zeros(1, 1)], lr=lr).param_groups[0])
    if "betas" in group and "beta1" in hyper:
        group["betas"] = (float(hyper["beta1"]), float(hyper.get("beta2", group["betas"][1])))
    names_here = {"eps": "epsilon", **{k: k for k in ("weight_decay", "momentum", "dampening", "nesterov", "maximize", "amsgrad")}}
    for key, here in names_here.items():  # what is 0 or false is left out
        if key in group:
            group[key] = bool(hyper.get(here)) if isinstance(group[key], bool) else float(hyper.get(here, 0))
    group["params"] = names
    return group


def _optimizer(torch: Any, checkpoint: str, job: _Job, weights: dict[str, Any], states: str, step: int) -> dict[str, Any]:
    members: list[list[str]] = [[] for _ in job.optimizers]
    for name, g in job.group.items():
        members[g].append(name)
    groups = [_param_group(torch, hyper, names) for hyper, names in zip(job.optimizers, members)]
    return {"state": _optimizer_states(torch, _load(checkpoint, "states"), job, weights, states, step),
            "param_groups": [group for group in groups if group["params"]]}


def to_dcp(checkpoint: str, folder: str, *, states: str = "float") -> None:
    """Writes a checkpoint (its local folder) as a directory that torch.distributed.checkpoint.load reads, with
    "model" and "optim" as torch.distributed.checkpoint.state_dict names things.

    states: "float" (in fp32: of quantized ones the values that the job steps from), "stored" (codes and scales as they are) or
    "none". Tied parameters are there under each of their names.
    AlreadyExists: `folder` has files. InvalidArgument: `checkpoint` is none.
    """
    torch = _torch()
    if states not in ("float", "stored", "none"):
        raise errors.InvalidArgument(f"states={states!r}; \"float\", \"stored\" or \"none\"")
    job, step = manifest(checkpoint)
    if os.path.isdir(folder) and os.listdir(folder):
        raise errors.AlreadyExists(f"{folder} has files; name a folder that is not there, or is empty")
    weights = _load(checkpoint, "model")
    says = _Job(job, list(weights))
    everything: dict[str, Any] = {"model": {**weights, **{name: weights[owner] for name, owner in says.tied.items()}}}
    if states != "none":
        everything["optim"] = _optimizer(torch, checkpoint, says, weights, states, step)
    writer = torch.distributed.checkpoint.FileSystemWriter(folder)
    torch.distributed.checkpoint.save(everything, storage_writer=writer, no_dist=True)


def from_dcp(directory: str, folder: str, *, prefix: str = "model.") -> list[str]:
    """Reads the weights of a directory of torch.distributed.checkpoint, however they were sharded, and writes them to
    `folder`/model.safetensors, for `shardctl import`; returns their names.

    prefix: what the names of weights begin with there, which is dropped. InvalidArgument: there are none.
    AlreadyExists: the file is there. The directory's metadata is a pickle: read only what you trust.
    """
    torch = _torch()
    import safetensors.torch

    target = os.path.join(folder, "model.safetensors")
    if os.path.exists(target):
        raise errors.AlreadyExists(f"{target} is there already")
    reader = torch.distributed.checkpoint.FileSystemReader(directory)
    metadata = reader.read_metadata().state_dict_metadata
    tensors = {name: entry for name, entry in metadata.items() if name.startswith(prefix) and hasattr(entry, "size")}
    if not tensors:
        known = ", ".join(sorted({name.split(".")[0] for name in metadata})[:8])
        raise errors.InvalidArgument(f"{directory} has no tensors whose names begin with {prefix!r}; its names begin with: {known}")
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu") for name, entry in tensors.items()}
    torch.distributed.checkpoint.load(state, storage_reader=reader, no_dist=True)
    os.makedirs(folder, exist_ok=True)
    part = f"{target}.{os.getpid()}.part"
    try:
        safetensors.torch.save_file({name[len(prefix):]: t for name, t in state.items()}, part, metadata={"format": "pt"})
        os.replace(part, target)
    finally:
        if os.path.exists(part):
            os.remove(part)
    return [name[len(prefix):] for name in state]


def adopt_dcp(directory: str, root: str, *, name: str, step: Optional[int] = None, weights: Optional[str] = None,
              states: Optional[str] = None, optimizer: Optional[str] = None, frozen: Iterable[str] = (),
              ties: Optional[Mapping[str, str]] = None, parameters: Optional[Sequence[str]] = None,
              job: Optional[Mapping[str, Any]] = None, prefix: str = "model.", optimizer_prefix: str = "optim.",
              root_wrappers: Sequence[str] = (), skip_others: bool = False, shardctl: str = "shardctl") -> str:
    """Makes a checkpoint of a directory of torch.distributed.checkpoint that has weights and optimizer states, however they
    were sharded: a folder of its step in `root`, for `shardctl restore`; returns its path.

    name: the job's. Its optimizer and parameter groups are those of the directory. None, or nothing, where it says enough:
      weights, states    formats; None: fp32 as fp32, bf16 as bf16_sr, and states of torchao's 8-bit, 4-bit and fp8 optimizers as
                         dyn8, dyn4 and fp8 with the same codes and scales
      step               steps done, of optimizers whose states do not say it (SGD)
      optimizer          "adamw" or "adam", of groups that do not say it (torchao's, with weight decay)
      frozen             names that are not trained, beside those of no parameter group
      ties               name to the name whose storage it shares; {}: there are none
      parameters         names in the optimizer's order, where its states are numbered without names
      job                more fields of the job, as JSON of JobSpec (proto/shardmesh/v1/job.proto): {"slots": 4}
    prefix, optimizer_prefix: what keys of weights and of the optimizer begin with. root_wrappers: as shardmesh.names has them.
    skip_others: leaves tensors out that are no floats. shardctl: the program that lays out the files.
    All of it goes through this process's memory. InvalidArgument: a directory that is none, or something that a job has not;
    the message has it, and what would do. AlreadyExists: that step is there. NotFound: no such program.
    """
    from . import _adopt  # needs NumPy

    return _adopt.adopt(_torch(), directory, root, name=name, step=step, weights=weights, states=states, optimizer=optimizer,
                        frozen=frozen, ties=ties, parameters=parameters, job=job, prefix=prefix, optimizer_prefix=optimizer_prefix,
                        root_wrappers=root_wrappers, skip_others=skip_others, shardctl=shardctl)
