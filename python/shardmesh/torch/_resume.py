"""A job that goes on from a checkpoint."""
from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from .. import _client, _dcp, errors

# What may be another: where and how the job runs, how it is read, and the learning rate, which is a step's own.
_FREE = ("name", "mesh", "publish_every", "publications", "residency", "bucket_elements", "prefetch_buckets",
         "check_every", "non_finite", "slot_timeout_ms", "trainers", "on_loss", "copies")
_LISTED = 5  # names of each kind, in an error


def newest(path: str) -> str:
    """The checkpoint at `path`, or the one that was saved last into that folder. NotFound: there is none."""
    if os.path.exists(os.path.join(path, "manifest.json")):
        return path
    found = glob.glob(os.path.join(glob.escape(path), "step-*", "manifest.json"))
    if not found:
        raise errors.NotFound(
            f"{path} has no checkpoint; optimizer.save() writes one there, as does shardctl checkpoint"
        )
    return os.path.dirname(max(found, key=lambda manifest: (_saved(manifest), manifest)))


def _saved(manifest: str) -> int:
    """Its count of saves (checkpoint/manifest.h). One that cannot be read is the newest, so that opening it says why."""
    try:
        with open(manifest, encoding="utf-8") as file:
            return int(json.load(file).get("saved", 0))
    except (ValueError, TypeError, AttributeError):
        return sys.maxsize


def check(path: str, spec: Mapping[str, Any]) -> None:
    """InvalidArgument: the checkpoint is of another model than `spec`, with all differences of names and shapes; or
    another job, with the first difference; or it is none."""
    there, _ = _dcp.manifest(path)
    shapes = {one["name"]: [int(size) for size in one.get("shape", [])] for one in there["parameters"]}
    here = {one["name"]: list(one["shape"]) for one in spec["parameters"]}
    problems = [
        *_listed("not in the checkpoint", [name for name in here if name not in shapes]),
        *_listed("not in the model", [name for name in shapes if name not in here]),
        *_listed("of another shape", [
            f"{name} {shapes[name]} there, {here[name]} here"
            for name in here if name in shapes and shapes[name] != here[name]
        ]),
    ]
    if problems:
        raise errors.InvalidArgument(f"{path} is of another model; nothing was loaded:\n  " + "\n  ".join(problems))
    difference = _client.difference(json.dumps(there), json.dumps(_alike(there, spec)))
    if difference:
        raise errors.InvalidArgument(
            f"{path} is of another job than this optimizer would make: {difference}; make it as that job's was"
        )


def _alike(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """`here`, with what may be another, and the order of parameters, as it is there."""
    order = {one["name"]: index for index, one in enumerate(there["parameters"])}
    groups = [[one["optimizer"], *one.get("more_groups", [])] for one in (there, here)]
    first, *more = [
        {**group, "learning_rate": was.get("learning_rate", 0.0)}
        for was, group in zip_longest(*groups, fillvalue={}) if group
    ]
    return {
        **{field: value for field, value in here.items() if field not in _FREE},
        **{field: there[field] for field in _FREE if field in there},
        "parameters": sorted(here["parameters"], key=lambda one: order[one["name"]]), "optimizer": first,
        "more_groups": more,
    }


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return [f"{what}: {', '.join(names[:_LISTED])}{more}"]
