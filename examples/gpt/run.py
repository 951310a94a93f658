"""What train.py and train_fsdp2.py share: options, and what they print of each step."""
from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
from typing import Any, Optional

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a rank is one thread: ranks share the cores

import torch

from model import SIZES
from text import SHAKESPEARE, Text

WARM_UP = 20  # steps


def arguments(description: Optional[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", default="10m", choices=list(SIZES), help="of the model, in parameters (default: %(default)s)")
    add("--steps", type=int, default=300, help="(default: %(default)s)")
    add("--slots", type=int, default=int(os.environ.get("WORLD_SIZE", "1")),
        help="batches of a step over all ranks; a multiple of the ranks (default: one a rank)")
    add("--sequences", type=int, default=4, help="of a slot's batch (default: %(default)s)")
    add("--length", type=int, help="tokens of a sequence (default: 64, or as many as the model sees)")
    add("--lr", type=float, default=1e-3, help="learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the weights and of the batches (default: %(default)s)")
    add("--text", type=pathlib.Path, default=SHAKESPEARE, metavar="FILE", help="what to learn (default: Shakespeare)")
    add("--compile", action="store_true", help="with torch.compile")
    add("--record", type=pathlib.Path, metavar="DIR", help="write each rank's losses and times there, as lines of JSON")
    return parser


def warm_up(step: int) -> float:
    """The learning rate's factor."""
    return min(1.0, (step + 1) / WARM_UP)


@torch.no_grad()
def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    flags = parser.parse_args()
    most = SIZES[flags.size].context
    flags.length = min(64, most) if flags.length is None else flags.length
    if not 0 < flags.length <= most:
        parser.error(f"--length is {flags.length}; the {flags.size} model sees 1 to {most} tokens")
    return flags


def held_out_loss(model: torch.nn.Module, text: Text, length: int) -> float:
    """Of a few pieces that were not trained on. Every rank calls it."""
    with torch.compiler.set_stance("force_eager"):  # nothing is compiled for this alone
        return float(model(*text.held_out_batch(32, length)).detach())


class Log:
    """A progress line on the first rank, and a file on each."""

    def __init__(self, flags: argparse.Namespace, rank: int, ranks: int) -> None:
        torch.set_num_threads(1)
        self._first, self._steps = rank == 0, flags.steps
        self._tokens = flags.slots * flags.sequences * flags.length  # of a step, all ranks together
        self._file = open(flags.record / f"rank-{rank}.jsonl", "w", encoding="utf-8") if flags.record else None
        self._begin = self._last = time.monotonic()
        self._shown = 0.0

    def step(self, step: int, losses: list[float]) -> None:
        now = time.monotonic()
        self._write(event="step", step=step + 1, losses=losses, tokens=self._tokens, seconds=now - self._last)
        rate = self._tokens / (now - self._last)
        self._last = now
        terminal = sys.stderr.isatty()
        if not self._first or (not terminal and (step + 1) % 50) or (terminal and now - self._shown < 0.2):
            return
        self._shown = now
        line = f"step {step + 1}/{self._steps}  loss {sum(losses) / len(losses):.3f}  {rate:.0f} tokens/s"
        print(f"\r{line:60}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)

    def end(self, held_out: float) -> None:
        self._write(event="end", held_out=held_out, seconds=time.monotonic() - self._begin)
        if self._first:
            print(f"\nheld-out loss {held_out:.3f}", file=sys.stderr)

    def _write(self, **event: Any) -> None:
        if self._file:
            print(json.dumps(event), file=self._file, flush=True)
