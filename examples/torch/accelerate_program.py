#!/usr/bin/env python3
"""A program of Accelerate: gradient accumulation, clipping, a schedule, save_state and load_state. The three lines that are not
Accelerate's own are marked; without them, and with torch's AdamW, it is what it was before (--plain).

    python examples/torch/accelerate_program.py
    torchrun --nproc-per-node 2 examples/torch/accelerate_program.py
"""
import argparse
import json
import tempfile

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import shardmesh.torch                                                                          # 1
from shardmesh.torch import integrations


TLS = "cert", "key", "ca", "name"


def tls_of(options):
    return {f"tls_{what}": getattr(options, f"tls_{what}") for what in TLS}


def data_of(steps, accumulation, batch):
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(steps * accumulation * batch, 16, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].sin())


def optimizer_of(accelerator, model, options):
    if options.plain:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    optimizer = shardmesh.torch.Optimizer(model, "AdamW", lr=1e-2, weight_decay=0.1, clip_norm=0.5,     # 2
                                          states=options.states, slots=options.slots, service=options.service, job=options.job,
                                          **tls_of(options))
    integrations.attach(accelerator, optimizer)                                                 # 3
    return optimizer


def epoch(accelerator, model, optimizer, loader, scheduler):
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    return losses


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="torch.optim.AdamW instead")
    parser.add_argument("--states", default="fp32")
    parser.add_argument("--slots", type=int, help="of a step over all ranks")
    parser.add_argument("--batch", type=int, default=8, help="of one backward, over all ranks")
    parser.add_argument("--service", help="host:port of a coordinator; one of its own")
    for what in TLS:
        parser.add_argument(f"--tls-{what}", help=f"for a service on another host; SHARDMESH_TLS_{what.upper()} (docs/tls.md)")
    parser.add_argument("--job")
    options = parser.parse_args(arguments)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    optimizer = optimizer_of(accelerator, model, options)
    loader = DataLoader(data_of(8, 2, options.batch), batch_size=options.batch // accelerator.num_processes)
    # Accelerate's own schedulers go ahead by a step for each process.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4 * accelerator.num_processes, gamma=0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = epoch(accelerator, model, optimizer, loader, scheduler)
    with tempfile.TemporaryDirectory() as folder:
        folder = [folder]
        if accelerator.num_processes > 1:
            torch.distributed.broadcast_object_list(folder)
        accelerator.save_state(folder[0])
        accelerator.wait_for_everyone()
        once = epoch(accelerator, model, optimizer, loader, scheduler)
        accelerator.load_state(folder[0])
        again = epoch(accelerator, model, optimizer, loader, scheduler)
        accelerator.wait_for_everyone()
    report = {"wrapped": type(model).__name__, "losses": losses, "once": once, "again": again,
              "lr": optimizer.param_groups[0]["lr"],
              "weights": [parameter.double().sum().item() for parameter in model.parameters()]}
    if not options.plain:
        report["digest"] = str(optimizer.optimizer.job.digest())
    if accelerator.is_main_process:
        print(json.dumps(report))
    accelerator.wait_for_everyone()
    if not options.plain:
        optimizer.optimizer.close()
    accelerator.end_training()
    return report


if __name__ == "__main__":
    main()
