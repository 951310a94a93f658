"""Two ranks of FSDP2 on gloo: train a small model for three steps and save it with torch.distributed.checkpoint.

Usage: fsdp_saver.py OPTIMIZER DIRECTORY INPUTS HIDDEN OUTPUTS. Beside DIRECTORY each rank leaves DIRECTORY.rankN: its own pieces of
the weights and states, by torch.save."""
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchao.optim
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def local(value):
    return value.to_local().detach() if isinstance(value, DTensor) else value


def run(rank, kind, directory, sizes):
    torch.compiler.set_stance("force_eager")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}.store", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    inputs, hidden, outputs = sizes
    model = torch.nn.Sequential(torch.nn.Linear(inputs, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, outputs))
    fully_shard(model, mesh=mesh)
    optimizer = (getattr(torchao.optim, kind, None) or getattr(torch.optim, kind))(model.parameters(), lr=0.03125)
    for step in range(3):
        data = torch.randn(8, inputs, generator=torch.Generator().manual_seed(10 * step + rank))
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=directory)
    mine = {"model": {name: local(value) for name, value in weights.items()},
            "states": {name: {key: local(value) for key, value in of_name.items()} for name, of_name in states["state"].items()}}
    torch.save(mine, f"{directory}.rank{rank}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = (sys.argv[1], os.path.abspath(sys.argv[2]), [int(size) for size in sys.argv[3:6]])
    torch.multiprocessing.spawn(run, arguments, nprocs=2)
