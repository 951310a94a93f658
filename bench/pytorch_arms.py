"""The contestants of bench/pytorch.py: ranks, processes of one thread each, that train one model in their own way.

  model          forward and backward of a rank's own model, with no framework around it
  ddp            DistributedDataParallel over gloo, fused AdamW of all weights on every rank
  fsdp2          fully_shard of each block over gloo, fused AdamW of a rank's part
  fsdp2 8-bit    the same with torchao's AdamW8bit
  full, bucket   shardmesh.torch.Optimizer in that residency; "... 8-bit": bf16_sr weights, dyn8 states, bf16 gradients

A World has the ranks of one arm. They sleep at a pipe until they are asked for something.
"""
from __future__ import annotations

import ctypes
import datetime
import hashlib
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from typing import Any, Callable, NamedTuple, Optional

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from model import GPT, SIZES
from text import Text

HYPER = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
SECONDS = 300  # an answer takes at most; the first step of 8-bit AdamW compiles
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt


class Setup(NamedTuple):
    """What a rank trains, and where."""

    rank: int
    ranks: int
    slots: int
    meeting: str  # a file where gloo's ranks find each other
    service: Optional[str] = None  # a coordinator's address
    sequences: int = 2
    length: int = 64
    trim: bool = False  # memory that is freed goes back at once, which takes time


class Arm:
    """Trains with the gradients' mean over all slots."""

    distributed = True

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.text = Text.load()
        first, end = (rank * setup.slots // setup.ranks for rank in (setup.rank, setup.rank + 1))
        self.slots = range(first, end)
        if self.distributed:
            limit = datetime.timedelta(seconds=SECONDS)
            meeting = f"file://{setup.meeting}"
            dist.init_process_group("gloo", meeting, rank=setup.rank, world_size=setup.ranks, timeout=limit)

    def make(self, size: str) -> None:
        torch.manual_seed(0)
        self.context = SIZES[size].context
        self.wrap(GPT(SIZES[size]))

    def wrap(self, model: GPT) -> None:
        self.model: Any = model

    def drop(self) -> None:
        self.model = self.optimizer = None

    def step(self, step: int, sequences: int = 0, length: int = 0) -> tuple[float, float, list[float]]:
        """When it began and ended, and the losses of this rank's slots."""
        sequences, length = sequences or self.setup.sequences, min(length or self.setup.length, self.context)
        batches = [self.text.batch(step, slot, sequences, length) for slot in self.slots]
        begin = time.monotonic()
        losses = [self.backward(batch, batch is batches[-1]) for batch in batches]
        self.update()
        return begin, time.monotonic(), losses

    def backward(self, batch: tuple[Tensor, Tensor], last: bool) -> float:
        loss = self.model(*batch)
        (loss / len(self.slots)).backward()
        return float(loss.detach())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Model(Arm):
    distributed = False

    def update(self) -> None:
        self.model.zero_grad()


class Ddp(Arm):
    def wrap(self, model: GPT) -> None:
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **HYPER)

    def backward(self, batch: tuple[Tensor, Tensor], last: bool) -> float:
        self.model.require_backward_grad_sync = last
        return super().backward(batch, last)


class Fsdp2(Arm):
    def wrap(self, model: GPT) -> None:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        self.model, self.optimizer = model, self.optimizer_of(model)

    def optimizer_of(self, model: GPT) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), fused=True, **HYPER)

    def backward(self, batch: tuple[Tensor, Tensor], last: bool) -> float:
        self.model.set_requires_gradient_sync(last)
        return super().backward(batch, last)


class Fsdp2EightBit(Fsdp2):
    def optimizer_of(self, model: GPT) -> torch.optim.Optimizer:
        import torchao.optim

        return torchao.optim.AdamW8bit(model.parameters(), **HYPER)


class Ours(Arm):
    distributed = False
    made = 0

    def __init__(self, setup: Setup, **options: Any) -> None:
        super().__init__(setup)
        os.environ.update(RANK=str(setup.rank), WORLD_SIZE=str(setup.ranks))
        self.options = options

    def wrap(self, model: torch.nn.Module) -> None:
        import shardmesh.torch as sm

        self.made += 1
        self.model = model
        self.optimizer = sm.Optimizer(model, "AdamW", slots=self.setup.slots, service=self.setup.service,
                                      job=f"bench-{self.made}", **HYPER, **self.options)

    def step_overhead(self, count: int) -> float:
        """Seconds of step() beyond the service's, which it calls, for a model of one parameter: a median of `count`."""
        self.wrap(torch.nn.Linear(1, 1, bias=False))
        core = self.optimizer._session.core = Timed(self.optimizer._session.core)
        found = []
        for _ in range(count):
            self.model(torch.ones(1, 1)).sum().backward()
            begin = time.perf_counter()
            self.optimizer.step()
            found.append(time.perf_counter() - begin - core.seconds)
            self.optimizer.zero_grad()
        self.drop()
        return statistics.median(found)

    def backward(self, batch: tuple[Tensor, Tensor], last: bool) -> float:
        loss = self.model(*batch)
        loss.backward()
        return float(loss.detach())

    def drop(self) -> None:
        self.optimizer.close()
        super().drop()

    def digest(self) -> str:
        """Of all weights that this rank has now."""
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            found.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


class Timed:
    """A session of the client's, and what its last step took."""

    def __init__(self, core: Any) -> None:
        self._core, self.seconds = core, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def step(self, *arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self._core.step(*arguments)
        finally:
            self.seconds = time.perf_counter() - begin


EIGHT_BIT = {"weights": "bf16_sr", "states": "dyn8", "gradients": "bf16"}
ARMS: dict[str, Callable[[Setup], Arm]] = {
    "model": Model,
    "ddp": Ddp,
    "fsdp2": Fsdp2,
    "fsdp2 8-bit": Fsdp2EightBit,
    "full": Ours,
    "full 8-bit": lambda setup: Ours(setup, **EIGHT_BIT),
    "bucket": lambda setup: Ours(setup, residency="bucket"),
    "bucket 8-bit": lambda setup: Ours(setup, residency="bucket", **EIGHT_BIT),
}
OURS = tuple(name for name in ARMS if name.startswith(("full", "bucket")))


def rank_main(link: Any, make: Callable[[Setup], Arm], setup: Setup) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG: ends with the one that asks
    if setup.trim:
        libc.mallopt(M_MMAP_THRESHOLD, 64 << 10)
        libc.mallopt(M_TRIM_THRESHOLD, 0)
    torch.set_num_threads(1)
    arm: Optional[Arm] = None
    while True:
        what, *arguments = link.recv()
        try:
            arm = arm or make(setup)
            link.send(("ok", getattr(arm, what)(*arguments)))
        except BaseException as error:  # whatever the packages raise is the answer
            text = " ".join(f"{type(error).__name__}: {error}".split())
            link.send(("error", text if len(text) < 600 else "..." + text[-597:]))


class World:
    """The ranks of one arm. RuntimeError: one of them failed, or is silent; the message says why."""

    def __init__(self, arm: str, ranks: int, slots: int = 0, service: Optional[str] = None, trim: bool = False) -> None:
        context = multiprocessing.get_context("fork")
        self.arm, self.ranks = arm, ranks
        self._folder = tempfile.TemporaryDirectory(prefix="bench-pytorch-")
        setup = Setup(0, ranks, slots or ranks, f"{self._folder.name}/ranks", service, trim=trim)
        pipes = [context.Pipe() for _ in range(ranks)]
        self._links = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(target=rank_main, args=(theirs, ARMS[arm], setup._replace(rank=rank)), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid]

    def ask(self, *words: Any) -> list[Any]:
        """What each rank answers."""
        for link in self._links:
            link.send(words)
        answers, deadline = [], time.monotonic() + SECONDS
        for rank, link in enumerate(self._links):
            if not link.poll(max(0, deadline - time.monotonic())):
                raise RuntimeError(f"{self.arm}: rank {rank} is silent for {SECONDS} s")
            kind, answer = link.recv()
            if kind == "error":
                raise RuntimeError(f"{self.arm}: rank {rank}: {answer}")
            answers.append(answer)
        return answers

    def step(self, step: int, *arguments: int) -> tuple[float, list[float]]:
        """Seconds from the first rank's begin to the last one's end, and the losses of all slots in their order."""
        answers = self.ask("step", step, *arguments)
        seconds = max(end for _, end, _ in answers) - min(begin for begin, _, _ in answers)
        return seconds, [loss for _, _, losses in answers for loss in losses]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()
