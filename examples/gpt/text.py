"""Text as tokens, and which piece of it belongs to which step and slot.

A slot's batch depends on seed, step and slot, and on nothing else: not on how many ranks there are, nor on who
computes it. Tokens are bytes.

  text = Text.load()
  tokens, targets = text.batch(step=7, slot=1, sequences=4, length=64)
"""
from __future__ import annotations

import pathlib
from typing import NamedTuple, Union

import torch
from torch import Tensor

SHAKESPEARE = pathlib.Path(__file__).resolve().with_name("shakespeare.txt")
HELD_OUT = 0.1  # of the text, at its end


class Text(NamedTuple):
    train: Tensor  # uint8
    held_out: Tensor
    seed: int = 0

    @classmethod
    def load(cls, path: Union[str, pathlib.Path] = SHAKESPEARE, seed: int = 0) -> Text:
        tokens = encode(pathlib.Path(path).read_bytes())
        split = int(len(tokens) * (1 - HELD_OUT))
        return cls(tokens[:split], tokens[split:], seed)

    def batch(self, step: int, slot: int, sequences: int, length: int) -> tuple[Tensor, Tensor]:
        """Tokens and the tokens after them, each (sequences, length)."""
        generator = torch.Generator().manual_seed(((self.seed << 40) + (step << 16) + slot) & (2**63 - 1))
        begins = torch.randint(len(self.train) - length, (sequences,), generator=generator)
        return pieces(self.train, begins, length)

    def held_out_batch(self, sequences: int, length: int) -> tuple[Tensor, Tensor]:
        """The same one always: pieces at equal distances."""
        begins = torch.arange(sequences) * ((len(self.held_out) - length - 1) // sequences)
        return pieces(self.held_out, begins, length)


def pieces(tokens: Tensor, begins: Tensor, length: int) -> tuple[Tensor, Tensor]:
    found = torch.stack([tokens[begin : begin + length + 1] for begin in begins.tolist()]).long()
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def encode(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")
