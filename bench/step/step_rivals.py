#!/usr/bin/env python3
"""The rivals of bench/step_rivals: commands, answers and arguments as in collectives_rivals.py, with gloo alone.

The result's place has the weights that all ranks begin with, when the ranks are made, and ours after a step, when they are
checked; the slots have the ranks' gradients. NAME: a whole step, from a rank's own gradients to the new weights,
  ddp    as DistributedDataParallel: gradients divided and summed in buckets, then fused AdamW of all weights on every rank
  fsdp2  as fully_shard: for each tensor the gradients reduce-scattered, then fused AdamW on the rank's part of all tensors,
         then for each tensor the weights gathered
Their own copying in and out of buckets is left out.
"""
import os
import sys

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "collectives"))
from collectives_rivals import BUCKET_ELEMENTS, Gloo, run  # noqa: E402

TENSOR_ELEMENTS = 4 << 20  # of a parameter, as StepJob has them
HYPER = {"lr": 1e-3, "weight_decay": 1e-2}  # the defaults of our jobs; the others are torch's, too


class Steps(Gloo):
    def load(self, slot, weights):
        self.input = self.torch.from_numpy(slot)
        self.gradient = self.input.clone()
        self.weights = self.torch.from_numpy(weights).clone()
        self.gathered = self.torch.zeros_like(self.weights)
        self.replicated = self.adamw(self.weights.split(TENSOR_ELEMENTS), self.gradient.split(TENSOR_ELEMENTS))
        shards = [part.chunk(self.ranks)[self.rank].clone() for part in self.weights.split(TENSOR_ELEMENTS)]
        self.pieces = [self.torch.zeros_like(shard) for shard in shards]
        self.shards = shards
        self.sharded = self.adamw(shards, self.pieces)

    def adamw(self, weights, gradients):
        parameters = [self.torch.nn.Parameter(part) for part in weights]
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        return self.torch.optim.AdamW(parameters, fused=True, **HYPER)

    def prepare(self, name):
        self.gradient.copy_(self.input)

    def ddp(self):
        works = [
            self.dist.all_reduce(bucket.div_(self.ranks), async_op=True)
            for bucket in self.gradient.split(BUCKET_ELEMENTS)
        ]
        for work in works:
            work.wait()
        self.replicated.step()
        self.result = self.weights

    def fsdp2(self):
        for piece, gradient in zip(self.pieces, self.gradient.split(TENSOR_ELEMENTS)):
            self.dist.reduce_scatter_tensor(piece, gradient)
            piece.div_(self.ranks)
        self.sharded.step()
        for shard, tensor in zip(self.shards, self.gathered.split(TENSOR_ELEMENTS)):
            self.dist.all_gather_into_tensor(tensor, shard)
        self.result = self.gathered


if __name__ == "__main__":
    run({"gloo": Steps})
