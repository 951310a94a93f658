"""What bench/imbalance/imbalance_torch.py trains: a GPT that takes several samples at once, and one that sleeps instead.

Both are called with the tokens and targets of a microbatch's samples, one after the other, and the samples' lengths;
they return the sum of cross entropies. Blocks are in `blocks`.
"""
from __future__ import annotations

import time
from typing import Any

import torch
from model import GPT, Attention, Size
from torch import Tensor, nn
from torch.nn import functional as F

GPT_SIZE = Size(vocabulary=256, context=2048, width=128, layers=6, heads=4)
FORWARD_SHARE = 1 / 3  # of a sample's time; backward is twice as long
TINY_WIDTH, TINY_LAYERS, TINY_TOKENS = 64, 6, 8


class PackedAttention(Attention):
    """No sample sees another one."""

    lengths: list[int]  # of the samples, the same list in all blocks

    def forward(self, x: Tensor) -> Tensor:
        mixed = []
        for part in self.inputs(x).split(self.lengths):
            query, key, value = part.view(len(part), 3, self.heads, -1).permute(1, 2, 0, 3)[:, None]
            one = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            mixed.append(one[0].transpose(0, 1).reshape(len(part), -1))
        return self.output(torch.cat(mixed))


class PackedGPT(GPT):
    def __init__(self) -> None:
        super().__init__(GPT_SIZE)
        self.lengths: list[int] = []
        for block in self.blocks:
            block.attention.__class__ = PackedAttention
            block.attention.lengths = self.lengths

    def forward(self, tokens: Tensor, targets: Tensor, lengths: list[int]) -> Tensor:  # type: ignore[override]
        self.lengths[:] = lengths
        x = self.tokens(tokens) + torch.cat([self.places.weight[:length] for length in lengths])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)), targets, reduction="sum")


class Slept(torch.autograd.Function):
    """The identity, which takes time both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: SleepingModel) -> Tensor:
        ctx.model = model
        time.sleep(model.seconds * FORWARD_SHARE / TINY_LAYERS)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.model.seconds * (1 - FORWARD_SHARE) / TINY_LAYERS)
        return gradient, None


class SleepingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(TINY_WIDTH, TINY_WIDTH)

    def forward(self, x: Tensor, model: SleepingModel) -> Tensor:
        return Slept.apply(x + torch.tanh(self.linear(x)), model)  # type: ignore


class SleepingModel(nn.Module):
    """`seconds`: of the next forward and backward, beside what the tiny model takes."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.tokens = nn.Embedding(256, TINY_WIDTH)
        self.blocks = nn.ModuleList(SleepingBlock() for _ in range(TINY_LAYERS))
        self.head = nn.Linear(TINY_WIDTH, 256)

    def forward(self, tokens: Tensor, targets: Tensor, lengths: list[int]) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self)
        return F.cross_entropy(self.head(x), targets, reduction="sum")
