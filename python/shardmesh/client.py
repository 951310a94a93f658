"""The client of a running service, for readers: versions of a job, whole, pulled or mapped; leases; checkpoints.

    client = shardmesh.connect("127.0.0.1:7000")
    for version in client.job("gpt").follow():
        use(version["lm_head.weight"])

docs/python.md, "Versions of a running job", says more. All of it is the C++ client (client/cpp/). Times are seconds,
and every wait has one. A wait lets other threads run, and ends with KeyboardInterrupt. Client and Job may be used by any
thread, a Follower by one at a time. Errors are those of shardmesh.errors. A process that uses this must not go on in a
child that it forks: calls there raise FailedPrecondition.
"""
from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Optional, Union

from . import _arguments, _client, _tls, errors
from ._follower import Follower, OnVersion, choice, seconds
from ._load import LoadMismatch
from ._version import Tensor, Version

__all__ = [
    "Client", "Digest", "Follower", "Job", "JobStatus", "Lease", "LoadMismatch", "SavedCheckpoint", "Tensor", "Version",
    "Versions", "connect",
]

_LOG = logging.getLogger("shardmesh")

Buffer = tuple[str, str, Sequence[int], bytes]  # name, dtype as safetensors files call it, shape, bytes
Progress = Optional[Callable[[int, int], object]]  # bytes done, and of all


class JobStatus(NamedTuple):
    """A job, as the coordinator sees it."""

    name: str
    state: str  # WAITING, PREPARING, READY or FAILED
    committed: int | None  # the newest committed step; None: no weights yet
    published: list[int]  # versions that can be read, ascending
    error: str  # why it failed
    waits_for: str  # what is missing until it is READY


class Versions(NamedTuple):
    """As of the last heartbeats."""

    committed: int | None  # the newest committed step; None: no weights yet
    published: list[int]  # versions that can be read, ascending
    epoch: int  # of the job; this one is of now


class Digest(NamedTuple):
    """64 bits over all weights and optimizer states of a step: the same on every mesh."""

    step: int
    value: int

    def __str__(self) -> str:
        return f"step {self.step} digest {self.value:016x}"


class SavedCheckpoint(NamedTuple):
    path: str
    step: int
    digest: int
    bytes: int  # of its files
    removed_steps: list[int]  # by keep_last
    already_there: bool = False  # that step was saved there before, with the same bits, and stays as it was


def connect(
    coordinator: str,
    *,
    tls_cert: _tls.Path = None,
    tls_key: _tls.Path = None,
    tls_ca: _tls.Path = None,
    tls_name: str | None = None,
    call_timeout: float = 10.0,
) -> Client:
    """The client of the coordinator at "host:port"; the first call connects.

    TLS with all of tls_cert, tls_key and tls_ca (PEM files); tls_name is the name in the servers' certificates, where
    it is not the one dialled. What is not given comes from the variables SHARDMESH_TLS_CERT, SHARDMESH_TLS_KEY,
    SHARDMESH_TLS_CA and SHARDMESH_TLS_NAME. call_timeout: of calls that only ask.
    InvalidArgument: no address; another host's without TLS; a file is missing, or not what it should be. NotFound,
    PermissionDenied: no such file.
    """
    address, timeout = _arguments.text("coordinator", coordinator), seconds("call_timeout", call_timeout)
    tls = _tls.options(address, _tls.Tls(tls_cert, tls_key, tls_ca, tls_name))
    return Client(_client.Client(address, call_timeout=timeout, **tls))


class Client:
    """Made by connect()."""

    def __init__(self, core: _client.Client) -> None:
        self._core = core

    def jobs(self) -> list[JobStatus]:
        """All jobs, by name."""
        return [
            JobStatus(name, state, _committed(committed), published, error, waits_for)
            for name, state, committed, published, error, waits_for in self._core.jobs()
        ]

    def job(
        self,
        name: str,
        *,
        timeout: float = 60.0,
        await_creation: bool = False,
        root_wrappers: Sequence[str] = (),
        literal: Sequence[str] = (),
        wrapped_at: Sequence[str] = (),
    ) -> Job:
        """The job of that name, when its workers are ready; with await_creation also one that is not created yet.

        The last three are the rules of the names that versions are asked for, as names.canonical() has them.
        NotFound: there is no such job. DeadlineExceeded: it was not ready within `timeout`; says what it waits for.
        Unavailable: it failed, and no worker of it can be read from.
        """
        return Job(self._core.job(
            _arguments.text("name", name), timeout=seconds("timeout", timeout), await_creation=bool(await_creation),
            root_wrappers=list(root_wrappers), literal=list(literal), wrapped_at=list(wrapped_at),
        ))

    def checkpoint(
        self,
        job: Union[Job, str],
        folder: str,
        *,
        keep_last: int = 0,
        keep_every: int = 0,
        timeout: float = 600.0,
        progress: Progress = None,
        buffers: Sequence[Buffer] = (),
        record: bool = True,
    ) -> SavedCheckpoint:
        """Writes the newest committed step to a folder of checkpoints, which all workers see under the same path.

        The folder is made, with its parents. Training continues. Then the newest `keep_last` and every `keep_every`th
        step stay, and all others are removed (0: none is). `progress` is called with the bytes done and those of all.
        Given up (KeyboardInterrupt, an error of `progress`), it may still be finished. A step that was saved there
        before, with the same bits, stays as it is: `already_there` of the result says so.
        buffers: what the model has beside its parameters; the service does not have that. Optimizer.save() gives them.
        record: whether a job made with on_loss="checkpoint" goes back to this one; not to one that is removed soon. Where
        the coordinator cannot be told of it, a warning says so, and no older one is removed.
        timeout: of each wait for others, that for the coordinator among them.
        AlreadyExists: that step is there with other bits. FailedPrecondition: no weights yet, or workers that do not see the folder.
        Aborted: another checkpoint is under way. ResourceExhausted: the disk is full. DataLoss: replicas differ.
        """
        last, every = _arguments.integer("keep_last", keep_last), _arguments.integer("keep_every", keep_every)
        limit = seconds("timeout", timeout)
        opened = job if isinstance(job, Job) else self.job(job, timeout=limit)
        saved = opened._core.checkpoint(
            _path("folder", folder), keep_last=last, keep_every=every, timeout=limit,
            progress=progress, buffers=[(name, dtype, list(shape), data) for name, dtype, shape, data in buffers],
            record=bool(record),
        )
        if unknown := saved[6]:
            _LOG.warning("the coordinator does not know of checkpoint %s, so job %s would not go back to it: %s", saved[0],
                         opened.name, unknown)
        return SavedCheckpoint(*saved[:6])

    def restore(
        self,
        path: str,
        *,
        name: str | None = None,
        mesh: str | None = None,
        gather: str | None = None,
        residency: str | None = None,
        bucket_elements: int = 0,
        prefetch_buckets: int = 0,
        on_loss: str | None = None,
        copies: int = 0,
        fit_mesh: bool = False,
        timeout: float = 600.0,
        progress: Progress = None,
    ) -> Job:
        """Creates the job of a checkpoint, or of the newest one in a folder of them: it continues with the same bits.

        name, mesh ("ddp=2,fsdp=2"), gather ("stored", "fp8_tensor", ...), residency ("full", "bucket"),
        on_loss ("fail", "checkpoint"): as it was saved, where not given. So are bucket_elements (elements gathered
        together, about), prefetch_buckets (that a trainer may hold beyond the one it works on) and copies (of each shard,
        1 or 2), where they are 0.
        fit_mesh: where no mesh is given and the saved one does not fit the live workers, the job gets one that does.
        timeout: of each wait for others; reading the files may take longer, a second for 50 MB.
        NotFound: no checkpoint there. DataLoss: a file is not what was saved. InvalidArgument: no such mesh, format
        or residency, or sizes of buckets that cannot be.
        FailedPrecondition: a job of that name has weights already. AlreadyExists: it is another job.
        """
        texts = {"name": name, "mesh": mesh, "gather": gather, "residency": residency, "on_loss": on_loss}
        chosen = {what: "" if value is None else _arguments.text(what, value) for what, value in texts.items()}
        return Job(self._core.restore(
            _path("path", path), fit_mesh=bool(fit_mesh), timeout=seconds("timeout", timeout), progress=progress,
            replaces_uid=0, bucket_elements=_arguments.integer("bucket_elements", bucket_elements),
            prefetch_buckets=_arguments.integer("prefetch_buckets", prefetch_buckets),
            copies=_arguments.integer("copies", copies), record=True, **chosen
        ))


class Job:
    """A job, by its name: each call is of the workers that it has by then. Made by Client.job()."""

    def __init__(self, core: _client.Job) -> None:
        self._core = core
        self._pullers: list[_client.Reader] = []  # that are at rest

    def __repr__(self) -> str:
        return f"<Job {self.name} on mesh {self.mesh}>"

    @property
    def name(self) -> str:
        return self._core.name

    @property
    def mesh(self) -> str:
        """When it was opened."""
        return self._core.mesh

    @property
    def publications(self) -> int:
        """How many versions a host has room for: readers that hold as many stop newer ones."""
        return self._core.publications

    def versions(self) -> Versions:
        committed, published, epoch = self._core.versions()
        return Versions(_committed(committed), published, epoch)

    @property
    def publishes_on_demand(self) -> bool:
        """Whether its versions are those that somebody asked for, by publish()."""
        return self._core.publish_every < 0

    def publish(self, *, timeout: float = 60.0) -> int:
        """Makes the committed step a version for readers, if it is none yet; returns the step. Training goes on.

        FailedPrecondition: no weights yet. ResourceExhausted: readers hold all that the host has room for. Unimplemented:
        not of this job where it is; the message says what would work (docs/support.md).
        """
        return self._core.publish(seconds("timeout", timeout))[1]

    def digest(self, *, timeout: float = 60.0) -> Digest:
        """Of the committed step. Unavailable: the job failed."""
        return Digest(*self._core.digest(seconds("timeout", timeout)))

    def pull(
        self,
        *,
        exact: int | None = None,
        at_least: int | None = None,
        latest: bool | None = None,
        timeout: float = 60.0,
    ) -> Version:
        """A whole version in this process's own memory, from any host: the newest one, that of a step, or the newest
        of at least a step, waited for. Steps are of the job's newest epoch: after the trainer has gone back to step 3,
        at_least=5 waits for the new step 5.

        OutOfRange: an exact version that is not there; names those that are. DeadlineExceeded: it did not come within
        `timeout`. Unavailable: the workers cannot be reached, or the job failed without it. NotFound: the job is gone.
        """
        wanted, limit = choice(exact, at_least, latest), seconds("timeout", timeout)
        try:
            reader = self._pullers.pop()
        except IndexError:
            reader = _client.Reader(self._core, way="pulled", ttl=30.0)
        version = Version(reader.take(*wanted, timeout=limit))
        self._pullers.append(reader)
        return version

    def hold(
        self,
        *,
        exact: int | None = None,
        at_least: int | None = None,
        latest: bool | None = None,
        timeout: float = 60.0,
        way: str = "any",
        ttl: float = 30.0,
    ) -> Version:
        """The same without a copy where this process is on a host of the job: mapped, and kept by the job's workers
        until it is closed (`with job.hold() as version:`) and no array of it is left. `way`, `ttl`: as follow()."""
        wanted, limit = choice(exact, at_least, latest), seconds("timeout", timeout)
        return Follower(self._core, wanted, limit, way, ttl)._take()

    def follow(
        self,
        callback: OnVersion | None = None,
        *,
        since: int | None = None,
        exact: int | None = None,
        at_least: int | None = None,
        latest: bool | None = None,
        timeout: float = 600.0,
        way: str = "any",
        ttl: float = 30.0,
    ) -> Follower:
        """One version after the other, each newer than the one before: an iterator, see Follower.

        The first is the newest one, or as pull() has it; since=N is at_least=N+1. Each may take `timeout`. way:
        "attached" (mapped; FailedPrecondition: no worker of the job is on this host), "pulled" (copied, from anywhere),
        or "any": attached where that is possible. ttl: what is held by a reader that is silent for so long counts as
        abandoned (0.1 to 86400).
        With a callback: calls it with each version, as Follower.run(), and returns the closed follower.
        """
        wanted = choice(exact, at_least, latest, since)
        follower = Follower(self._core, wanted, seconds("timeout", timeout), way, ttl)
        if callback is not None:
            follower.run(callback)
        return follower

    def lease(
        self,
        *,
        exact: int | None = None,
        at_least: int | None = None,
        latest: bool | None = None,
        ttl: float = 30.0,
        timeout: float = 60.0,
    ) -> Lease:
        """Keeps a version at the workers of one host for `ttl` (0.1 to 86400), longer when it is renewed in time.

        OutOfRange, DeadlineExceeded: as pull(). ResourceExhausted: the host has granted as many as it can.
        """
        kind, step, _ = choice(exact, at_least, latest)
        duration = seconds("ttl", ttl)
        return Lease(self._core.lease(kind, step, ttl=duration, timeout=seconds("timeout", timeout)), duration)


class Lease:
    """A version that the workers keep for readers of other hosts.

        with job.lease() as lease:
            version = job.pull(exact=lease.step)

    Released at the end of the block; one that is forgotten ends by itself. Errors of renew() and release(): NotFound,
    it has ended, and its version may be gone; Aborted: the job goes on with other workers.
    """

    def __init__(self, core: _client.Lease, ttl: float) -> None:
        self._core, self._ttl = core, ttl

    def __repr__(self) -> str:
        return f"<Lease {self.id:016x} of version {self.step}>"

    @property
    def id(self) -> int:
        """As `shardctl leases` shows it."""
        return self._core.id

    @property
    def nonce(self) -> int:
        """A secret: with it `shardctl leases JOB --release ID --nonce NONCE`, both in hexadecimal, ends the lease."""
        return self._core.nonce

    @property
    def step(self) -> int:
        return self._core.step

    @property
    def epoch(self) -> int:
        """Of the version. Where it is not Job.versions().epoch, the job has left the version behind."""
        return self._core.epoch

    @property
    def ttl(self) -> float:
        """What was left of it when it was granted or renewed last."""
        return self._core.ttl

    def renew(self, ttl: float | None = None) -> None:
        """From now on, for as long as at first where no other time is given."""
        self._core.renew(self._ttl if ttl is None else seconds("ttl", ttl))

    def release(self) -> None:
        self._core.release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except Exception:
            if error is None:
                raise


def _committed(step: int) -> int | None:
    return None if step < 0 else step


def _path(what: str, value: Any) -> str:
    path = os.fsdecode(os.fspath(value))
    if not path or "\0" in path:
        raise errors.InvalidArgument(f"{what} is {path!r:.80}; it must be the path of a folder")
    return path
