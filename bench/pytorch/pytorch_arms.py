"""The contestants of bench/pytorch/pytorch.py: ranks, processes of one thread each, that train one model in their own way.

  model          forward and backward of a rank's own model, with no framework around it
  ddp            DistributedDataParallel over gloo, fused AdamW of all weights on every rank
  fsdp2          fully_shard of each block over gloo, fused AdamW of a rank's part
  fsdp2 8-bit    the same with torchao's AdamW8bit
  full, bucket   shardmesh.torch.Optimizer in that residency; "... 8-bit": bf16_sr weights, dyn8 states, bf16 gradients;
                 "... bf16": the model, too, is in bf16, so that its parameters are the windows
"""
from __future__ import annotations

import hashlib
import os
import statistics
import time
from typing import Any, Callable, NamedTuple

from torch_world import Setup, World  # first: it says how many threads PyTorch has

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from model import GPT, SIZES
from text import Text

HYPER: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
FORWARD, BACKWARD, STEP = PHASES = "forward", "backward", "step()"
SEQUENCES, LENGTH = 2, 64  # of a slot's batch, where nothing else is said


class Operation(NamedTuple):
    """That PyTorch's profiler saw."""

    name: str
    phase: str
    seconds: float  # without those of operations within it
    shapes: list[Any]  # of its inputs


class Arm:
    """Trains with the gradients' mean over all slots."""

    distributed = True

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.text = Text.load()
        first, end = (rank * setup.slots // setup.ranks for rank in (setup.rank, setup.rank + 1))
        self.slots = range(first, end)
        if self.distributed:
            setup.join_group()

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
        sequences, length = sequences or SEQUENCES, min(length or LENGTH, self.context)
        batches = [self.text.batch(step, slot, sequences, length) for slot in self.slots]
        begin = time.monotonic()
        losses = [self.backward(batch, batch is batches[-1]) for batch in batches]
        self.update()
        return begin, time.monotonic(), losses

    def backward(self, batch: tuple[Tensor, Tensor], last: bool) -> float:
        with record_function(FORWARD):
            loss = self.model(*batch)
        with record_function(BACKWARD):
            (loss * self.share).backward()
        return float(loss.detach())

    @property
    def share(self) -> float:
        """Of a slot's loss in that of this rank."""
        return 1 / len(self.slots)

    def update(self) -> None:
        with record_function(STEP):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def profile(self, first: int, count: int) -> tuple[float, list[Operation]]:
        """Seconds of so many steps, and what they did on this rank's thread."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as found:
            ranges = [self.step(step)[:2] for step in range(first, first + count)]
        events = sorted(found.events(), key=lambda event: event.time_range.start)
        phases = [event for event in events if event.name in PHASES]
        return sum(end - begin for begin, end in ranges), [
            Operation(event.name, phase.name, event.self_cpu_time_total / 1e6, event.input_shapes or [])
            for phase in phases for event in events
            if event.thread == phase.thread and phase.time_range.start <= event.time_range.start < phase.time_range.end
        ]


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

    def __init__(self, setup: Setup, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        super().__init__(setup)
        os.environ.update(RANK=str(setup.rank), WORLD_SIZE=str(setup.ranks))
        self.dtype, self.options = dtype, options

    def wrap(self, model: torch.nn.Module) -> None:
        import shardmesh.torch as sm

        self.made += 1
        self.model = model = model.to(self.dtype)
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

    @property
    def share(self) -> float:
        return 1.0  # the service takes the mean over slots

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
    "bucket 8-bit bf16": lambda setup: Ours(setup, torch.bfloat16, residency="bucket", **EIGHT_BIT),
}
OURS = tuple(name for name in ARMS if name.startswith(("full", "bucket")))


def slowest_step(world: World, step: int, *arguments: int) -> tuple[float, list[float]]:
    """Seconds from the first rank's begin to the last one's end, and the losses of all slots in their order."""
    answers = world.ask("step", step, *arguments)
    seconds = max(end for _, end, _ in answers) - min(begin for begin, _, _ in answers)
    return seconds, [loss for _, _, losses in answers for loss in losses]
