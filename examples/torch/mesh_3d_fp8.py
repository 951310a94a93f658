#!/usr/bin/env python3
"""A job on a mesh of three dimensions, 2 x 2 x 2 workers, whose weights are gathered as float8 codes with a scale for each tensor.

    python examples/torch/mesh_3d_fp8.py
    torchrun --nproc-per-node 2 examples/torch/mesh_3d_fp8.py

Scales are those of the whole tensor, whatever the mesh, and are there before the gather: what torchao calls precomputed.
"""
import argparse
import os

import torch
from torch import nn

MESH, WORKERS, SLOTS = "ddp=2,fsdp=2,abcd=2", 8, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 33), nn.GELU(), nn.Linear(33, 64))  # 33 rows: no mesh divides them


def train(steps: int = 20, mesh: str = MESH, **service: object):
    """The model, its optimizer, the losses of this rank. service: service=, job=, workers= of the optimizer."""
    import shardmesh.torch as sm

    trained = model()
    optimizer = sm.Optimizer(trained, "AdamW", lr=1e-3, gather="fp8_tensor", mesh=mesh, slots=SLOTS, **service)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    losses = []
    for step in range(steps):
        for slot in range(rank * SLOTS // world, (rank + 1) * SLOTS // world):
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * (step % 5) + slot))
            loss = (trained(inputs) - inputs.flip(1)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return trained, optimizer, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    _, optimizer, losses = train(options.steps, workers=WORKERS)
    if os.environ.get("RANK", "0") == "0":
        print(f"mesh {optimizer.job.mesh}: loss {losses[0]:.4f} to {losses[-1]:.4f}, {optimizer.job.digest()}")
    optimizer.close()


if __name__ == "__main__":
    main()
