"""A rank's part in a job: it creates the job or finds it, gives it the first weights, and is attached to its slots.
When the job goes on without one of its workers, it is attached anew."""
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch

from ... import _client, errors
from .._machine._others import Others
from .._machine._patience import Patience
from ._memory import FORMATS, Weights, tensor_of

LOG = logging.getLogger("shardmesh.torch")

# What says that an epoch of the job is over, and that the job may go on at a later one.
OVER = (errors.Unavailable, errors.Aborted, errors.NotFound)
_POLL_SECONDS = 0.02


class Reply(NamedTuple):
    """How a step went."""

    step: int
    already_applied: bool  # it had been committed before this call
    skipped: bool  # a gradient was not finite: counted, nothing changed
    skip_reason: str  # names the slot and the parameter
    gradient_norm: Optional[float]  # of all gradients before they were clipped; None: skipped, or without clip_norm


class GoneBack(NamedTuple):
    """How a job went back to a checkpoint."""

    epoch: int  # its first one after that
    step: int
    lost_step: int  # the newest one that is known to be lost
    checkpoint: str  # the folder
    cause: str


class TrainerSession:
    """For one thread. Times are seconds. Errors are those of shardmesh.errors."""

    def __init__(self, job: _client.Job, slots: Sequence[int] | None, timeout: float, others: Others,
                 why_not_finite: str = "") -> None:
        """slots: to write; None: they are pulled. others: the other ranks. why_not_finite: a cause that a skipped
        step may have in this job."""
        self.job: Any = job
        self._epoch: int = job.epoch  # of what this rank has: the job may be open at a later one, see reopen()
        self._others = others
        self.slots, self.timeout = slots, timeout
        self.core: Any = None
        self._skipped = False  # a step was
        self._why_not_finite = why_not_finite
        self._open()
        self.first = self.committed  # the step that the job had when this rank came to it; before begin() it may be -1

    def _open(self) -> None:
        self._attach()
        self._patience = Patience(self.core, self.job.name, self.slots, self.timeout,
                                  self._others if self._shares else None)

    def _attach(self) -> None:
        self._shares = True  # memory, with the workers
        why = f"no worker of job {self.job.name} is on this host"
        if self.job.on_this_host:
            try:
                self.core = self._new("attached")
                return
            except errors.Unimplemented as error:  # the windows are a device's
                why = str(error)
        LOG.warning("weights and gradients are copied, since memory cannot be shared with the workers: %s", why)
        self.core = self._new("connected")
        self._shares = False

    def _new(self, way: str) -> Any:
        if self.slots is None:
            return _client.PullingSession(self.job, way=way, timeout=self.timeout)
        return _client.Session(self.job, self.slots, way=way, timeout=self.timeout, needs_all=way == "attached")

    @property
    def committed(self) -> int:
        return int(self.core.committed)

    def begin(self, weights: Callable[[], Mapping[str, Any]] | None, restored: Optional[int] = None) -> bool:
        """Waits for the job's weights, which this rank gives where it is the one to; returns whether it did.

        restored: the step that the job begins with, 0 where it is given weights; None: this rank cannot know."""
        gives = weights is not None and not self.has_weights()
        if gives:
            assert weights is not None
            self.job.initialize(dict(weights()), timeout=self.timeout)
        self.core.await_weights(timeout=self.timeout)
        if self.first < 0:
            self.first = self.committed if restored is None else restored
        return gives

    def meet(self, world: int) -> None:
        """Of pulled slots: waits until so many ranks have come, before this one takes a slot. All then count steps from
        the same one, so that each gives the same batches to a step.

        FailedPrecondition: a rank has left. DeadlineExceeded: they did not come in time."""
        deadline = time.monotonic() + self.timeout
        while (here := self.job.trainers(self.timeout)) < world:
            if self.job.versions()[0] > self.first:  # others have seen all ranks, and may have left since
                return
            for rank in range(world):
                pid = self._others.left(rank)
                if pid is not None:
                    raise errors.FailedPrecondition(
                        f"step {self.committed + 1} of job {self.job.name} needs rank {rank} (pid {pid}), which left the "
                        "job before all ranks had come: its process ended, or it closed its optimizer"
                    )
            if time.monotonic() >= deadline:
                raise errors.DeadlineExceeded(
                    f"{here} of {world} ranks have come to job {self.job.name} within {self.timeout:g} s; each rank makes "
                    "its optimizer, and the first slots are taken when all have"
                )
            time.sleep(_POLL_SECONDS)

    def has_weights(self) -> bool:
        try:
            self.core.await_weights(timeout=0.0)
        except errors.DeadlineExceeded:
            return False
        return True

    def weights(self, name: str) -> Weights:
        _, shape, format, parts = self.core.parameter(name)
        return Weights(shape, format, parts)

    def gradient(self, slot: int | None, name: str, shape: Sequence[int]) -> torch.Tensor:
        """slot: None of one that was taken."""
        format, memory = self.core.gradient(name) if slot is None else self.core.gradient(slot, name)
        return tensor_of(memory, FORMATS[format], shape)

    def step(self, learning_rates: list[float], loss_scale: float, tokens: list[int]) -> Reply:
        """Waits for the other ranks, as Patience.wait() does; so do declare() and take()."""
        reply, repeated = self._patience.wait(
            f"step {self.committed + 1}",
            lambda seconds: Reply(*self.core.step(learning_rates, loss_scale, tokens, seconds)),
        )
        return self.noted(reply._replace(already_applied=reply.already_applied and not repeated))

    def declare(self, bucket: int) -> None:
        """Hands the gradients of a bucket over, and waits until another bucket may be written."""
        self._patience.wait(
            f"step {self.committed + 1}", lambda seconds: self.core.declare(bucket, seconds)
        )

    def take(self) -> tuple[Optional[int], int, Any]:
        """A slot and its step; or None, a step and how it went."""
        taken: tuple[Optional[int], int, Any] = self._patience.wait(
            f"step {self.committed + 1}", lambda seconds: self.core.take(seconds)
        )[0]
        return taken

    def noted(self, reply: Reply) -> Reply:
        """The first step that is skipped is said in the log."""
        if reply.skipped and not self._skipped:
            self._skipped = True
            LOG.warning("step %d changed nothing: %s%s. Optimizer.last says it of each", reply.step, reply.skip_reason,
                        self._why_not_finite)
        return reply

    def reopen(self, error: errors.Error) -> Optional[GoneBack]:
        """Attaches to the job as it continues after `error`, within the timeout. Unavailable: it does not, and why.

        Returns to which checkpoint it has gone back since; None: no step is lost. came_back() follows, when this rank has
        what it needs of the job as it is now; until then the call may be repeated, with the same answer."""
        over = self.job.epoch == self._epoch
        LOG.warning("job %s is opened again: %s", self.job.name, error)
        deadline = time.monotonic() + self.timeout
        while True:
            left = max(deadline - time.monotonic(), 0.1)
            try:
                if over:
                    self.job = self.job.reopen(timeout=left)  # waits for a later epoch, and raises when there will be none
            except (errors.Unavailable, errors.DeadlineExceeded) as ended:
                self._others.check_host(f"step {self.committed + 1}", ended)
                raise
            try:
                self.core.close()
                self._open()
                self.core.await_weights(timeout=left)
                gone_back = self.job.gone_back
                return GoneBack(*gone_back) if gone_back is not None and gone_back[0] > self._epoch else None
            except OVER:  # of that epoch, too
                over = True
                if time.monotonic() >= deadline:
                    raise

    def came_back(self) -> None:
        self._epoch = self.job.epoch

    def is_behind(self) -> bool:
        """The job is at a later epoch than this rank has it, or on its way to one."""
        return bool(self.job.versions()[2] > self._epoch)

    def close(self) -> None:
        """Its memory stays for those who have views of it. Idempotent."""
        self.core.close()
        self.job = None
