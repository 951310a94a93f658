"""What bench/pytorch/many_parameters.py measures, and the rows that it makes of that."""
from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any, Callable

import shardmesh.torch
import torch
from report import Report, at_most, cost, machine_now
from service import Service
from torch import nn

RATE = 1e-2
TOLERANCE = 2e-6  # of weights and of first moments after two steps
LINEAR = at_most(12)  # times a tenth of the parameters: ten, and some for noise
GROUPS = 16


class Arm:
    """A model, and an optimizer of it in as many groups as there are, up to GROUPS."""

    def __init__(self, count: int, make: Callable[[nn.Module, list[dict[str, Any]]], torch.optim.Optimizer]) -> None:
        self.model = nn.ParameterList([nn.Parameter(torch.full((3,), 1e-3 * (i % 89))) for i in range(count)])
        named = list(self.model.named_parameters())
        groups = [{"params": named[g::GROUPS], "lr": RATE * (g + 1) / GROUPS} for g in range(GROUPS)]
        begin = time.perf_counter()
        self.optimizer = make(self.model, groups)
        self.start = time.perf_counter() - begin

    def step(self) -> float:
        """The optimizer's own part, as a user waits for it."""
        values = torch.cat(list(self.model))
        loss = (values - 1).pow(2).sum()
        begin = time.perf_counter()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin

    def state_dict(self) -> float:
        begin = time.perf_counter()
        self.states = self.optimizer.state_dict()
        return time.perf_counter() - begin

    def load_state_dict(self) -> float:
        begin = time.perf_counter()
        self.optimizer.load_state_dict(self.states)
        return time.perf_counter() - begin


def torchs(model: nn.Module, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{**group, "params": [p for _, p in group["params"]]} for group in groups])


def verify(ours: Arm, theirs: Arm) -> str:
    """A note. SystemExit: they learn or save something else."""
    for _ in range(2):
        ours.step()
        theirs.step()
    ours.state_dict()
    theirs.state_dict()
    apart = max(float((one - other).abs().max().detach()) for one, other in zip(ours.model, theirs.model))
    for index, state in theirs.states["state"].items():
        apart = max(apart, float((ours.states["state"][index]["exp_avg"] - state["exp_avg"]).abs().max()))
    if apart > TOLERANCE or len(ours.states["state"]) != len(theirs.states["state"]):
        sys.exit(f"many_parameters: ours and torch.optim.AdamW are {apart:g} apart after two steps")
    return f"verified: after two steps, weights and exp_avg of all within {TOLERANCE:g} of torch.optim.AdamW's"


def run(flags: argparse.Namespace) -> None:
    os.environ.setdefault("SHARDMESH_BIN_DIR", os.path.abspath(flags.bin_dir))
    report = Report("a model of many parameters")
    many, few = flags.parameters, flags.parameters // 10
    with Service(flags.bin_dir, 1) as service:

        def served(job: str) -> Callable[[nn.Module, list[dict[str, Any]]], torch.optim.Optimizer]:
            return lambda model, groups: shardmesh.torch.Optimizer(
                groups, "AdamW", model=model, service=service.address, job=job)

        small, large, theirs = Arm(few, served("few")), Arm(many, served("many")), Arm(many, torchs)
        report.notes.append(verify(large, theirs))
        small.step()
        small.state_dict()
        for call in "step", "state_dict", "load_state_dict":
            seconds: dict[str, list[float]] = {"large": [], "small": [], "theirs": []}
            for _ in range(flags.rounds):
                for name, arm in (("large", large), ("small", small), ("theirs", theirs)):
                    seconds[name].append(getattr(arm, call)())
            name = f"{call}, {many} parameters, ms"
            report.add(cost(f"{name}, times {few} parameters", seconds["large"], seconds["small"], 1e3, LINEAR))
            report.add(cost(f"{name}, times torch.optim.AdamW", seconds["large"], seconds["theirs"], 1e3))
        starts: tuple[list[float], list[float]] = ([], [])
        for number in range(3):
            for count, found in zip((many, few), starts):
                arm = Arm(count, served(f"start-{count}-{number}"))
                found.append(arm.start)
                arm.optimizer.close()  # type: ignore[attr-defined]
        report.add(cost(f"start, {many} parameters, ms, times {few} parameters", *starts, 1e3, LINEAR))
        for arm in small, large:
            arm.optimizer.close()  # type: ignore[attr-defined]
    report.notes.append(f"{machine_now()}; torch {torch.__version__}")
    report.publish(flags.json)
