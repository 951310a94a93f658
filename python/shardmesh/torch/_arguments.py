"""Arguments of an Optimizer that are wrong whatever the model is: said before anything starts."""
from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch

from .. import _core, errors
from .._tls import Tls
from .._tls import given as tls_given
from ._machine._service import checked_address

_MAX_SLOTS, _MAX_WORKERS, _MAX_EVERY = 128, 1024, 1 << 30
_MAX_SECONDS = 1e8
_LARGEST_FP32 = 3.4028234663852886e38
_JOB = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check(model: object, given: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
    """InvalidArgument: one is none; the message has the value and what would be right. spec: for the job's."""
    _need(model is None or isinstance(model, torch.nn.Module), "model", model, "a torch.nn.Module, or None")
    _whole("workers", given["workers"], 1, _MAX_WORKERS)
    _number("timeout", given["timeout"], "a number of seconds above 0, from 0.001 to 1e8", lowest=1e-3, highest=_MAX_SECONDS)
    if given["slots"] is not None:
        _whole("slots", given["slots"], 1, _MAX_SLOTS, "; None: one for each rank")
    for flag in "pulled", "token_weights":
        _need(isinstance(given[flag], bool), flag, given[flag], "True or False")
    _need(given["deliver"] in ("decoded", "quantized"), "deliver", given["deliver"], "decoded or quantized")
    _need(given["init"] is None or callable(given["init"]), "init", given["init"], "a function of a module, or None")
    _need(given["join"] in (None, True, False), "join", given["join"], "True, False or None")
    _need(given["on_went_back"] in ("raise", "continue"), "on_went_back", given["on_went_back"], "raise or continue")
    resume = given["resume"]
    _need(resume is None or isinstance(resume, (str, os.PathLike)), "resume", resume, "a path, or None")
    if (service := given["service"]) is not None:
        _need(isinstance(service, str), "service", service, 'an address, like "10.0.0.1:7000", or None')
        checked_address(service)
    _check_tls(service, given["tls"])
    _check_spec(spec)
    _check_features(given, spec)


def _check_features(given: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
    """Unimplemented: features of the job exclude each other, in the words in which the service would refuse it."""
    asked = {
        "pulled slots": given["pulled"], "bucket residency": spec["residency"] == "bucket",
        "token weights": given["token_weights"], "clip_norm": spec["clip_norm"] > 0,
    }
    _core.check_together(f"job {spec['name']}", [feature for feature, has in asked.items() if has])


def _check_tls(service: object, tls: Tls) -> None:
    for name, value in tls._asdict().items():
        if name == "tls_name":
            _need(value is None or isinstance(value, str), name, value, "the name in the servers' certificates, or None")
        else:
            _need(value is None or isinstance(value, (str, os.PathLike)), name, value, "the path of a PEM file, or None")
    if service is None and (arguments := tls_given(tls)):
        raise errors.InvalidArgument(
            f"{', '.join(arguments)} without service=: a service of this training's own is on this machine and uses no "
            'TLS; say service="host:port", or leave the arguments out'
        )


def _check_spec(spec: Mapping[str, Any]) -> None:
    _number("clip_norm", spec["clip_norm"], "0 (no clipping) or a positive number", highest=_LARGEST_FP32)
    _whole("seed", spec["seed"], 0, 2**64 - 1)
    if spec["publish_every"] != -1:
        _whole("publish_every", spec["publish_every"], 1, _MAX_EVERY, "; None: when a reader asks")
    name, mesh = spec["name"], spec["mesh"]
    is_name = isinstance(name, str) and _JOB.fullmatch(name) is not None
    _need(is_name, "job", name, "1 to 128 characters of A-Z a-z 0-9 . _ -")
    _need(mesh is None or isinstance(mesh, str), "mesh", mesh, 'a text like "ddp=2,fsdp=4", or None')


def _whole(what: str, value: object, lowest: int, highest: int, more: str = "") -> None:
    good = isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest
    _need(good, what, value, f"an integer from {lowest} to {highest if highest < 2**63 else '2^64 - 1'}{more}")


def _number(what: str, value: object, right: str, *, lowest: float = 0.0, highest: float) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    _need(good and lowest <= value <= highest, what, value, right)  # type: ignore[operator]


def _need(good: bool, what: str, value: object, right: str) -> None:
    if not good:
        raise errors.InvalidArgument(f"{what} is {value!r:.80}; it must be {right}")
