"""A job's specification, the JSON form of JobSpec in proto/shardmesh/v1/job.proto, of a model's facts and an
optimizer's arguments. Words are checked here; numbers in _arguments.py and _hyper.py, and by the service."""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Optional, Union

import torch

from ... import errors
from .._modules._model import NO_GROUP, Facts, Parameter
from ._hyper import optimizers

# A format's name, or what says it for a parameter's canonical name (None: as if nothing had been said).
Formats = Union[None, str, Callable[[str], Optional[str]]]

_ENUMS = {
    "weights": ("FORMAT", ("fp32", "bf16", "bf16_sr", "bf16+16", "bf16+8sr", "int8_row", "nf4")),
    "states": ("STATE_FORMAT", ("fp32", "bf16_sr", "dyn8", "dyn4", "fp8", "fp8x32")),
    "gather": ("GATHER_FORMAT", ("stored", "fp8_tensor", "fp8_row", "fp8_block", "mx8", "int8_row", "nf4")),
    "gradients": ("FORMAT", ("fp32", "bf16")),
    "residency": ("RESIDENCY", ("full", "bucket")),
    "on_loss": ("ON_LOSS", ("fail", "checkpoint")),
}
BUCKET_ELEMENTS, PREFETCH_BUCKETS = 16 << 20, 1  # of a job that does not say them, as core/job/job.h has them
_MAX_PARAMETERS, _MAX_GROUPS = 100_000, 4096  # as core/job/job.h has them
_OF_DTYPE = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_DIMENSION = re.compile(r"([^=:,\s]+)(?::(replicate|shard))?=(\d+)")


def specification(
    facts: Facts, algorithm: str = "AdamW", hyperparameters: Optional[Mapping[str, Any]] = None, *, name: str,
    weights: Formats = None, states: Formats = "fp32", gather: Formats = "stored", gradients: Optional[str] = None,
    mesh: Optional[str] = None, slots: int = 1, trainers: Optional[int] = None, residency: str = "full",
    clip_norm: float = 0.0, seed: int = 0, publish_every: int = 1, on_loss: str = "fail", copies: int = 1,
) -> dict[str, Any]:
    """The job `name`. Its parameters have canonical names (create and open it with canonical_rules(facts)).

    weights: None, the parameter's dtype. A single name of weights or gather is for the parameters that it fits, and the
    others (vectors in formats of matrices, say, or what is trained with nf4) are as by default; what a callable says is
    taken at its word.
    gradients: None, the dtype of the parameters that are trained; fp32 if there are both. trainers: slots are pulled by
    so many; None: each slot has its trainer. hyperparameters: by torch's names, for all groups.
    InvalidArgument: unknown names and wrong values; the message has the right ones. ResourceExhausted: more parameters
    or groups than a job can have.
    """
    for what, count, most in (("parameters", len(facts.parameters), _MAX_PARAMETERS),
                              ("parameter groups", len(facts.groups), _MAX_GROUPS)):
        if count > most:
            raise errors.ResourceExhausted(f"{count} {what}; a job has at most {most}")
    groups = optimizers(algorithm, hyperparameters or {}, facts.groups)
    spec: dict[str, Any] = {
        "name": name, "slots": _integer("slots", slots), "optimizer": groups[0], "more_groups": groups[1:],
        "parameters": [entry for p in facts.parameters for entry in _entries(p, weights, states, gather)],
        "gradient_format": _enum("gradients", _gradients(facts) if gradients is None else gradients),
        "seed": _integer("seed", seed), "publish_every": _integer("publish_every", publish_every),
        "clip_norm": float(clip_norm), "residency": _enum("residency", residency),
        "on_loss": _enum("on_loss", on_loss), "copies": _integer("copies", copies),
    }
    if mesh is not None:
        spec["mesh"] = _mesh(mesh)
    if trainers is not None:
        spec.update(slot_mode="SLOT_MODE_PULLED", trainers=_integer("trainers", trainers))
    return spec


def _entries(p: Parameter, weights: Formats, states: Formats, gather: Formats) -> list[dict[str, Any]]:
    """The parameter, and each further name of it."""
    owner = {
        "name": p.name, "shape": list(p.tensor.shape),
        "format": _enum("weights", _of("weights", weights, p, _OF_DTYPE[p.tensor.dtype])),
        "group": 0 if p.group == NO_GROUP else p.group, "frozen": p.frozen,
        "states": _enum("states", "fp32" if p.frozen else _of("states", states, p, "fp32")),
        "gather": _enum("gather", _of("gather", gather, p, "stored")),
    }
    entries = [owner] + [{**owner, "name": tie, "tied_to": p.name} for tie in p.ties]
    for entry, given in zip(entries, (p.given, *p.ties_given)):
        if given != entry["name"]:
            entry["given"] = given
    return entries


def _of(what: str, formats: Formats, p: Parameter, default: str) -> str:
    if formats is None:
        return default
    if isinstance(formats, str):
        _enum(what, formats)
        return formats if _fits(formats, what, p) else default
    if not callable(formats):
        raise errors.InvalidArgument(f"{what} is {formats!r}; it must be {_listed(what)}, or a function from the name "
                                     "of a parameter to one of these")
    said = formats(p.name)
    if said is not None and (not isinstance(said, str) or said not in _ENUMS[what][1]):
        raise errors.InvalidArgument(f'{what} of parameter "{p.name}" is {said!r}; it must be {_listed(what)}, or None')
    return default if said is None else said


def _fits(name: str, what: str, p: Parameter) -> bool:
    """As ScaleBlocksOf of core/format/gather_format.h, no codes for vectors, which are few and matter, and
    no nf4 in storage for what is trained."""
    if what == "states" or name in ("fp32", "stored") or name.startswith("bf16"):
        return True
    shape = p.tensor.shape
    if len(shape) < 2 or (what == "weights" and name == "nf4" and not p.frozen):
        return False
    return {"fp8_block": len(shape) == 2, "mx8": shape[-1] % 32 == 0}.get(name, True)


def _enum(what: str, name: object) -> str:
    prefix, known = _ENUMS[what]
    if not isinstance(name, str) or name not in known:
        raise errors.InvalidArgument(f"{what} is {name!r}; it must be {_listed(what)}")
    return f"{prefix}_{name.replace('+', '_PLUS_').upper()}"


def _listed(what: str) -> str:
    *others, last = _ENUMS[what][1]
    return f"{', '.join(others)} or {last}"


def _gradients(facts: Facts) -> str:
    dtypes = {p.tensor.dtype for p in facts.parameters if not p.frozen}
    return "bf16" if dtypes == {torch.bfloat16} else "fp32"


def _mesh(text: str) -> list[dict[str, Any]]:
    """Of "ddp=2,fsdp=2", as core/mesh/mesh_spec.h has it."""
    dimensions = []
    for part in text.split(","):
        match = _DIMENSION.fullmatch(part)
        if match is None:
            raise errors.InvalidArgument(f'mesh is {text!r}, of which {part!r} is no dimension; write "ddp=2,fsdp=4"')
        dimension: dict[str, Any] = {"name": match[1], "size": int(match[3])}
        if match[2] is not None:
            dimension["role"] = f"DIMENSION_ROLE_{match[2].upper()}"
        dimensions.append(dimension)
    return dimensions


def _integer(what: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise errors.InvalidArgument(f"{what} is {value!r}; it must be an integer")
