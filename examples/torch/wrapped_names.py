#!/usr/bin/env python3
"""Names under wrappers: a model whose blocks have a child `my_orig_mod` and a parameter `_orig_mod_scale`, compiled, checkpointed and
under DistributedDataParallel, in every order, through Accelerate's prepare(): every job has the real names and the same bits, and its
checkpoint loads with the wrappers and without. Beside it Accelerate's own FSDP2, on the packages of today.

    python examples/torch/wrapped_names.py
"""
import json
import os
import tempfile

import safetensors.torch
import torch
import torch.distributed
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, TorchDynamoPlugin
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import shardmesh.torch
from shardmesh.torch import integrations


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.my_orig_mod = torch.nn.Linear(8, 8)
        self._orig_mod_scale = torch.nn.Parameter(torch.ones(8))
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, inputs):
        return inputs + torch.tanh(self.my_orig_mod(inputs)) * self._orig_mod_scale * self.scale


def bare():
    torch.manual_seed(1)
    return torch.nn.Sequential(Block(), Block())


def compiled(module):
    return torch.compile(module, backend="eager")


def each_block(*wraps):
    def wrap(model):
        for index in range(len(model)):
            for one in wraps:
                model[index] = one(model[index])
        return model
    return wrap


def chain(*wraps):
    def wrap(model):
        for one in wraps:
            model = one(model)
        return model
    return wrap


# What is done before the optimizer is made, whether prepare() compiles, what is done after.
SAME = chain()
ORDERS = {
    "none": (SAME, False, SAME),
    "compiled, then the optimizer": (compiled, False, SAME),
    "the optimizer, then compiled": (SAME, False, compiled),
    "compiled by prepare()": (SAME, True, SAME),
    "blocks compiled, then the optimizer": (each_block(compiled), False, SAME),
    "the optimizer, then blocks compiled": (SAME, False, each_block(compiled)),
    "blocks compiled, compiled by prepare()": (each_block(compiled), True, SAME),
    "blocks checkpointed, then compiled": (each_block(checkpoint_wrapper, compiled), False, SAME),
    "blocks compiled, then checkpointed": (each_block(compiled, checkpoint_wrapper), False, SAME),
    "blocks checkpointed, compiled by prepare()": (each_block(checkpoint_wrapper), True, SAME),
    "the optimizer, then blocks checkpointed": (SAME, True, each_block(checkpoint_wrapper)),
    "DDP": (DistributedDataParallel, False, SAME),
    "DDP, then compiled": (chain(DistributedDataParallel, compiled), False, SAME),
    "compiled, then DDP": (chain(compiled, DistributedDataParallel), False, SAME),
    "blocks checkpointed and compiled, DDP, compiled": (
        chain(each_block(checkpoint_wrapper, compiled), DistributedDataParallel, compiled), False, SAME),
}


def accelerator_of(compiles, fsdp=False):
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager") if compiles else None)
    if fsdp:  # which it refuses to be on a CPU
        state = accelerator.state
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, FullyShardedDataParallelPlugin(fsdp_version=2)
    return accelerator


def train(accelerator, model, optimizer):
    for step in range(3):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def ours(order, service, folder):
    """The job's names and bits; whether its checkpoint loads with and without the wrappers."""
    before, compiles, after = ORDERS[order]
    accelerator = accelerator_of(compiles)
    model = before(bare())
    job = f"order-{list(ORDERS).index(order)}"
    optimizer = shardmesh.torch.Optimizer(model, "AdamW", lr=1e-2, service=service, job=job)
    integrations.attach(accelerator, optimizer)
    model, prepared = accelerator.prepare(after(model), optimizer)
    train(accelerator, model, prepared)
    saved = safetensors.torch.load_file(os.path.join(optimizer.save(folder).path, "model.safetensors"))
    wrapped_one, bare_one = after(before(bare())), bare()
    shardmesh.torch.load_state_dict(wrapped_one, saved)
    shardmesh.torch.load_state_dict(bare_one, model.state_dict())  # under the names that the wrappers made
    trained = shardmesh.torch.state_dict(model)
    loads = all(torch.equal(trained[name], shardmesh.torch.state_dict(other)[name])
                for other in (wrapped_one, bare_one) for name in saved)
    report = {"outcome": "trains", "names": sorted(saved), "digest": str(optimizer.job.digest()), "loads": loads}
    optimizer.close()
    return report


def theirs(order):
    """The same through Accelerate's FSDP2 and torch's AdamW."""
    before, compiles, after = ORDERS[order]
    accelerator = accelerator_of(compiles, fsdp=True)
    model = before(bare())
    try:
        model, optimizer = accelerator.prepare(after(model), torch.optim.AdamW(model.parameters(), lr=1e-2))
        train(accelerator, model, optimizer)
        return "trains"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(service=None):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    keeper = shardmesh.torch.Optimizer(bare(), "AdamW", job="keeper", service=service)  # and its service, which all orders use
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for index, order in enumerate(ORDERS):
            results[order] = {**ours(order, keeper.service, os.path.join(folder, str(index))), "theirs": theirs(order)}
    keeper.close()
    for order, result in results.items():
        print(f"{order:48} ours: {result['outcome']}, {result['digest']}, loads {result['loads']}\n"
              f"{'':48} FSDP2: {result['theirs'][:110]}")
    print(json.dumps(results))
    torch.distributed.destroy_process_group()
    return results


if __name__ == "__main__":
    main()
