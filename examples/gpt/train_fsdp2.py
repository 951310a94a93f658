#!/usr/bin/env python3
"""The training of train.py under FSDP2: fully_shard of each block, gloo, fused AdamW of fp32 weights.

  torchrun --nproc-per-node 2 examples/gpt/train_fsdp2.py --size 10m --steps 300
"""
from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from model import GPT, SIZES
from run import Log, arguments, held_out_loss, parse, warm_up
from text import Text


def main() -> None:
    flags = parse(arguments(__doc__))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(flags.seed)
    text, model = Text.load(flags.text, flags.seed), GPT(SIZES[flags.size])
    if flags.compile:  # block by block: what fully_shard hooks into a module cannot be compiled
        for block in model.blocks:
            block.compile()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    slots = range(rank * flags.slots // ranks, (rank + 1) * flags.slots // ranks)
    log = Log(flags, rank, ranks)
    for step in range(flags.steps):
        losses = []
        for slot in slots:
            model.set_requires_gradient_sync(slot == slots[-1])
            loss = model(*text.batch(step, slot, flags.sequences, flags.length))
            (loss / len(slots)).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        log.step(step, losses)
    log.end(held_out_loss(model, text, flags.length))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
