"""How an optimizer starts: the model's facts, a service, the job, this rank's session; how it gets other weights."""
from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch

from .. import _dcp, errors
from .. import client as clients
from .._tls import Tls
from . import _arguments, _buffers, _resume
from ._job import _hyper
from ._job._session import LOG, OVER, TrainerSession
from ._job._specification import BUCKET_ELEMENTS, PREFETCH_BUCKETS, specification
from ._machine import _service
from ._machine._others import Others
from ._machine._ranks import Ranks, ranks
from ._modules import _canonical
from ._modules._checks import check_values
from ._modules._guard import of_one_optimizer
from ._modules._model import NO_GROUP, Facts, Parameter, Parameters, canonical_rules, facts
from ._modules._units import bucket_elements
from ._rewrite import rewrite
from ._weights._deferred import Deferred, Init

_POLL_SECONDS = 0.05
_LONGEST_CALL = 10.0  # seconds, of calls that only ask
_ABSENT = ('; with residency="bucket" a weight that is read while its block is not called is NaN: a penalty over '
           'parameters needs residency="full"')
_trained: set[tuple[str, str, int]] = set()  # service, job and rank of each optimizer of this process


class Plan(NamedTuple):
    """The arguments of an optimizer."""

    algorithm: str
    hyperparameters: Mapping[str, Any]
    service: Optional[str]
    tls: Tls
    workers: int
    slots: Optional[int]
    pulled: bool
    token_weights: bool
    on_went_back: str
    timeout: float
    deliver: str
    init: Optional[Init]
    resume: Optional[str]
    join: Optional[bool]
    specification: Mapping[str, Any]


class Started:
    """What runs. `session` is another one after the job's weights were replaced."""

    def __init__(self, params: Parameters, model: Optional[torch.nn.Module], plan: Plan) -> None:
        _arguments.check(model, plan._asdict(), plan.specification)
        self.plan = plan
        self._saved = False
        self.at_once = True  # at close(): other ranks are not waited for, unless the optimizer has begun
        self.model = params if isinstance(params, torch.nn.Module) else model
        if self.model is None and plan.deliver == "quantized":
            raise errors.InvalidArgument('deliver="quantized" needs the model: give it, or model=')
        of_model = facts(params, model)
        self.facts: Facts = of_one_optimizer(of_model, self.bucketed)
        self.ranks: Ranks = ranks()
        self.slots = self.ranks.slots(plan.slots) if not plan.pulled else range(0)
        self.defaults = _hyper.defaults(plan.algorithm, plan.hyperparameters)
        self.groups = self._groups()
        self.spec = self._specification()
        self.name = str(self.spec["name"])
        ranks_of_mesh = math.prod(dimension["size"] for dimension in self.spec.get("mesh", []))
        if plan.service is None and ranks_of_mesh > plan.workers:
            raise errors.InvalidArgument(
                f"mesh={plan.specification['mesh']!r} needs {ranks_of_mesh} workers, and the service of this trainer's "
                f"own has {plan.workers}; say workers={ranks_of_mesh}"
            )
        self.rules = canonical_rules(self.facts)._asdict()
        self._deferred = Deferred(self.model, of_model, int(self.spec["seed"]), plan.init)
        self._deferred.make_buffers()
        if plan.service is None and not plan.resume and self.ranks.world == 1:  # else rank 0 tells the others, later
            self.check_values(self.facts.parameters, begun=False)
        self._running = _service.find(plan.service, self.ranks.rank, self.ranks.world, plan.workers, plan.timeout)
        self.others = Others(self._running.board, self.name, self.ranks.rank)
        try:
            self.address = self._running.address
            self._check_one_of_job()
            self.others.enter()
            self.client = clients.connect(
                self.address, call_timeout=min(_LONGEST_CALL, plan.timeout), **plan.tls._asdict())
            self.session = self._resumed() if plan.resume else self.session_of(create=True)
            if self.session.has_weights():
                self._check_join()
            else:
                self._deferred.check()
            self.session.begin(self._first_weights if self.ranks.rank == 0 else None, self._restored())
            self._deferred.finish()
            if plan.resume:
                self._load_buffers(plan.resume)
        except BaseException as error:
            self.others.leave()
            self.__dict__.pop("client", None)  # connections, for which the service would wait
            raise self._running.failed(error)
        _trained.add(self._key)
        self._pid = os.getpid()
        if self.ranks.rank == 0:
            atexit.register(self._leave)

    def _leave(self) -> None:
        """The job, if the program ends without close(): rank 0 then waits for ranks that may need its gradients, and the
        service that it ends would wait for this session. Weights stay where they are, for whoever reads them at exit."""
        if os.getpid() == self._pid:
            self.others.leave()
            self.session.close()
            self.__dict__.pop("client", None)

    @property
    def _key(self) -> tuple[str, str, int]:
        return self.address, self.name, self.ranks.rank

    def _check_one_of_job(self) -> None:
        if self._key in _trained:
            raise errors.FailedPrecondition(
                f"another optimizer of this process trains job {self.name!r} of this service; give this one a job of "
                "its own with job=, or close() the other one first"
            )

    def _check_join(self) -> None:
        """The job has weights. Rank 0 would give them, so they are of an earlier run, or of whoever made the job; so
        are those of a step, to which every rank contributes.

        AlreadyExists: join=False.
        """
        earlier = self.ranks.rank == 0 or (self.session.committed > 0 and not self.plan.pulled)
        if not earlier or self.plan.join or self.plan.resume:
            return
        has = f"job {self.name!r} of the service {self.address} has weights of step {self.session.committed} already"
        if self.plan.join is False:
            raise errors.AlreadyExists(
                f"{has}, and join=False; give this run another job=, or say join=True to continue with those weights"
            )
        if self.ranks.rank == 0:
            LOG.warning(
                "%s; this run takes them and continues there. Give it another job= to begin with the weights of its "
                "own model, or join=True to continue without this warning; with join=False that is an error", has
            )

    @property
    def bucketed(self) -> bool:
        return bool(self.plan.specification["residency"] == "bucket")

    def _groups(self) -> list[dict[str, Any]]:
        """As torch.optim takes them."""
        groups: list[dict[str, Any]] = [{"params": [], **{key: value for key, value in options.items() if key != "params"}}
                                        for options in self.facts.groups]
        for parameter in self.facts.parameters:
            if parameter.group != NO_GROUP:
                groups[parameter.group]["params"].append(parameter.tensor)
        return groups

    def _specification(self) -> dict[str, Any]:
        plan, options = self.plan, dict(self.plan.specification)
        total = plan.slots if plan.slots is not None else self.ranks.world
        spec = specification(
            self.facts, plan.algorithm, plan.hyperparameters, slots=total,
            trainers=self.ranks.world if plan.pulled else None, **options,
        )
        spec["token_weights"] = plan.token_weights
        if self.bucketed:
            if self.model is None:
                raise errors.InvalidArgument('residency="bucket" needs the model: give it, or model=')
            spec["bucket_elements"], spec["prefetch_buckets"] = bucket_elements(self.model, self.facts.parameters)
        return spec

    def _resumed(self) -> TrainerSession:
        """Of the checkpoint, which rank 0 restores."""
        if self.ranks.rank == 0:
            path = _resume.newest(str(self.plan.resume))
            _resume.check(path, self.spec)
            _buffers.Saved(path).check(self.model)
            chosen = self.plan.specification
            job = self.client.restore(
                path, name=self.name, mesh=chosen["mesh"], residency=chosen["residency"], fit_mesh=True,
                on_loss=chosen["on_loss"], copies=chosen["copies"],
                bucket_elements=int(self.spec.get("bucket_elements", BUCKET_ELEMENTS)),
                prefetch_buckets=int(self.spec.get("prefetch_buckets", PREFETCH_BUCKETS)), timeout=self.plan.timeout)
            LOG.info("job %s continues from %s on mesh %s", self.name, path, job.mesh)
        return self.session_of(create=False)

    def _restored(self) -> Optional[int]:
        """The step that the job begins with. None: it is a checkpoint's, which this rank does not see."""
        if not self.plan.resume:
            return 0
        try:
            return _dcp.manifest(_resume.newest(str(self.plan.resume)))[1]
        except errors.Error:
            return None

    def _load_buffers(self, resume: str) -> None:
        """Every rank whose model has some reads them. NotFound: it does not see the checkpoint."""
        if self.model is None or not any(_canonical.buffers(self.model)):
            return
        try:
            saved = _buffers.Saved(_resume.newest(str(resume)))
        except errors.NotFound as error:
            raise errors.NotFound(
                f"rank {self.ranks.rank} reads the buffers of its model there, and cannot: {error}; put the checkpoint "
                "where every rank sees it under the same path"
            ) from None
        saved.check(self.model)
        saved.load(self.model)

    def save(self, folder: str, **options: Any) -> clients.SavedCheckpoint:
        """With this rank's buffers."""
        if not self._saved:
            _buffers.warn_of_missing(self.model)
            self._saved = True
        return self.client.checkpoint(self.name, folder, buffers=_buffers.to_save(self.model), **options)

    def session_of(self, create: bool, replaces_uid: int = 0) -> TrainerSession:
        """A new one of the job, which is made if `create` says so, in the place of the job that has replaces_uid."""
        timeout, core = self.plan.timeout, self.client._core
        if create:
            job = core.create_job(json.dumps(self.spec), timeout=timeout, replaces_uid=replaces_uid, **self.rules)
        else:
            job = core.open_to_train(self.name, timeout=timeout, **self.rules)
            mine = str(self.plan.specification["residency"])
            if job.residency != mine:  # rank 0 restored it from a checkpoint, which may have had either
                raise errors.InvalidArgument(
                    f"rank {self.ranks.rank} says residency={mine!r}, and rank 0 resumed job {self.name!r} with "
                    f"residency={job.residency!r}; give every rank the same arguments"
                )
        slots, why = None if self.plan.pulled else list(self.slots), _ABSENT if self.bucketed else ""
        return TrainerSession(job, slots, timeout, self.others, why)

    def _first_weights(self) -> dict[str, Any]:
        self._deferred.initialize()
        return self.initial_weights()

    def check_values(self, parameters: Sequence[Parameter], begun: bool = True) -> None:
        """InvalidArgument: one has weights that no job can have. begun: they are to replace the job's."""
        entries = {entry["name"]: entry for entry in self.spec["parameters"]}
        for parameter in parameters:
            check_values(parameter.name, parameter.tensor, parameter.frozen, entries[parameter.name], begun)

    def initial_weights(self) -> dict[str, Any]:
        self.check_values(self.facts.parameters, begun=False)
        weights = {}
        for parameter in self.facts.parameters:
            weights[parameter.name] = parameter.tensor.detach().to("cpu", torch.float32).contiguous().numpy()
            self._deferred.taken(parameter.tensor)
        return weights

    def renew(self) -> None:
        """The session of the job as it is now."""
        self.session = self.session_of(create=False)

    @contextlib.contextmanager
    def replaced(self, kept: str, lost: Callable[[], None] = lambda: None) -> Iterator[int]:
        """Gives the uid of the job; in the block another job takes its place, by one call of the service.

        Afterwards no worker has the old job, so that whoever reads the name's versions finds the new one's. If the block
        fails and the service has the old job still, nothing has changed. Else lost() is called, and the error says what
        is kept; lost() also when it is interrupted.
        """
        old = self.session.job
        try:
            yield old.uid
        except errors.Error as error:
            if self._is_there(old.uid):
                raise
            lost()
            raise type(error)(f"{error}; job {self.name!r} may have no weights now: {kept}") from error
        except BaseException:
            lost()
            raise
        self.session.close()
        old.await_closed(timeout=self.plan.timeout)

    def _is_there(self, uid: int) -> bool:
        try:
            return bool(self.client._core.open_to_train(self.name, timeout=_LONGEST_CALL, **self.rules).uid == uid)
        except errors.Error:
            return False

    def follow(self) -> None:
        """Of ranks other than 0, which replaces the job's weights: waits for the job that has them.

        DeadlineExceeded: it did not come. FailedPrecondition: rank 0 left, or could not replace them."""
        try:
            self._await_end()
            self.renew()
            self.session.begin(None)
        except (*OVER, errors.DeadlineExceeded) as error:
            self.others.check_host("the change of weights", error)
            raise

    def _await_end(self) -> None:
        """Until rank 0 has taken the job away."""
        deadline = time.monotonic() + self.plan.timeout
        while time.monotonic() < deadline:
            self.others.check_change()
            try:
                self.session.core.await_weights(timeout=1.0)
            except OVER:
                return
            time.sleep(_POLL_SECONDS)
        raise errors.DeadlineExceeded(
            f"rank 0 did not replace the weights of job {self.name} within {self.plan.timeout:g} s; every rank makes "
            "the same changes, and calls step() or load_state_dict() after them"
        )

    def checkpoint(self, folder: str) -> str:
        """Of the newest step, for a moment; its path. Several ranks may do this at once: the service writes one after
        the other."""
        deadline = time.monotonic() + self.plan.timeout
        while True:
            try:
                return self.client.checkpoint(self.name, folder, timeout=self.plan.timeout, record=False).path
            except errors.Aborted:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_POLL_SECONDS)

    def optimizers(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Of each group, with what it says now."""
        known = set(self.defaults)
        return _hyper.optimizers(
            self.plan.algorithm, {}, [{key: value for key, value in group.items() if key in known} for group in groups]
        )

    def close(self) -> None:
        """Connections go before the service, which would wait for them."""
        atexit.unregister(self._leave)
        self.others.leave()
        _trained.discard(self._key)
        self.session.close()
        del self.client
        self._running.close(self.at_once)


def fixed(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a job cannot change from step to step."""
    return {"params": list(map(id, group["params"])),
            **{key: group[key] for key in _hyper.FIXED_BY_A_JOB if key in group}}


def _plain(value: Any) -> Any:
    """A pair is the same as a tuple and as a list."""
    return tuple(value) if isinstance(value, list) else value


def check_fixed(groups: Sequence[Mapping[str, Any]], job: Sequence[Mapping[str, Any]]) -> None:
    """Unimplemented: one was changed; FailedPrecondition: there are more or fewer. job: fixed() of its groups."""
    if len(groups) != len(job):
        raise errors.FailedPrecondition(
            f"there are {len(groups)} parameter groups; the job was made with {len(job)}: put those back, or close() this "
            "optimizer and make another"
        )
    for index, (group, of_job) in enumerate(zip(groups, job)):
        if list(map(id, group["params"])) != of_job["params"]:
            raise errors.FailedPrecondition(
                f"group {index} has other parameters than those that the job trains; put them back, or close() this "
                "optimizer and make another"
            )
        for key, value in of_job.items():
            if key != "params" and _plain(group.get(key)) != _plain(value):
                was = "were" if key == "betas" else "was"
                raise errors.Unimplemented(
                    f"{key} of group {index} {was} changed from {value!r} to {group.get(key)!r}; a job can change lr "
                    "alone from step to step (of OneCycleLR and CyclicLR: cycle_momentum=False)"
                )


def replace_weights(started: Started, changed: Sequence[Parameter]) -> None:
    """Every rank calls it; the weights of rank 0 count. Optimizer states stay as they are."""
    with started.others.change():
        started.check_values(changed)
        _replace_weights(started, changed)


def _replace_weights(started: Started, changed: Sequence[Parameter]) -> None:
    if started.ranks.rank != 0:
        started.follow()
    elif started.session.committed == 0 and len(changed) == len(started.facts.parameters):
        weights = started.initial_weights()
        with started.replaced("the model still has them; close() this optimizer, and make another") as uid:
            session = started.session_of(create=True, replaces_uid=uid)
            session.begin(lambda: weights)
        started.session = session
    else:
        rewrite(started, weights={parameter.name: parameter.tensor for parameter in changed})
