"""Models and losses of scenarios_ranks.py, in the manner of the tests of FSDP2 in torch (test/distributed/_composable/fsdp).

A scenario's loss is a function of the model, the step, the slot and the part of the slot; what is trained alone in torch is the
mean over slots of the sum over parts.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

SLOTS = 4


class Scenario(NamedTuple):
    model: Callable[[], nn.Module]
    inputs: int  # columns of an input
    options: dict[str, Any] = {}  # of the optimizer
    parts: int = 1  # backwards of a slot
    steps: int = 10
    clip: float = 0.0
    scale: bool = False  # by a GradScaler


class Block(nn.Module):
    def __init__(self, width, hidden, recompute=None):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.recompute = recompute  # None, or use_reentrant of a checkpoint

    def _forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x):
        if self.recompute is None:
            return self._forward(x)
        return checkpoint(self._forward, x, use_reentrant=self.recompute)


class Blocks(nn.Module):
    """Three blocks; one of them twice, and its weights elsewhere, where they are shared."""

    def __init__(self, width, hidden, recompute=None, shared=False, ends=True):
        super().__init__()
        self.first = nn.Linear(width, width) if ends else None
        self.layers = nn.ModuleList(Block(width, hidden, recompute) for _ in range(3))
        self.last = nn.Linear(width, width) if ends else nn.Identity()
        if shared:
            self.last.weight = self.first.weight
            self.layers[2].up = self.layers[0].up

    def forward(self, x):
        x = x.requires_grad_() if self.first is None else self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Odd(nn.Module):
    """A scalar, a transposed matrix, and a vector of one element."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter((0.1 * torch.randn(8, 6)).t())
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.scale * (x @ self.turned) + self.one


class Sizes(nn.Module):
    """Vectors of 1 to 40 elements."""

    def __init__(self):
        super().__init__()
        self.sizes = nn.ParameterList(torch.randn(size) for size in range(1, 41))

    def forward(self, x):
        return sum((x[:, :1] * size).sin().sum() for size in self.sizes) * 0.1


class MixedBlock(Block):
    """fp32 and bf16."""

    def __init__(self, width, hidden):
        super().__init__(width, hidden)
        self.up.to(torch.bfloat16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x).to(torch.bfloat16)).float()))


def frozen(every):
    def make():
        model = Blocks(8, 12)
        for index, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(index % every != 0)
        return model

    return make


def linears(*sizes):
    def make():
        layers = [nn.Linear(columns, rows) for columns, rows in zip(sizes, sizes[1:])]
        return nn.Sequential(*(part for layer in layers for part in (nn.ReLU(), layer)))

    return make


def loss_of(scenario, model, step, slot, part):
    generator = torch.Generator().manual_seed(10000 * step + 100 * slot + part)
    return model(torch.randn(4, scenario.inputs, generator=generator)).float().pow(2).mean()


HSDP = {"mesh": "ddp=2,fsdp=2"}
SCENARIOS = {
    "single_group_16": Scenario(linears(16, 15, 8), 16, {"mesh": "fsdp=4"}),
    "single_group_7": Scenario(linears(7, 15, 3), 7, {"mesh": "fsdp=4"}),
    "multi_group": Scenario(lambda: Blocks(8, 12), 8),
    "checkpoint_reentrant": Scenario(lambda: Blocks(8, 12, recompute=True), 8),
    "checkpoint": Scenario(lambda: Blocks(8, 12, recompute=False), 8),
    "checkpoint_reentrant_alone": Scenario(lambda: Blocks(8, 12, recompute=True, ends=False), 8),
    "shared": Scenario(lambda: Blocks(8, 12, shared=True), 8),
    "shared_checkpoint": Scenario(lambda: Blocks(8, 12, shared=True, recompute=False), 8),
    "accumulate": Scenario(lambda: Blocks(8, 12), 8, parts=3),
    "hsdp_3": Scenario(lambda: Blocks(3, 3), 3, HSDP, parts=3),
    "hsdp_16": Scenario(lambda: Blocks(16, 16), 16, HSDP, parts=3),
    "hsdp_17": Scenario(lambda: Blocks(17, 17), 17, HSDP),
    "odd": Scenario(Odd, 6, {"mesh": "fsdp=4"}),
    "frozen_half": Scenario(frozen(2), 8),
    "frozen_third": Scenario(frozen(3), 8, HSDP),
    "clip": Scenario(lambda: Blocks(8, 12), 8, {"mesh": "fsdp=3"}, clip=0.05),
    "clip_hsdp": Scenario(Odd, 6, HSDP, clip=0.05),
    "scaler": Scenario(lambda: Blocks(8, 12), 8, scale=True),
    "sizes_1": Scenario(Sizes, 3, {"mesh": "fsdp=1"}),
    "sizes_2": Scenario(Sizes, 3, {"mesh": "fsdp=2"}),
    "sizes_3": Scenario(Sizes, 3, {"mesh": "fsdp=3"}),
    "sizes_4": Scenario(Sizes, 3, {"mesh": "fsdp=4"}),
    "mixed": Scenario(lambda: nn.Sequential(*(MixedBlock(8, 12) for _ in range(2))), 8),
}
