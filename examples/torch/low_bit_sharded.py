#!/usr/bin/env python3
"""A compiled bf16 model, its weights rounded stochastically and its AdamW states in 8 or 4 bits, sharded over workers.

    python examples/torch/low_bit_sharded.py --states dyn4
    torchrun --nproc-per-node 2 examples/torch/low_bit_sharded.py --workers 4

prints the same digest, whatever the numbers of ranks and workers. With --beside-torchao it runs on torchao's AdamW8bit under FSDP2
what that does of it today.
"""
import argparse
import os

import torch
from torch import nn

SLOTS = 4


class Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.odd = nn.Linear(width, 100)  # 100 rows: no whole number of blocks of 256 for each of several ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return self.odd(x)


def model(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return Model(width, layers).to(torch.bfloat16)


def loss_of(compiled: nn.Module, width: int, step: int, slot: int) -> torch.Tensor:
    """A function of the weights, the step and the slot alone."""
    generator = torch.Generator().manual_seed(1000 * step + slot)
    inputs = torch.randn(8, width, generator=generator)
    return (compiled(inputs.to(torch.bfloat16)).float() - inputs.sum(1, keepdim=True).sin()).square().mean()


def train(states: str, *, width: int = 256, layers: int = 4, steps: int = 20, backend: str = "inductor", **service: object) -> dict:
    """service: service=, job=, workers=, mesh= of the optimizer."""
    import shardmesh.torch as sm

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    trained = model(width, layers)
    optimizer = sm.Optimizer(trained, "AdamW", lr=1e-3, weights="bf16_sr", states=states, gradients="bf16", slots=SLOTS, seed=1,
                             **service)
    compiled = torch.compile(trained, backend=backend, fullgraph=True)  # a graph break is an error
    losses = []
    for step in range(steps):
        for slot in range(rank * SLOTS // world, (rank + 1) * SLOTS // world):
            loss = loss_of(compiled, width, step, slot)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    result = {"digest": str(optimizer.job.digest()), "graph_breaks": breaks, "losses": losses}
    optimizer.close()
    return result


def torchao_on_fsdp2(name: str, width: int, steps: int, **options: object) -> list[torch.Tensor]:
    """The whole weights after some steps, or what torchao raises. REQUIRES: a process group."""
    import torchao.optim
    from torch.distributed.fsdp import fully_shard

    sharded = model(width, 1)
    fully_shard(sharded)
    optimizer = getattr(torchao.optim, name)(sharded.parameters(), lr=1e-3, **options)
    torch.manual_seed(1)  # of the rounding, on every rank
    for step in range(steps):
        loss_of(sharded, width, step, 0).backward()  # the same on every rank: so is the mean
        optimizer.step()
        optimizer.zero_grad()
    return [one.full_tensor().detach().float() for one in sharded.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", default="dyn8", choices=["fp32", "bf16_sr", "dyn8", "dyn4"])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--beside-torchao", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    said = train(options.states, steps=options.steps, backend=options.backend, workers=options.workers)
    if rank == 0:
        print(f"shardmesh, bf16_sr + {options.states}: loss {said['losses'][0]:.4f} to {said['losses'][-1]:.4f}, "
              f"{said['graph_breaks']} graph breaks, {said['digest']}")
    if options.beside_torchao:
        torch.distributed.init_process_group("gloo", **({} if "RANK" in os.environ else {
            "store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}))
        try:
            torchao_on_fsdp2("AdamW8bit", 256, 1, bf16_stochastic_round=True)
            outcome = "runs"
        except Exception as error:  # whatever it is
            outcome = f"{type(error).__name__}: {error}".split("\n")[0]
        if rank == 0:
            print(f"torchao {options.states} on FSDP2: {outcome}")
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
