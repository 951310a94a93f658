"""Other weights and states for a job: its newest step is saved, changed, and restored under the same name."""
from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Optional

import torch

from .. import _adopt, _dcp, _programs, _states, errors
from .._dcp_read import Chunk

if TYPE_CHECKING:
    from ._setup import Started

LOG = logging.getLogger("shardmesh.torch")
_ADVICE = "close() this optimizer, and make another one with resume= this checkpoint of its weights and states, which is kept:"


class Saved:
    """A checkpoint's files, read."""

    def __init__(self, path: str) -> None:
        self.job, self.step = _dcp.manifest(path)
        self._parameters = {one["name"]: one for one in self.job["parameters"]}
        self.model = _dcp._load(path, "model")
        self.states = _dcp._load(path, "states")

    def put_weights(self, name: str, values: torch.Tensor) -> None:
        """Rounded to nearest where the job's format has less."""
        format = self._format(name, "format")
        stored = _states.weights(torch, values.detach().to("cpu"), format)
        self.model[name] = stored.codes.contiguous()
        if stored.extra is not None:
            tensors, extra = (self.model, "scales") if format in ("int8_row", "nf4") else (self.states, "remainder")
            tensors[f"{name}.{extra}"] = stored.extra.contiguous()

    def put_state(self, name: str, state: str, value: Any) -> None:
        """Of torch.optim or torchao, whose codes stay as they are where the job has the same format."""
        chunk = Chunk((0,) * value.dim(), value)
        stored = _states.state(torch, f"{name}.{state}", tuple(value.shape), [chunk], _states.SIGNED[state],
                               self._format(name, "states"))
        self.states[f"{name}.{state}"] = stored.codes.contiguous()
        if stored.extra is not None:
            self.states[f"{name}.{state}.scales"] = stored.extra.contiguous()

    def _format(self, name: str, field: str) -> str:
        prefix = "FORMAT_" if field == "format" else "STATE_FORMAT_"
        proto = str(self._parameters[name].get(field, prefix + "FP32"))
        return proto.removeprefix(prefix).lower().replace("_plus_", "+")

    def write(self, folder: str) -> None:
        """As `shardctl adopt` takes it."""
        import safetensors.torch

        os.makedirs(os.path.join(folder, "states"))
        safetensors.torch.save_file(self.model, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        states = os.path.join(folder, "states", "model.safetensors")
        safetensors.torch.save_file(self.states, states, metadata={"format": "pt"})
        with open(os.path.join(folder, "job.json"), "w", encoding="utf-8") as file:
            json.dump({"step": self.step, "job": self.job}, file)


def rewrite(
    started: Started,
    *,
    weights: Optional[Mapping[str, torch.Tensor]] = None,
    states: Optional[Mapping[str, Mapping[str, Any]]] = None,
    step: Optional[int] = None,
    hyper: Optional[list[dict[str, Any]]] = None,
) -> None:
    """Every rank calls it; what rank 0 gives counts. The job goes on at `step`, and each rank has a new session of it.

    weights: by canonical name, of those that change. states: of all, by canonical name and state. hyper: the optimizer
    of each group. If it fails before another job takes the place of the old one, that is as it was; if it fails later,
    the checkpoint that was to be restored stays, and the error names its folder.
    """
    if started.ranks.rank != 0:
        started.follow()
        return
    with _Scratch() as scratch:
        adopted = _adopted(started, scratch.folder, weights or {}, states or {}, step, hyper)
        with started.replaced(f"{_ADVICE} {adopted}", scratch.keep) as uid:
            started.client._core.restore(
                adopted, name="", mesh="", gather="", fit_mesh=False, timeout=started.plan.timeout, progress=None,
                replaces_uid=uid, residency="", bucket_elements=0, prefetch_buckets=0, on_loss="", copies=0, record=False)
    started.renew()
    started.session.begin(None)


class _Scratch:
    """A folder that is removed in the end, unless what it has may be nowhere else by then."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="shardmesh-")
        self._kept = False

    def keep(self) -> None:
        self._kept = True
        LOG.warning("the job's weights may have been lost on the way; what was to replace them is kept in %s", self.folder)

    def __enter__(self) -> _Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._kept:
            shutil.rmtree(self.folder, ignore_errors=True)


def _adopted(
    started: Started, folder: str, weights: Mapping[str, torch.Tensor], states: Mapping[str, Mapping[str, Any]],
    step: Optional[int], hyper: Optional[list[dict[str, Any]]],
) -> str:
    saved = Saved(started.checkpoint(os.path.join(folder, "now")))
    for name, values in weights.items():
        saved.put_weights(name, values)
    for name, of_parameter in states.items():
        for state, value in of_parameter.items():
            if not isinstance(value, torch.Tensor):
                raise errors.InvalidArgument(f"{name}: {state} is a {type(value).__name__}; it must be a tensor")
            saved.put_state(name, state, value)
    if step is not None:
        saved.step = step
    if hyper is not None:
        saved.job["optimizer"], saved.job["more_groups"] = hyper[0], hyper[1:]
    changed = os.path.join(folder, "changed")
    saved.write(changed)
    return _adopt._run_adopt(_programs.find("shardctl"), changed, os.path.join(folder, "adopted"))
