"""A job that goes on from a checkpoint."""
from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from .. import errors

# What a trainer relies on, and its value where nothing is said.
_OF_THE_JOB = {"slots": 1, "residency": "RESIDENCY_FULL", "slot_mode": "SLOT_MODE_ASSIGNED", "token_weights": False}
_OF_A_PARAMETER = {"format": "FORMAT_FP32", "states": "STATE_FORMAT_FP32", "gather": "GATHER_FORMAT_STORED", "group": 0,
                   "frozen": False}
_LISTED = 5  # names of each kind, in an error


def newest(path: str) -> str:
    """The checkpoint at `path`, or the newest one in that folder. NotFound: there is none."""
    if os.path.exists(os.path.join(path, "manifest.json")):
        return path
    found = sorted(glob.glob(os.path.join(glob.escape(path), "step-*", "manifest.json")))
    if not found:
        raise errors.NotFound(f"{path} has no checkpoint; optimizer.save() writes one there, as does shardctl checkpoint")
    return os.path.dirname(found[-1])


def check(path: str, spec: Mapping[str, Any]) -> None:
    """InvalidArgument: the checkpoint is of another model, or of other slots than `spec` says; all differences of its
    parameters. DataLoss: it cannot be read."""
    try:
        with open(os.path.join(path, "manifest.json"), encoding="utf-8") as file:
            there = json.load(file)["job"]
        shapes = {one["name"]: [int(size) for size in one.get("shape", [])] for one in there["parameters"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise errors.DataLoss(f"{path}: its manifest cannot be read: {error}") from error
    here = {one["name"]: list(one["shape"]) for one in spec["parameters"]}
    problems = [
        *_listed("not in the checkpoint", [name for name in here if name not in shapes]),
        *_listed("not in the model", [name for name in shapes if name not in here]),
        *_listed("of another shape", [
            f"{name} {shapes[name]} there, {here[name]} here" for name in here if name in shapes and shapes[name] != here[name]
        ]),
    ]
    if problems:
        raise errors.InvalidArgument(f"{path} is of another model; nothing was loaded:\n  " + "\n  ".join(problems))
    for field, was, wanted in _settings(there, spec):
        if was != wanted:
            raise errors.InvalidArgument(f"{path} is of a job with {field} {was}, and this one is to have {wanted}; make the optimizer "
                                         "as that job was made")


def _settings(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(what, its value there, here), of all that a job has for good."""
    defaults = {**_OF_THE_JOB, "clip_norm": 0.0, "gradient_format": "FORMAT_BF16"}
    for field, default in defaults.items():
        yield field, there.get(field, default), here.get(field, default)
    yield "seed", int(there.get("seed", 0)), int(here.get("seed", 0))
    groups = [[one["optimizer"], *one.get("more_groups", [])] for one in (there, here)]
    yield "parameter groups:", len(groups[0]), len(groups[1])
    for index, (was, wanted) in enumerate(zip(*groups)):
        for key in sorted((was.keys() | wanted.keys()) - {"learning_rate"}):
            yield f"{key} of group {index}", was.get(key) or 0, wanted.get(key) or 0
    named = {one["name"]: one for one in there["parameters"]}
    for one in here["parameters"]:
        for field, default in _OF_A_PARAMETER.items():
            yield f"{field} of {one['name']}", named[one["name"]].get(field, default), one.get(field, default)


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return [f"{what}: {', '.join(names[:_LISTED])}{more}"]
