"""What bench/pytorch/pytorch.py measures, and the rows that it makes of that."""
from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any, Callable, Iterator, Optional

from torch_world import World, first_line, why_not_ours  # first: it says how many threads PyTorch has

import plot
import pytorch_profile
import torch
from model import GPT, SIZES
from process_memory import Peak, held_bytes, tree
from pytorch_arms import ARMS, OURS, slowest_step
from report import Goal, Report, Row, at_least, at_most, compare, cost, machine_now
from service import Service

WARM_UPS = 3  # steps that are compared
MIB = 1 << 20
COPIED = 256 * MIB
LEAST_OVERHEAD = 0.02  # of the model's own time: what is below it is noise, and counts as much
TIMED = ("model", "ddp", "fsdp2", "fsdp2 8-bit", "full", "bucket", "full 8-bit")
PROFILED = ("model", "ddp", "fsdp2", "full", "bucket")
IN_MEMORY = ("ddp", "fsdp2", "full", "bucket", "bucket 8-bit", "bucket 8-bit bf16")
NOT_QUICK = {  # the first compiles for a minute
    TIMED: ("fsdp2 8-bit", "full 8-bit"),
    IN_MEMORY: ("ddp", "full", "bucket 8-bit", "bucket 8-bit bf16"),
    OURS: ("full 8-bit", "bucket 8-bit", "bucket 8-bit bf16"),
    PROFILED: (),
}
TOLERANCE = {"8-bit": 3e-2, "": 2e-3}  # of losses after two steps, relative

START = """
import sys, time
import torch
begin = time.perf_counter()
import shardmesh.torch as sm
optimizer = sm.Optimizer(torch.nn.Linear(8, 8), "AdamW", lr=1e-3, service=sys.argv[1])
print(time.perf_counter() - begin)
optimizer.close()
"""


class Bench:
    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags, self.report = flags, Report("training a GPT with PyTorch")
        self.rounds, self.steps = (5, 1) if flags.quick else (flags.rounds, flags.steps)
        self.skip = flags.skip.split(",")
        self.no_ours = why_not_ours()
        self.arms = flags.arms.split(",") if flags.arms else None

    def wanted(self, arms: tuple[str, ...]) -> list[str]:
        if self.arms is not None:
            return [arm for arm in arms if arm in self.arms]
        return [arm for arm in arms if not (self.flags.quick and arm in NOT_QUICK[arms])]

    @contextlib.contextmanager
    def world(self, arm: str, ranks: int, **options: Any) -> Iterator[tuple[World, list[int]]]:
        """An arm's ranks, and the process ids of all that works for them."""
        with contextlib.ExitStack() as stack:
            service = None
            if arm in OURS:
                if self.no_ours:
                    raise RuntimeError(self.no_ours)
                service = stack.enter_context(Service(self.flags.bin_dir, ranks))
                options["service"] = service.address
            world = World(arm, ARMS[arm], ranks, **options)
            stack.callback(world.close)
            yield world, world.pids + (tree([service.pid]) if service else [])


class Timing:
    """One size on some ranks: every arm's seconds and losses, round by round."""

    def __init__(self, bench: Bench, size: str, ranks: int) -> None:
        self.size, self.ranks = size, ranks
        self.seconds: dict[str, list[float]] = {}
        self.losses: dict[str, list[float]] = {}
        self.missing: dict[str, str] = {}
        self.copies: list[float] = []
        with contextlib.ExitStack() as stack:
            self._worlds = self._start(bench, stack)
            self._compare()
            for round_ in range(bench.rounds):
                progress(f"{size}, {ranks} ranks: round {round_ + 1} of {bench.rounds}")
                self.copies.append(copy_seconds())
                for arm, world in self._worlds.items():
                    self._round(arm, world, WARM_UPS + round_ * bench.steps, bench.steps)

    def _start(self, bench: Bench, stack: contextlib.ExitStack) -> dict[str, World]:
        """Those that could make their first steps."""
        worlds: dict[str, World] = {}
        for arm in bench.wanted(TIMED):
            progress(f"{self.size}, {self.ranks} ranks: {arm} starts")
            try:
                worlds[arm], _ = stack.enter_context(bench.world(arm, self.ranks))
                worlds[arm].ask("make", self.size)
                for step in range(WARM_UPS):
                    self._step(arm, worlds[arm], step)
            except (RuntimeError, OSError) as error:
                self.missing[arm] = first_line(error)
                worlds.pop(arm, None)
        for arm in set(TIMED) - set(worlds) - set(self.missing):
            self.missing[arm] = "not asked for"
        return worlds

    def _step(self, arm: str, world: World, step: int) -> float:
        seconds, losses = slowest_step(world, step)
        self.losses.setdefault(arm, []).append(statistics.mean(losses))
        return seconds

    def _round(self, arm: str, world: World, first: int, steps: int) -> None:
        self.seconds.setdefault(arm, []).append(min(self._step(arm, world, first + step) for step in range(steps)))

    def _compare(self) -> None:
        """Arms that do not train as ddp does are not measured."""
        for arm in list(self._worlds):
            wrong = self._wrong(arm)
            if wrong:
                self.missing[arm] = wrong
                del self._worlds[arm]

    def _wrong(self, arm: str) -> str:
        if "ddp" not in self._worlds:
            return ""
        right, limit = self.losses["ddp"], next(limit for end, limit in TOLERANCE.items() if arm.endswith(end))
        for step in range(1 if arm == "model" else WARM_UPS):  # the model alone learns nothing
            loss = self.losses[arm][step]
            if not abs(loss - right[step]) <= right[step] * (limit if step or "8-bit" in arm else 1e-5):
                return f"wrong: its loss at step {step + 1} is {loss:.6f}, that of ddp {right[step]:.6f}"
        return ""

    def overhead(self, arm: str) -> list[float]:
        pairs = zip(self.seconds[arm], self.seconds["model"])
        return [max(LEAST_OVERHEAD * model, step - model) for step, model in pairs]

    def rows(self) -> Iterator[Row]:
        of, step = f"{self.size}, {self.ranks} ranks", self.seconds.__getitem__
        for ours in "full", "bucket":
            for rival, goal in ("ddp", 5), ("fsdp2", 10):
                name = f"{of}: overhead, {ours}, against {rival}, ms"
                yield self.row(name, ours, rival, self.overhead, at_least(goal), "model")
        for ours, rival, goal in (("full", "ddp", 1.2), ("full", "fsdp2", 2), ("full 8-bit", "fsdp2 8-bit", 4),
                                  ("bucket", "ddp", 1.2), ("bucket", "fsdp2", 2)):
            yield self.row(f"{of}: step, {ours}, against {rival}, ms", ours, rival, step, at_least(goal))
        for arm in TIMED[1:]:
            yield self.row(f"{of}: step, {arm}, times the model alone, ms", arm, "model", step, None)

    def notes(self) -> list[str]:
        of, speed = f"{self.size}, {self.ranks} ranks", COPIED / 1e9 / statistics.median(self.copies)
        losses = ", ".join(f"{arm} {losses[-1]:.4f}" for arm, losses in self.losses.items() if arm in self.seconds)
        return [f"{of}: a copy of 256 MiB by one thread: {speed:.1f} GB/s; losses after the rounds: {losses}"]

    def row(self, name: str, ours: str, rival: str, of: Callable[[str], list[float]], goal: Optional[Goal],
            also: str = "") -> Row:
        for arm in (ours, rival, also):
            if arm and arm not in self.seconds:
                return Row(name, goal=goal, missing=f"{arm}: {self.missing.get(arm, 'no rounds')}")
        make = cost if ", times " in name else compare
        return make(name, of(ours), of(rival), 1e3, goal)


def copy_seconds() -> float:
    """Of COPIED bytes, by one thread."""
    torch.set_num_threads(1)
    source, target = torch.ones(COPIED // 4), torch.zeros(COPIED // 4)
    begin = time.monotonic()
    target.copy_(source)
    return time.monotonic() - begin


def model_bytes(bench: Bench, arm: str, size: str, ranks: int) -> int:
    """What training holds at its peak beyond what training next to nothing does, all processes together: weights,
    gradients, states and buffers. A batch is one sequence of two tokens, so that activations are nothing."""
    with bench.world(arm, ranks, trim=True) as (world, pids):
        held = []
        for of in ("tiny", size):
            world.ask("make", of)
            slowest_step(world, 0, 1, 2)
            with Peak(pids) as peak:
                for step in range(1, 4):
                    slowest_step(world, step, 1, 2)
            held.append(max(peak.bytes, held_bytes(pids)))
            world.ask("drop")
        return held[1] - held[0]


def memory_rows(bench: Bench, size: str, ranks: int) -> Iterator[Row]:
    found: dict[str, float] = {}
    missing: dict[str, str] = {}
    for arm in bench.wanted(IN_MEMORY):
        progress(f"{size}, {ranks} ranks: memory of {arm}")
        try:
            found[arm] = model_bytes(bench, arm, size, ranks)
        except (RuntimeError, OSError) as error:
            missing[arm] = first_line(error)
    low = at_most(0.35)
    wanted = (("bucket", "fsdp2", at_most(0.8)), ("bucket 8-bit", "fsdp2", low), ("bucket 8-bit bf16", "fsdp2", low),
              ("full", "ddp", None))
    for ours, rival, goal in wanted:
        name = f"{size}, {ranks} ranks: memory, {ours}, times {rival}, MiB"
        absent = [arm for arm in (ours, rival) if arm not in found]
        if absent:
            why = "; ".join(f"{arm}: {missing.get(arm, 'not asked for')}" for arm in absent)
            yield Row(name, goal=goal, missing=why)
        else:
            yield cost(name, [found[ours]], [found[rival]], 1 / MIB, goal)
    plain = 16.0 * sum(parameter.numel() for parameter in GPT(SIZES[size]).parameters())
    for arm, held in found.items():
        yield cost(f"{size}, {ranks} ranks: memory, {arm}, times 16 bytes a parameter, MiB", [held], [plain], 1 / MIB)


def bits(bench: Bench) -> str:
    """A note. SystemExit: ours learns other bits with another number of ranks."""
    if bench.no_ours:
        return f"the same bits with any number of ranks: not tried: {bench.no_ours}"
    for arm in bench.wanted(OURS):
        learnt = []
        for ranks in (1, 2):
            progress(f"bits of {arm}, {ranks} ranks")
            with bench.world(arm, ranks, slots=2) as (world, _):
                world.ask("make", "tiny")
                losses = [slowest_step(world, step)[1] for step in range(5)]
                learnt.append((losses, set(world.ask("digest"))))
        if learnt[0] != learnt[1]:
            sys.exit(f"pytorch: {arm} learns other bits on 2 ranks than on 1: {learnt}")
    return "verified: ours learns the same bits on 1 and 2 ranks"


def start_rows(bench: Bench) -> Iterator[Row]:
    names = "import shardmesh.torch and attach, s, times 1 s", "step() beyond the service's own, us, times 50 us"
    if bench.no_ours:
        yield from (Row(name, goal=at_most(1), missing=bench.no_ours) for name in names)
        return
    with Service(bench.flags.bin_dir, 1) as service:
        progress("start")
        seconds = [start_seconds(service.address) for _ in range(1 if bench.flags.quick else 7)]
    yield cost(names[0], seconds, [1.0] * len(seconds), 1, at_most(1))
    with bench.world("full", 1) as (world, _):
        overhead = [world.ask("step_overhead", 200)[0] for _ in range(7)]
    yield cost(names[1], overhead, [50e-6] * len(overhead), 1e6, at_most(1))


def start_seconds(address: str) -> float:
    command = [sys.executable, "-c", START, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment())
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-500:])
    return float(done.stdout.split()[-1])


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def draw_losses(bench: Bench, size: str, ranks: int, path: pathlib.Path) -> None:
    pyplot = plot.pyplot_for("losses")
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for arm in bench.wanted(TIMED)[1:]:
        progress(f"losses of {arm}")
        try:
            with bench.world(arm, ranks) as (world, _):
                world.ask("make", size)
                losses = [statistics.mean(slowest_step(world, step)[1]) for step in range(bench.flags.loss_steps)]
                axes.plot(losses, label=arm, linewidth=1)
        except (RuntimeError, OSError) as error:
            bench.report.notes.append(f"losses of {arm}: {first_line(error)}")
    axes.set(title=f"loss, {size}, {ranks} ranks", xlabel="step", ylabel="loss")
    axes.legend()
    pyplot.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def profile(bench: Bench, size: str, ranks: int, path: pathlib.Path) -> None:
    shapes = [tuple(parameter.shape) for parameter in GPT(SIZES[size]).parameters()]
    found: dict[str, pytorch_profile.Profile] = {}
    for arm in bench.wanted(PROFILED):
        progress(f"profile of {arm}")
        try:
            with bench.world(arm, ranks) as (world, _):
                world.ask("make", size)
                for step in range(WARM_UPS):
                    slowest_step(world, step)
                found[arm] = pytorch_profile.profiled(world, WARM_UPS, shapes)
        except (RuntimeError, OSError) as error:
            bench.report.notes.append(f"profile of {arm}: {first_line(error)}")
    bench.report.notes.append(pytorch_profile.table(found))
    pytorch_profile.draw(found, f"where a step's time goes, {size}, {ranks} ranks", path)


def progress(what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{what:79}\r", end="", file=sys.stderr, flush=True)


def run(flags: argparse.Namespace) -> None:
    bench = Bench(flags)
    report = bench.report
    sizes, counts = flags.sizes.split(","), [int(count) for count in flags.ranks.split(",")]
    if flags.quick:
        sizes, counts = ["30m"], [2]
    if "bits" not in bench.skip:
        report.notes.append(bits(bench))
    for size in sizes:
        for ranks in counts:
            if "time" not in bench.skip:
                timing = Timing(bench, size, ranks)
                report.rows += timing.rows()
                report.notes += timing.notes()
            if "memory" not in bench.skip:
                report.rows += memory_rows(bench, size, ranks)
    if "start" not in bench.skip:
        report.rows += start_rows(bench)
    if flags.profile:
        profile(bench, sizes[0], counts[0], pathlib.Path(flags.profile))
    if flags.losses:
        draw_losses(bench, sizes[0], counts[0], pathlib.Path(flags.losses))
    report.notes.append(f"a round's figure is the fastest of {bench.steps} steps; an overhead below "
                        f"{LEAST_OVERHEAD:.0%} of the model's own time counts as that")
    report.notes.append(f"{machine_now()}; torch {torch.__version__}")
    report.publish(flags.json)
