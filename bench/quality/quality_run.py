"""One training of bench/quality/quality.py: a small transformer over bytes, its parameters in shardmesh.numerics.

Every parameter is stored and stepped there. PyTorch does the forward and backward pass, in fp32, on the decoded
weights. What a run sees besides its formats (start, batches, schedule, order of operations) depends on its seed alone,
so runs of one seed can be compared in pairs.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardmesh.numerics import State, Step

BATCH, CONTEXT = 4, 64
LAYERS, WIDTH, HEADS = 2, 64, 2
LR, BETA1, WEIGHT_DECAY = 1e-3, 0.9, 0.1
WARMUP, LAST_LR = 100, 0.1  # steps; share of LR
VALIDATION_SHARE, VALIDATION_WINDOWS = 0.1, 512  # a multiple of 8


@dataclass(frozen=True)
class Formats:
    weights: str
    states: str

    def __str__(self) -> str:
        return f"{self.weights}, {self.states}"


TORCH = Formats("torch", "torch")  # torch.optim.AdamW, fp32


class Block(nn.Module):
    """Attention and a feed-forward net, each behind a norm and beside the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return x


class Transformer(nn.Module):
    """The loss of predicting each byte of a window from those before it, in nats."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, windows: Tensor) -> Tensor:
        x = self.bytes(windows[:, :-1]) + self.places.weight
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


class Text:
    """Bytes, numbered in order of their values; the last tenth is for validation."""

    def __init__(self, content: bytes) -> None:
        values = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        known, numbered = torch.unique(values, return_inverse=True)
        self.vocabulary = len(known)
        cut = int(len(values) * (1 - VALIDATION_SHARE))
        self._train, validation = numbered[:cut], numbered[cut:]
        firsts = torch.linspace(0, len(validation) - CONTEXT - 1, VALIDATION_WINDOWS).long()
        self.validation = self._windows(validation, firsts)

    def batch(self, generator: torch.Generator) -> Tensor:
        return self._windows(self._train, torch.randint(len(self._train) - CONTEXT, (BATCH,), generator=generator))

    @staticmethod
    def _windows(numbered: Tensor, firsts: Tensor) -> Tensor:
        return numbered[firsts[:, None] + torch.arange(CONTEXT + 1)]


class Optimizer(Protocol):
    def step(self, number: int, lr: float) -> None: ...

    @property
    def bytes(self) -> int: ...


class ShardmeshAdamW:
    """Owns the parameters as stored; those of the model are what they decode to."""

    def __init__(self, model: nn.Module, formats: Formats, seed: int, beta2: float) -> None:
        self._formats, self._seed, self._beta2 = formats, seed, beta2
        self._parameters = list(model.parameters())
        first = self._made(LR)
        self._states = [first.init(each.detach(), tensor) for tensor, each in enumerate(self._parameters)]
        self._read()

    def step(self, number: int, lr: float) -> None:
        rule = self._made(lr)
        for tensor, (state, parameter) in enumerate(zip(self._states, self._parameters)):
            rule.apply(state, parameter.grad, step=number, tensor=tensor)
        self._read()

    @property
    def bytes(self) -> int:
        return sum(map(stored_bytes, self._states))

    def _made(self, lr: float) -> Step:
        return Step("AdamW", self._formats.weights, self._formats.states, seed=self._seed, lr=lr,
                    betas=(BETA1, self._beta2), weight_decay=WEIGHT_DECAY)

    @torch.no_grad()
    def _read(self) -> None:
        for state, parameter in zip(self._states, self._parameters):
            parameter.copy_(torch.from_numpy(state.weights))


class TorchAdamW:
    """The same interface over torch.optim.AdamW."""

    def __init__(self, model: nn.Module, beta2: float) -> None:
        parameters = list(model.parameters())
        self.bytes = sum(12 * each.numel() for each in parameters)
        self._adamw = torch.optim.AdamW(parameters, betas=(BETA1, beta2), weight_decay=WEIGHT_DECAY)

    def step(self, number: int, lr: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()


@dataclass(frozen=True)
class Result:
    parameters: int
    bytes: int  # of weights and states
    losses: list[tuple[int, float]]  # of validation, by steps


def stored_bytes(state: State) -> int:
    return sum(part.nbytes for stream in state.parts.values() for part in stream.values())


def learning_rate(step: int, steps: int) -> float:
    """Rises linearly over WARMUP steps, then falls along a cosine to LAST_LR of LR. `step` counts from 1."""
    if step <= WARMUP:
        return LR * step / WARMUP
    done = (step - WARMUP) / max(1, steps - WARMUP)
    return LR * (LAST_LR + (1 - LAST_LR) * (1 + math.cos(math.pi * done)) / 2)


def train(model: Transformer, optimizer: Optimizer, text: Text, seed: int, steps: int) -> Iterator[int]:
    """The number of each step, after it is taken."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, steps + 1):
        model.zero_grad()
        model(text.batch(generator)).backward()
        optimizer.step(step, learning_rate(step, steps))
        yield step


def begin(text: Text, formats: Formats, seed: int, beta2: float) -> tuple[Transformer, Optimizer]:
    torch.manual_seed(seed)
    model = Transformer(text.vocabulary)
    return model, TorchAdamW(model, beta2) if formats == TORCH else ShardmeshAdamW(model, formats, seed, beta2)


@torch.no_grad()
def validate(model: Transformer, text: Text) -> float:
    losses = [model(windows).item() for windows in text.validation.chunk(8)]
    return fmean(losses)


def run(content: bytes, formats: Formats, seed: int, beta2: float, steps: int, every: int,
        stepped: Callable[[], None]) -> Result:
    """Trains from the start, and validates every `every` steps."""
    torch.set_num_threads(1)
    text = Text(content)
    model, optimizer = begin(text, formats, seed, beta2)
    losses = [(0, validate(model, text))]
    for step in train(model, optimizer, text, seed, steps):
        stepped()
        if step % every == 0 or step == steps:
            losses.append((step, validate(model, text)))
    return Result(sum(each.numel() for each in model.parameters()), optimizer.bytes, losses)


def check(content: bytes, beta2: float, steps: int = 20) -> None:
    """Fails if fp32 formats do not train as torch.optim.AdamW does: weights that differ by more than rounding."""
    torch.set_num_threads(1)
    text, trained = Text(content), []
    for formats in Formats("fp32", "fp32"), TORCH:
        model, optimizer = begin(text, formats, 0, beta2)
        for _ in train(model, optimizer, text, 0, steps):
            pass
        trained.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    ours, theirs = trained
    apart = (ours - theirs).abs().max().item()
    if apart > 1e-4 * LR * steps:
        raise SystemExit(f"quality: after {steps} steps fp32 is {apart:.3g} away from torch.optim.AdamW")
