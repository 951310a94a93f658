"""The contestants of bench/imbalance/imbalance_torch.py: ranks, processes of one thread each, that train with a minibatch.

  fsdp2 LB-Micro   fully_shard of each block over gloo, equally many microbatches on each rank
  fsdp2 LB-Mini    the same without resharding or gradient exchange but in the last microbatch: unequal counts are right
  assigned         shardmesh.torch.Optimizer, LB-Mini; a slot for each rank, in which its microbatches add up
  pulling          the same, a slot for each sample, the longest first; who is done takes the next

Gradients are those of the mean over all tokens of the minibatch.
"""
from __future__ import annotations

import contextlib
import os
import time
from typing import Any, NamedTuple

from torch_world import Setup  # first: it says how many threads PyTorch has

import torch
from imbalance_models import TINY_TOKENS, PackedGPT, SleepingModel
from imbalance_samples import Plan
from pytorch_arms import HYPER
from text import Text
from torch import Tensor
from torch.distributed.fsdp import fully_shard

Batch = tuple[Tensor, Tensor, list[int]]  # tokens, targets, lengths


class Work(NamedTuple):
    """A minibatch."""

    number: int
    lengths: list[int]  # of the samples
    plan: Plan  # by rank; where slots are pulled, by slot
    seconds: list[float]  # that each sample sleeps at speed 1
    speeds: list[float]  # by rank
    start: float = 0.0  # for all ranks


class Part(NamedTuple):
    """A microbatch: when it was computed, and how long that takes alone: processor time of its thread, or sleep."""

    begin: float
    end: float
    own: float


class Done(NamedTuple):
    end: float
    parts: list[Part]
    loss: float  # sum over this rank's tokens


class Trainer:
    def __init__(self, setup: Setup, sleeps: bool) -> None:
        self.setup, self.sleeps, self.text = setup, sleeps, Text.load()
        torch.manual_seed(0)
        self.model: Any = SleepingModel() if sleeps else PackedGPT()
        self.wrap()

    def wrap(self) -> None:
        """The model in what trains it."""

    def ready(self) -> None:
        """Asked first."""

    def train(self, work: Work) -> Done:
        self.parts: list[Part] = []
        self.losses: list[Tensor] = []
        batches = self.batches(work)
        time.sleep(max(0.0, work.start - time.monotonic()))
        self.run(work, batches)
        return Done(time.monotonic(), self.parts, float(sum(self.losses)))

    def batches(self, work: Work) -> list[tuple[list[int], Batch]]:
        return [(samples, self.batch(work, samples)) for samples in work.plan[self.setup.rank]]

    def batch(self, work: Work, samples: list[int]) -> Batch:
        lengths = [self.counted(work.lengths[sample]) for sample in samples]
        pieces = [self.text.batch(work.number, sample, 1, length) for sample, length in zip(samples, lengths)]
        tokens, targets = (torch.cat([piece[side][0] for piece in pieces]) for side in (0, 1))
        return tokens, targets, lengths

    def counted(self, length: int) -> int:
        """Tokens of a sample."""
        return min(length, TINY_TOKENS) if self.sleeps else length

    def total(self, work: Work) -> int:
        return sum(map(self.counted, work.lengths))

    def compute(self, work: Work, samples: list[int], batch: Batch, scale: float = 1.0) -> None:
        """Forward and backward."""
        slept = sum(work.seconds[sample] for sample in samples) / work.speeds[self.setup.rank]
        self.model.seconds = slept
        begin, processor = time.monotonic(), time.thread_time()
        loss = self.model(*batch)
        (loss * scale).backward()
        own = slept if self.sleeps else time.thread_time() - processor
        self.parts.append(Part(begin, time.monotonic(), own))
        self.losses.append(loss.detach())

    def run(self, work: Work, batches: list[tuple[list[int], Batch]]) -> None:
        """With no framework around it; nothing is learnt."""
        for samples, batch in batches:
            self.compute(work, samples, batch)
        self.model.zero_grad()


class Fsdp2Micro(Trainer):
    reshards = True

    def wrap(self) -> None:
        self.setup.join_group()
        for module in (*self.model.blocks, self.model):
            fully_shard(module, reshard_after_forward=self.reshards)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **HYPER)

    def run(self, work: Work, batches: list[tuple[list[int], Batch]]) -> None:
        scale = self.setup.ranks / self.total(work)  # the exchange takes the mean over ranks
        for index, (samples, batch) in enumerate(batches):
            self.before(index, len(batches))
            self.compute(work, samples, batch, scale)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def before(self, index: int, count: int) -> None:
        """The microbatch of that index."""


class Fsdp2Mini(Fsdp2Micro):
    """Ranks meet before the first microbatch, and in the backward of the last, which is each rank's lightest."""

    reshards = False

    def before(self, index: int, count: int) -> None:
        if index == 0:
            for module in (self.model, *self.model.blocks):
                module.unshard()
        self.model.set_requires_gradient_sync(index == count - 1)
        self.model.set_reshard_after_backward(index == count - 1)


class Assigned(Trainer):
    pulled = False

    def wrap(self) -> None:
        import shardmesh.torch as sm

        os.environ.update(RANK=str(self.setup.rank), WORLD_SIZE=str(self.setup.ranks))
        name = f"{'pulled' if self.pulled else 'assigned'}-{self.setup.ranks}-{self.setup.slots}-{self.sleeps}"
        self.optimizer = sm.Optimizer(self.model, "AdamW", slots=self.setup.slots, service=self.setup.service,
                                      job=name.lower(), token_weights=True, pulled=self.pulled, **HYPER)

    def slots(self) -> range:
        """This rank's."""
        first, end = (rank * self.setup.slots // self.setup.ranks for rank in (self.setup.rank, self.setup.rank + 1))
        return range(first, end)

    def batches(self, work: Work) -> list[tuple[list[int], Batch]]:
        return [(samples, self.batch(work, samples)) for slot in self.slots() for samples in work.plan[slot]]

    def run(self, work: Work, batches: list[tuple[list[int], Batch]]) -> None:
        left, tokens = iter(batches), []
        for slot in self.slots():
            count = len(work.plan[slot])
            tokens.append(0)
            for index in range(count):
                samples, batch = next(left)
                tokens[-1] += sum(batch[2])
                with self.optimizer.no_sync() if index < count - 1 else contextlib.nullcontext():
                    self.compute(work, samples, batch)
        self.optimizer.tokens(*tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> tuple[Any, ...]:
        """Of weights and states."""
        return tuple(self.optimizer.job.digest())

    def close(self) -> None:
        self.optimizer.close()


class Pulling(Assigned):
    pulled = True

    def slots(self) -> range:
        return range(self.setup.slots)  # whatever it gets

    def run(self, work: Work, batches: list[tuple[list[int], Batch]]) -> None:
        for samples, batch in self.optimizer.slots(batches):
            self.compute(work, samples, batch)
            self.optimizer.tokens(sum(batch[2]))
        self.optimizer.step()


ARMS: dict[str, type[Trainer]] = {"fsdp2 LB-Micro": Fsdp2Micro, "fsdp2 LB-Mini": Fsdp2Mini, "assigned": Assigned,
                                  "pulling": Pulling}
OURS = "assigned", "pulling"
