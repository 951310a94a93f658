"""A model for inference that stays at the latest committed version of a job.

    with shardmesh.torch.follow(model, service="10.0.0.1:7000", job="gpt") as following:
        for request in requests:
            following.update()  # between requests: at the newest version, whole
            serve(model, request)
"""
from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Optional

import torch

from .. import _client, errors
from .._follower import Choice, choice, newer, seconds
from .._load import LoadMismatch
from .._tls import Path
from .._version import Version
from ..client import Client, Job, Versions, connect
from ._buffers import listed
from ._job._session import LOG
from ._modules._canonical import buffers
from ._modules._guard import check_not_trained
from ._modules._model import Facts, canonical_rules
from ._modules._wrappers import walk

__all__ = ["Following", "follow"]

_POLL_SECONDS = 0.02
_MISSING_SECONDS = 1.0
_PUBLISH_SECONDS = 10.0
_FIRST_SECONDS = 2.0  # longer than workers take to tell the coordinator of a version


class _Target(NamedTuple):
    """A tensor of the model, once."""

    given: str  # as the module has it
    names: tuple[str, ...]  # canonical; several of a tie
    tensor: torch.nn.Parameter


def follow(
    model: torch.nn.Module,
    *,
    service: str,
    job: str,
    tls_cert: Path = None,
    tls_key: Path = None,
    tls_ca: Path = None,
    tls_name: Optional[str] = None,
    copy: bool = False,
    way: str = "any",
    timeout: float = 60.0,
    ttl: float = 30.0,
    at_least: Optional[int] = None,
) -> Following:
    """Gives `model` the newest version of the job, and returns what brings later ones into it, between requests.

    Parameters become views of the version where this process is on a host of the job and the formats are the same, else
    copies in their own type and on their own device (of codes: decoded). Parameters on the meta device get memory.
    Views are of read-only memory, which PyTorch cannot know: writing to one ends the process; copy=True makes copies.
    tls_cert, tls_key, tls_ca, tls_name: for a service on another host, as shardmesh.connect() takes them.
    way, ttl: as Job.follow(). timeout: for the job, and its first version of at least the step `at_least`.
    FailedPrecondition: an optimizer of this process trains the model.
    LoadMismatch: missing, unexpected and mis-shaped names, all of them; nothing was loaded. NotFound: no such job.
    DeadlineExceeded: no version in time. Names are compared without wrappers, in whatever order those were put on.
    """
    tree = walk(model)
    check_not_trained(one.tensor for one in tree.found)
    rules = canonical_rules(Facts([], tree.rules, []))._asdict()
    by_tensor: dict[int, _Target] = {}
    for one in tree.found:
        known = by_tensor.get(id(one.tensor), _Target(one.given, (), one.tensor))
        by_tensor[id(one.tensor)] = known._replace(names=tuple(dict.fromkeys((*known.names, one.name))))
    client = connect(service, tls_cert=tls_cert, tls_key=tls_key, tls_ca=tls_ca, tls_name=tls_name)
    opened = client.job(job, timeout=timeout, **rules)
    left = [name for name, _ in buffers(model)]
    if left:
        LOG.warning("a job has no buffers, and those of the model stay as they are: %s; load them from a checkpoint "
                    "that optimizer.save() wrote", listed(left))
    following = Following(client, opened, list(by_tensor.values()), copy=copy, way=way, ttl=ttl)
    try:
        following.wait(at_least=at_least, timeout=timeout)
    except BaseException:
        following.close()
        raise
    return following


class Following:
    """Made by follow(). For the thread that uses the model: between two calls of it every parameter is of one version.

    A version is held until the next one is in the model; a job has room for few (Job.publications).
    """

    def __init__(
        self, client: Client, job: Job, targets: list[_Target], *, copy: bool, way: str, ttl: float
    ) -> None:
        self._client, self._job, self._targets = client, job, targets
        self._reader = _client.Reader(job._core, way=way, ttl=seconds("ttl", ttl))
        self._always_copies = copy
        self._held: Optional[Version] = None
        self._at: Optional[tuple[int, int]] = None  # epoch and step
        self._away: Optional[errors.Error] = None  # why nobody could be asked, the last time
        self._closed = False

    def __repr__(self) -> str:
        at = "no version" if self._at is None else f"version {self.step} of epoch {self.epoch}"
        return f"<Following {self._job.name} at {at}{', closed' if self._closed else ''}>"

    @property
    def job(self) -> Job:
        return self._job

    @property
    def step(self) -> int:
        """Of the version that the model is at."""
        assert self._at is not None
        return self._at[1]

    @property
    def epoch(self) -> int:
        """Of that version, as Version.epoch: it tells whether the step is of the same training as another one."""
        assert self._at is not None
        return self._at[0]

    @property
    def _copy(self) -> bool:
        """Of a job with one publication a view would keep the next version from being published."""
        return self._always_copies or (self.attached and self._reader.publications == 1)

    @property
    def _asks(self) -> bool:
        """Whether the job publishes when it is asked. One that is made again may be made otherwise."""
        return self._reader.publish_every < 0

    @property
    def attached(self) -> bool:
        """Whether versions are mapped; else they are pulled."""
        return self._reader.attached

    @property
    def views(self) -> int:
        """How many parameters are views of the version's own memory."""
        return sum(_why_copied(target, self._held, self._copy) is None for target in self._targets) if self._held else 0

    def update(self, *, timeout: float = 60.0) -> int:
        """Brings the model to the newest version, where there is a newer one, and returns the step that it is at then.

        After the trainer has loaded an older state that step is older, too. update() waits for no version: `timeout` is
        for having one made, of a job that publishes when it is asked, and for copying one from another host. On an error
        the model is as it was.
        """
        self._check_open()
        limit = seconds("timeout", timeout)
        if not self._asks:
            if self.attached:
                self._take_if_there(0.0)
            else:
                self._look(limit)
        if self._asks:
            self._ask(0, limit)
        return self.step

    def wait(self, *, at_least: Optional[int] = None, timeout: float = 60.0) -> int:
        """The same, of at least that step of the job's newest epoch, or of one that is newer than now; waited for.

        While a worker or the coordinator is started again, it just takes longer. DeadlineExceeded: none came within
        `timeout`. Unavailable: the job failed, or who would know is away still. NotFound: it is gone.
        """
        self._check_open()
        limit = seconds("timeout", timeout)
        deadline = time.monotonic() + limit
        wanted = choice(None, at_least, None) if at_least is not None or self._at is None else newer(*self._at)
        if at_least is not None and self._at is not None:
            if self._patiently(lambda: self.update() >= at_least):
                return self.step
        if not self._asks:
            self._take(wanted, max(deadline - time.monotonic(), 0.0))
            return self.step
        while not self._patiently(lambda: self._ask(at_least or 0, max(deadline - time.monotonic(), 0.0))):
            if time.monotonic() >= deadline:
                if self._away is not None:
                    raise self._away
                least = at_least if at_least is not None else self.step + 1 if self._at is not None else 0
                raise errors.DeadlineExceeded(
                    f"job {self._job.name} committed no step >= {least} within {limit:g} s; the model is at "
                    f"{self.step if self._at is not None else 'no version'}"
                )
            time.sleep(_POLL_SECONDS)
        return self.step

    def _patiently(self, ask: Callable[[], bool]) -> bool:
        """What `ask` says; False, with the error kept in `_away`, where a worker or the coordinator does not answer."""
        self._away = None
        try:
            return ask()
        except errors.DeadlineExceeded as error:
            self._away = error
        except errors.Unavailable as error:
            if self._has_failed():
                raise
            self._away = error
        return False

    def _has_failed(self) -> bool:
        try:
            return any(one.name == self._job.name and one.state == "FAILED" for one in self._client.jobs())
        except (errors.DeadlineExceeded, errors.Unavailable):
            return False

    def _ask(self, least: int, timeout: float) -> bool:
        """Of a job that publishes when it is asked: takes its committed step, from `least` on; whether that is new."""
        if self._at is None and self._versions().committed is None:  # which asks the coordinator
            return False
        try:
            # One that a worker's end has lost is made again in time, and one that waits for a long step is not cut off.
            at = self._job._core.publish(max(min(timeout, _PUBLISH_SECONDS), timeout / 2))
        except errors.FailedPrecondition:  # the job is being made again, and has no weights yet
            return False
        except errors.NotFound:  # or is gone, which this says then
            self._versions()
            return False
        if at == self._at or at[1] < least:
            return False
        self._take(("at_least", at[1], 0) if self._at is None else newer(*self._at), timeout)
        return True

    def _look(self, timeout: float) -> None:
        """Of versions that are pulled: takes a newer one, if the coordinator knows of one."""
        known = self._versions()
        if known.epoch == self.epoch:
            if max(known.published, default=-1) > self.step:
                self._take(newer(self.epoch, self.step), timeout)
        elif known.published:
            self._take(newer(self.epoch, self.step), timeout)
        else:  # it is ready before the coordinator hears of its first version
            self._take_if_there(min(timeout, _FIRST_SECONDS))

    def _versions(self) -> Versions:
        """A job that is deleted to be made again, with other weights, is missing for a moment."""
        deadline = time.monotonic() + _MISSING_SECONDS
        while True:
            try:
                return self._job.versions()
            except errors.NotFound:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_POLL_SECONDS)

    def _take_if_there(self, timeout: float) -> None:
        try:
            self._take(newer(self.epoch, self.step), timeout)
        except errors.DeadlineExceeded:
            pass

    def _take(self, wanted: Choice, timeout: float) -> None:
        version = Version(self._reader.take(*wanted, timeout=timeout))
        try:
            values = _values(version, self._targets, self._copy)
            _swap([target.tensor for target in self._targets], values)
        except BaseException:
            version.close()
            raise
        old, self._held, self._at = self._held, version, (version.epoch, version.step)
        if old is not None:
            old.close()

    def close(self) -> None:
        """The model stays at its version, in memory of its own; the job's is let go. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._reader.close()
        if self._held is not None:
            views = [t.tensor for t in self._targets if _why_copied(t, self._held, self._copy) is None]
            _swap(views, [tensor.data.clone() for tensor in views])
            self._held.close()
            self._held = None

    def __enter__(self) -> Following:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise errors.FailedPrecondition("this was closed; follow() the job again")


def _source(target: _Target, version: Version) -> str | None:
    """The name that the version has it by."""
    shapes = version.shapes
    return next((name for name in target.names if name in shapes), None)


def _why_copied(target: _Target, version: Version, copy: bool) -> str | None:
    """Why it is no view of the version's memory."""
    if copy:
        return "asked for"
    name = _source(target, version)
    stored, tensor = version.tensor(name) if name is not None else None, target.tensor
    if stored is None or stored.quantized:
        return "decoded"
    if tensor.dtype != (torch.float32 if stored.format == "fp32" else torch.bfloat16):
        return f"{stored.format} in the version, {tensor.dtype} in the model"
    return None if tensor.device.type in ("cpu", "meta") else f"on {tensor.device}"


def _values(version: Version, targets: list[_Target], copy: bool) -> list[torch.Tensor]:
    """What each is to be. LoadMismatch: the version is of another model."""
    _check(version, targets)
    values = []
    for target in targets:
        name, tensor = _source(target, version), target.tensor
        assert name is not None
        value = version.torch(name)
        if _why_copied(target, version, copy) is not None:
            device = "cpu" if tensor.is_meta else tensor.device
            value = value.to(device=device, dtype=tensor.dtype, copy=True)
            if not tensor.is_meta and not tensor.is_contiguous():
                value = torch.empty_like(tensor).copy_(value)
        values.append(value)
    return values


def _check(version: Version, targets: list[_Target]) -> None:
    shapes, ties = version.shapes, version.ties
    missing, misfits, had = [], [], set()
    for target in targets:
        owners = {ties.get(name, name) for name in target.names if name in shapes}
        had |= owners
        if not owners:
            missing.append(target.given)
        elif len(owners) > 1:
            misfits.append(f"{' and '.join(sorted(owners))} are two tensors in the version, one in the module")
        elif reason := _unfit(target.tensor, shapes[owners.pop()]):
            misfits.append(f"{target.names[0]} {reason}")
    unexpected = [name for name in version.names if ties.get(name, name) not in had]
    if missing or unexpected or misfits:
        raise LoadMismatch(missing, unexpected, misfits)


def _unfit(tensor: torch.Tensor, shape: tuple[int, ...]) -> str:
    if hasattr(tensor, "to_local"):
        return "is a DTensor; follow a module that is not sharded"
    if not tensor.is_floating_point():
        return f"is of {tensor.dtype}"
    if tuple(tensor.shape) != tuple(shape):
        return f"is of {tuple(tensor.shape)} in the module, of {tuple(shape)} in the version"
    return ""


def _swap(tensors: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    """All, or none."""
    undo: list[Callable[[], None]] = []
    try:
        for tensor, value in zip(tensors, values):
            undo.append(_put(tensor, value))
    except BaseException:
        for back in reversed(undo):
            back()
        raise


def _put(tensor: torch.nn.Parameter, value: torch.Tensor) -> Callable[[], None]:
    if not tensor.is_meta:
        before = tensor.data
        tensor.data = value
        return lambda: setattr(tensor, "data", before)
    made = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
    return lambda: torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
