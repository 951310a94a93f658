"""The program of scenarios_parity_test.py: trains each scenario alone in torch, and with the service on 1, 2 and 4 ranks.

Usage: scenarios_ranks.py COORDINATOR. Reports of each scenario torch's losses, by step and slot, and norms of gradients; and of
each rank of each run the same, the job's digest, and how far weights are from torch's.
"""
import contextlib
import os
import sys

import torch

import shardmesh.torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import ranks
from scenarios import SCENARIOS, SLOTS, loss_of

SGD = {"lr": 0.05, "momentum": 0.9}
RUNS = [(1, "full"), (2, "full"), (4, "full"), (2, "bucket")]  # ranks and residency


def made(scenario):
    torch.manual_seed(3)
    return scenario.model()


def alone(scenario):
    """Losses, norms, and the model."""
    model = made(scenario)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], foreach=False, **SGD)
    losses, norms = [], []
    for step in range(scenario.steps):
        for slot in range(SLOTS):
            of_slot = [loss_of(scenario, model, step, slot, part) for part in range(scenario.parts)]
            (sum(of_slot) / SLOTS).backward()
            losses.append(sum(loss.item() for loss in of_slot))
        if scenario.clip:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), scenario.clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model


def slot_done(scenario, model, optimizer, scaler, step, slot):
    """Backwards of a slot; returns its loss."""
    total = 0.0
    for part in range(scenario.parts):
        with optimizer.no_sync() if part < scenario.parts - 1 else contextlib.nullcontext():
            loss = loss_of(scenario, model, step, slot, part)
            (loss if scaler is None else scaler.scale(loss)).backward()
            total += loss.item()
    return total


def trained(name, scenario, address, rank, world, residency):
    """Losses of this rank's slots, norms, and the job's digest; and the model."""
    model = made(scenario)
    optimizer = shardmesh.torch.Optimizer(
        model, "SGD", service=address, job=f"{name}-{world}-{residency}", slots=SLOTS, residency=residency,
        clip_norm=scenario.clip, **SGD, **scenario.options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) if scenario.scale else None
    losses, norms = [], []
    for step in range(scenario.steps):
        for slot in range(rank * SLOTS // world, (rank + 1) * SLOTS // world):
            losses.append(slot_done(scenario, model, optimizer, scaler, step, slot))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        norms.append(optimizer.last.gradient_norm)
        optimizer.zero_grad()
    digest = str(optimizer.job.digest())
    optimizer.close()
    return {"losses": losses, "norms": norms, "digest": digest}, model


def ulps_apart(model, other):
    """In units of the last place of a tensor's largest weight, in the model's smallest type."""
    most, epsilon = 0.0, max(torch.finfo(one.dtype).eps for one in model.parameters())
    for one, two in zip(model.parameters(), other.parameters()):
        unit = epsilon * (two.detach().float().abs().max().item() or 1.0)
        most = max(most, (one.detach().float() - two.detach().float()).abs().max().item() / unit)
    return most


def run(address, residency, references, rank, world):
    torch.set_num_threads(1)
    result = {}
    for name, scenario in SCENARIOS.items():
        result[name], model = trained(name, scenario, address, rank, world, residency)
        result[name]["apart"] = ulps_apart(model, references[name][2])
    return result


def main(address):
    torch.set_num_threads(1)
    references = {name: alone(scenario) for name, scenario in SCENARIOS.items()}
    result = {name: {"torch": references[name][:2], "ours": {}} for name in SCENARIOS}
    for world, residency in RUNS:
        said = ranks.fork(world, lambda rank, world: run(address, residency, references, rank, world), seconds=120)
        for name, of in result.items():
            of["ours"][f"{world} {residency}"] = [rank[name] for rank in said]
    ranks.report(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
