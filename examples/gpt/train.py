#!/usr/bin/env python3
"""Trains a small GPT on text, with shardmesh.torch.Optimizer.

  python examples/gpt/train.py --size tiny                                       one process, a service of its own
  torchrun --nproc-per-node 2 examples/gpt/train.py --size 10m --compile         two ranks
  python examples/gpt/train.py --follow --service HOST:PORT --job gpt --size 10m  prints text of the newest weights

The losses of the same seed, slots and batches are the same bits with any number of ranks.
"""
from __future__ import annotations

import argparse
import os
import sys
from typing import Any, Callable, Optional

import torch

import shardmesh.torch as sm
from shardmesh import client

from model import GPT, SIZES, generate
from run import Log, arguments, held_out_loss, parse, warm_up
from text import Text, decode, encode

PATIENCE = 600.0  # seconds that a follower waits for a version


TLS = "cert", "key", "ca", "name"  # the flags --tls-*


def of_service(flags: argparse.Namespace) -> dict[str, Any]:
    return {"service": flags.service, **{f"tls_{what}": getattr(flags, f"tls_{what}") for what in TLS}}


def in_blocks(gather: str) -> Callable[[str], Optional[str]]:
    """For the blocks' matrices alone; others come as stored: in fp8, embeddings and norms learn worse."""

    def of(name: str) -> Optional[str]:
        matrix = name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name
        return gather if matrix else None

    return of


def train(flags: argparse.Namespace) -> None:
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(flags.seed)
    text, model = Text.load(flags.text, flags.seed), GPT(SIZES[flags.size])
    optimizer = sm.Optimizer(model, "AdamW", lr=flags.lr, betas=(0.9, 0.95), weight_decay=0.1, slots=flags.slots,
                             weights=flags.weights, states=flags.states, gather=in_blocks(flags.gather),
                             residency=flags.residency, publish_every=flags.every, job=flags.job, **of_service(flags))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    run = torch.compile(model) if flags.compile else model
    log = Log(flags, rank, ranks)
    for step in range(flags.steps):
        losses = []
        for slot in range(rank * flags.slots // ranks, (rank + 1) * flags.slots // ranks):
            loss = run(*text.batch(step, slot, flags.sequences, flags.length))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        log.step(step, losses)
    log.end(held_out_loss(model, text, flags.length))
    optimizer.close()


def follow(flags: argparse.Namespace) -> None:
    """Text of the newest version every `flags.every` steps, up to the last step's."""
    os.nice(10)  # training comes first
    model = GPT(SIZES[flags.size])
    service = of_service(flags)
    client.connect(service.pop("service"), **service).job(flags.job, await_creation=True, timeout=PATIENCE)
    with sm.follow(model, job=flags.job, **of_service(flags), at_least=flags.every, timeout=PATIENCE) as following:
        while True:
            tokens = generate(model, encode(flags.prompt.encode()), flags.characters)
            print(f"--- step {following.step}\n{decode(tokens)}", flush=True)
            wanted = following.step - following.step % flags.every + flags.every
            if wanted > flags.steps:
                return
            following.wait(at_least=wanted, timeout=PATIENCE)


def main() -> None:
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--weights", help="how they are stored: bf16_sr, ... (default: as the model has them)")
    add("--states", default="fp32", help="the optimizer's: fp32, bf16_sr, dyn8, dyn4, ... (default: %(default)s)")
    add("--gather", default="stored", help="how matrices come to the ranks: stored, fp8_tensor, ... (%(default)s)")
    add("--residency", default="full", choices=["full", "bucket"], help="of the weights (default: %(default)s)")
    add("--service", metavar="HOST:PORT", help="of a coordinator (default: a service for this training alone)")
    for what in TLS:
        add(f"--tls-{what}", help=f"for a service on another host (default: SHARDMESH_TLS_{what.upper()}; docs/tls.md)")
    add("--job", help="its name (default: made up)")
    add("--follow", action="store_true", help="train nothing; print text of the newest weights of a job that trains")
    add("--every", type=int, default=100, help="steps between two texts (default: %(default)s)")
    add("--prompt", default="First Citizen:\n", help="what the text begins with")
    add("--characters", type=int, default=200, help="of a text (default: %(default)s)")
    flags = parse(parser)
    if flags.follow and not (flags.service and flags.job):
        sys.exit("train.py: --follow needs --service and --job")
    (follow if flags.follow else train)(flags)


if __name__ == "__main__":
    main()
