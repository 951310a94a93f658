#!/usr/bin/env python3
"""Int8 weights that are trained while they are int8, on sharded workers: the same bits on every mesh and in every order.

    python examples/torch/int8_training.py [--original]

Weights are int8 codes and a scale for each row, in the service, in memory and on the wire; a step rounds stochastically
under a new scale. --original shows what torchao's int8 training does under FSDP2 today.
"""
import argparse
import os
import tempfile

import torch
import shardmesh.torch as sm
from original import show

SLOTS, STEPS, WIDTH = 4, 6, 64


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(Block(), Block(), torch.nn.Linear(WIDTH, 1))


def train(net, optimizer, steps, slots=range(SLOTS)):
    """The last loss. The task: the mean of 64 numbers' squares. slots: of this rank."""
    for step in range(steps):
        for slot in slots:
            generator = torch.Generator().manual_seed(SLOTS * optimizer.committed_step + slot)
            x = torch.randn(16, WIDTH, generator=generator)
            loss = torch.nn.functional.mse_loss(net(x), x.square().mean(1, keepdim=True))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def options(**more):
    return dict(lr=3e-3, weights="int8_row", states="dyn8", slots=SLOTS, workers=2, **more)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--original", action="store_true")
    if parser.parse_args().original:
        show("int8")
    for mesh in "fsdp=2", "ddp=2":
        for deliver in "decoded", "quantized":
            net = model()
            optimizer = sm.Optimizer(net, "AdamW", mesh=mesh, deliver=deliver, **options())
            loss = train(net, optimizer, STEPS)
            print(f"shardmesh int8 on {mesh}, {deliver}: loss {loss:.4f}, {optimizer.job.digest()}", flush=True)
            optimizer.close()
    net = model()
    optimizer = sm.Optimizer(net, "AdamW", mesh="fsdp=2", job="int8", **options())
    train(net, optimizer, STEPS // 2)
    with tempfile.TemporaryDirectory() as folder:
        path = optimizer.save(folder).path
        optimizer.client.restore(path, name="other", mesh="ddp=2")
        net = model(seed=1)  # other weights: the job's count
        resumed = sm.Optimizer(net, "AdamW", mesh="ddp=2", job="other", service=optimizer.service, **options())
        loss = train(net, resumed, STEPS - STEPS // 2)
        print(f"shardmesh int8 saved after {STEPS // 2} steps on fsdp=2, resumed on ddp=2: loss {loss:.4f}, "
              f"{resumed.job.digest()}")
        resumed.close()
    optimizer.close()


if __name__ == "__main__":
    main()
