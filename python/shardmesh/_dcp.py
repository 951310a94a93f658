"""Checkpoints from and to directories of torch.distributed.checkpoint (see checkpoint.py). PyTorch and safetensors are
imported when a function is called."""
from __future__ import annotations

import glob
import json
import os
from typing import Any

from . import errors

_FLOATS = ("float32", "bfloat16", "float16")
_OPTIMIZERS = {"OPTIMIZER_KIND_ADAMW": "AdamW", "OPTIMIZER_KIND_ADAM": "Adam", "OPTIMIZER_KIND_SGD": "SGD"}


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


def _optimizer_states(torch: Any, stored: dict[str, Any], names: list[str], states: str, step: int) -> dict[str, Any]:
    result: dict[str, dict[str, Any]] = {}
    for name, tensor in stored.items():
        owner = max((n for n in names if name.startswith(n + ".")), key=len, default="")
        state = name[len(owner) + 1:]
        if not owner or state == "remainder":
            continue
        if states == "float":
            if str(tensor.dtype).split(".")[1] not in _FLOATS or state.endswith(".scales") or f"{name}.scales" in stored:
                raise errors.InvalidArgument(f"the optimizer state {name!r} is stored in codes; say states=\"stored\", or states=\"none\"")
            tensor = tensor.float()
        result.setdefault(owner, {"step": torch.tensor(float(step))})[state] = tensor
    return result


def _param_groups(torch: Any, job: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """As torch's own optimizer of that kind has them, with this job's values. Of an optimizer that torch has not: lr alone."""
    hyper = job.get("optimizer", {})
    lr = float(hyper.get("learning_rate", 0.0))
    kind = getattr(torch.optim, _OPTIMIZERS.get(str(hyper.get("kind", "")), "AdamW"))
    group = dict(kind([torch.zeros(1)], lr=lr).param_groups[0])
    if "betas" in group and "beta1" in hyper:
        group["betas"] = (float(hyper["beta1"]), float(hyper.get("beta2", group["betas"][1])))
    names_here = {"eps": "epsilon", **{k: k for k in ("weight_decay", "momentum", "dampening", "nesterov", "maximize", "amsgrad")}}
    for key, here in names_here.items():  # what is 0 or false is left out
        if key in group:
            group[key] = type(group[key])(hyper.get(here, 0))
    group["params"] = names
    return [group]


def to_dcp(checkpoint: str, folder: str, *, states: str = "float") -> None:
    """Writes a checkpoint (its local folder) as a directory that torch.distributed.checkpoint.load reads, with
    "model" and "optim" as torch.distributed.checkpoint.state_dict names things.

    states: "float" (in fp32; InvalidArgument where they are coded), "stored" (codes and scales as they are) or "none".
    AlreadyExists: `folder` has files. InvalidArgument: `checkpoint` is none.
    """
    torch = _torch()
    if states not in ("float", "stored", "none"):
        raise errors.InvalidArgument(f"states={states!r}; \"float\", \"stored\" or \"none\"")
    try:
        with open(os.path.join(checkpoint, "manifest.json"), encoding="utf-8") as file:
            manifest = json.load(file)
        job, step = manifest["job"], int(manifest["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise errors.InvalidArgument(f"{checkpoint} is no checkpoint: {error}") from error
    if os.path.isdir(folder) and os.listdir(folder):
        raise errors.AlreadyExists(f"{folder} has files; name a folder that is not there, or is empty")
    weights = _load(checkpoint, "model")
    everything: dict[str, Any] = {"model": weights}
    if states != "none":
        state = _optimizer_states(torch, _load(checkpoint, "states"), list(weights), states, step)
        everything["optim"] = {"state": state, "param_groups": _param_groups(torch, job, list(weights))}
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
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in tensors.items()}
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
