"""Two ranks of FSDP2 on gloo, which exchange full state dicts by files.

Usage: fsdp_exchange.py FOLDER. Trains a model for two steps and writes theirs.pt (full state dicts of model and optimizer) and next.pt
(its weights after one more step); then reads ours.pt, of another trainer, into FSDP2, and writes after.pt (weights after a step)."""
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def model_of():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 7))


def batch_of(step):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step))


def step_with(model, optimizer, step):
    model(batch_of(step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights_of(model, optimizer):
    return get_state_dict(model, optimizer, options=FULL)[0]


def save(rank, value, path):
    if rank == 0:
        torch.save(value, path)


def sharded():
    model = model_of()
    for layer in model[0], model[2]:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, optimizer = sharded()
    for step in range(2):
        step_with(model, optimizer, step)
    save(rank, get_state_dict(model, optimizer, options=FULL), f"{folder}/theirs.pt")
    step_with(model, optimizer, 2)
    save(rank, weights_of(model, optimizer), f"{folder}/next.pt")
    model, optimizer = sharded()
    weights, moments = torch.load(f"{folder}/ours.pt", weights_only=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=StateDictOptions(full_state_dict=True))
    step_with(model, optimizer, 2)
    save(rank, weights_of(model, optimizer), f"{folder}/after.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(run, (os.path.abspath(sys.argv[1]),), nprocs=2)
