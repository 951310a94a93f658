"""A small GPT: ordinary modules, nothing of shardmesh in it.

  model = GPT(SIZES["10m"])
  loss = model(tokens, targets)
"""
from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Size(NamedTuple):
    vocabulary: int
    context: int  # tokens that one sees at most
    width: int
    layers: int
    heads: int
    tied: bool = True  # the head's weights are the embedding's


SIZES = {
    "tiny": Size(vocabulary=256, context=32, width=64, layers=4, heads=4),
    "10m": Size(vocabulary=256, context=128, width=384, layers=6, heads=6),
    "30m": Size(vocabulary=16000, context=64, width=384, layers=10, heads=6, tied=False),
    "124m": Size(vocabulary=50257, context=1024, width=768, layers=12, heads=12),  # the shapes of GPT-2
}


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.inputs = nn.Linear(size.width, 3 * size.width)
        self.output = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.inputs(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.mlp_norm = nn.LayerNorm(size.width)
        inner = 4 * size.width
        self.mlp = nn.Sequential(nn.Linear(size.width, inner), nn.GELU(), nn.Linear(inner, size.width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary); with targets, to their mean cross entropy."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        if size.tied:
            self.head.weight = self.tokens.weight
        self.apply(self._begin)

    def _begin(self, module: nn.Module) -> None:
        """GPT-2's: weights of 0.02, those that add to the residual smaller the deeper the model."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            for last in (module.attention.output, module.mlp[2]):
                nn.init.normal_(last.weight, std=0.02 / (2 * self.size.layers) ** 0.5)

    def forward(self, tokens: Tensor, targets: Optional[Tensor] = None) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(model: GPT, prompt: Tensor, count: int, seed: int = 0, temperature: float = 0.8) -> Tensor:
    """`prompt` and `count` tokens after it; the same seed gives the same ones."""
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt.long()
    for _ in range(count):
        logits = model(tokens[None, -model.size.context :])[0, -1] / temperature
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)])
    return tokens
