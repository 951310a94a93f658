"""What bench/imbalance/imbalance_torch.py measures, and the rows that it makes of that."""
from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from typing import Callable, Iterator, NamedTuple, Optional

from torch_world import World, first_line, why_not_ours  # first: it says how many threads PyTorch has

import imbalance_plots
import torch
from imbalance_arms import ARMS, OURS, Done, Trainer, Work
from imbalance_samples import (Cost, Plan, free_time, meeting_time, plan_micro, plan_mini, published_cost, pull_order,
                               rank_speeds, sample_lengths)
from report import Goal, Report, Row, at_least, compare, machine_now
from service import Service

WARM_UPS = 2  # minibatches that are compared
HEAD_START = 0.01  # seconds: what asking all ranks may take
SECONDS_PER_COST = 0.06  # of published_cost(), where computing is sleeping
CALIBRATED = 64, 256, 512, 1024, 2048  # tokens
EQUAL_LENGTH = 1024
TOLERANCE = 1e-5, 2e-3  # of losses, relative: of the first minibatch, and after steps
RIVAL = "fsdp2 LB-Micro"


class Scenario(NamedTuple):
    name: str
    ranks: int
    samples: int  # of a minibatch, for each rank
    sleeps: bool
    goals: dict[str, Goal]  # of arms of ours, against RIVAL
    equal: bool = False  # lengths
    spread: float = 0.0  # of speeds
    in_quick: bool = False


def both(goal: Goal) -> dict[str, Goal]:
    return dict.fromkeys(OURS, goal)


SCENARIOS = (
    Scenario("2 ranks, minibatch 4", 2, 4, False, both(at_least(1.1)), in_quick=True),
    Scenario("1 rank, minibatch 1, equal lengths", 1, 1, False, both(at_least(0.98)), equal=True, in_quick=True),
    Scenario("4 ranks that sleep, minibatch 4", 4, 4, True, both(at_least(1.2)), in_quick=True),
    Scenario("8 ranks that sleep, minibatch 4", 8, 4, True, both(at_least(1.26))),
    Scenario("4 ranks that sleep, of unequal speeds, minibatch 8", 4, 8, True, {"pulling": at_least(1.2)}, spread=0.15),
)


class Figures:
    """Of an arm; seconds are of all minibatches of a round."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.critical: list[float] = []
        self.losses: list[float] = []  # means over the tokens of a minibatch
        self.idle: list[float] = []  # shares, of each rank and minibatch
        self.last: list[Done] = []  # by rank


class Measured:
    """A scenario, round by round. SystemExit: an arm learns what it should not."""

    def __init__(self, flags: argparse.Namespace, scenario: Scenario) -> None:
        self.flags, self.scenario, self.missing = flags, scenario, dict[str, str]()
        self.figures = {arm: Figures() for arm in ARMS}
        self.tokens: list[int] = []  # of each round
        self._worlds: dict[str, World] = {}
        self._works: list[dict[str, Work]] = []  # that are to be computed in one process, too
        with contextlib.ExitStack() as stack:
            cores = len(os.sched_getaffinity(0))
            service = None if why_not_ours() else stack.enter_context(
                Service(flags.bin_dir, min(scenario.ranks, cores)))
            self._address = service.address if service else None
            self._cost = published_cost if scenario.sleeps else calibrated(min(scenario.ranks, cores))
            for arm in ARMS:
                self._start(arm, stack)
            alone = [arm for arm in OURS if arm in self._worlds and scenario.ranks > 1]
            self._replays = {arm: stack.enter_context(self._world(arm, 1)) for arm in alone}
            self._run()
            for world in (*self._replays.values(), *(self._worlds[arm] for arm in OURS if arm in self._worlds)):
                world.ask("close")

    @property
    def samples(self) -> int:
        return self.scenario.ranks * self.scenario.samples

    def _start(self, arm: str, stack: contextlib.ExitStack) -> None:
        progress(f"{self.scenario.name}: {arm} starts")
        if arm in OURS and self._address is None:
            self.missing[arm] = why_not_ours()
            return
        try:
            self._worlds[arm] = stack.enter_context(self._world(arm, self.scenario.ranks))
        except (RuntimeError, OSError) as error:
            self.missing[arm] = first_line(error)

    @contextlib.contextmanager
    def _world(self, arm: str, ranks: int) -> Iterator[World]:
        slots = self.samples if arm == "pulling" else self.scenario.ranks
        service = self._address if arm in OURS else None
        world = World(arm, maker(ARMS[arm], self.scenario.sleeps), ranks, slots, service=service,
                      pinned=not self.scenario.sleeps)
        try:
            world.ask("ready")
            yield world
        finally:
            world.close()

    def _run(self) -> None:
        for number in range(WARM_UPS):
            self._minibatch(-1, number)
        self._compare()
        self._verify()
        for round_ in range(self.flags.rounds):
            progress(f"{self.scenario.name}: round {round_ + 1} of {self.flags.rounds}")
            for figures in self.figures.values():
                figures.wall.append(0.0)
                figures.critical.append(0.0)
            self.tokens.append(0)
            for number in range(self.flags.minibatches):
                self._minibatch(round_, number)
        if self.scenario.sleeps:  # in one process it takes no time
            self._verify()

    def _minibatch(self, round_: int, number: int) -> None:
        """Through all arms. A negative round's times are not kept."""
        scenario, seed = self.scenario, ((self.flags.seed * 1000 + round_ + 1) * 1000 + number) * 10
        lengths = [EQUAL_LENGTH] * self.samples if scenario.equal else sample_lengths(self.samples, seed)
        speeds = rank_speeds(scenario.ranks, scenario.spread, self.flags.seed * 1000 + round_)
        seconds = [self._cost(length) * SECONDS_PER_COST if scenario.sleeps else 0.0 for length in lengths]
        plans = self._plans(lengths)
        at = WARM_UPS + round_ * self.flags.minibatches + number if round_ >= 0 else number
        works = {arm: Work(at, lengths, plan, seconds, speeds) for arm, plan in plans.items()}
        if scenario.sleeps or round_ < 0:
            self._works.append(works)
        arms = [arm for arm in ARMS if arm in self._worlds]
        for arm in arms[at % len(arms) :] + arms[: at % len(arms)]:  # none has the same neighbours always
            self._train(arm, works[arm], round_ >= 0)
        if round_ >= 0:
            self.tokens[-1] += sum(lengths)

    def _plans(self, lengths: list[int]) -> dict[str, Plan]:
        ranks = self.scenario.ranks
        mini = plan_mini(lengths, ranks, self._cost)
        return {"fsdp2 LB-Micro": plan_micro(lengths, ranks, self._cost), "fsdp2 LB-Mini": mini, "assigned": mini,
                "pulling": [[[sample]] for sample in pull_order(lengths)]}

    def _train(self, arm: str, work: Work, keep: bool) -> None:
        start = time.monotonic() + HEAD_START
        answers: list[Done] = self._worlds[arm].ask("train", work._replace(start=start))
        figures = self.figures[arm]
        figures.losses.append(sum(done.loss for done in answers))
        if not keep:
            return
        seconds = max(done.end for done in answers) - start
        own = [[part.own for part in done.parts] for done in answers]
        figures.wall[-1] += seconds
        figures.critical[-1] += (meeting_time if arm == RIVAL else free_time)(own)
        figures.idle += [1 - sum(of_rank) / seconds for of_rank in own]
        figures.last = [done._replace(parts=[part._replace(begin=part.begin - start, end=part.end - start)
                                             for part in done.parts], end=done.end - start) for done in answers]

    def _compare(self) -> None:
        """Losses of all arms, which begin with the same weights and train with the same samples."""
        right = self.figures[RIVAL].losses
        for arm in self._worlds:
            for number, (loss, limit) in enumerate(zip(self.figures[arm].losses, TOLERANCE)):
                if not abs(loss - right[number]) <= limit * right[number]:
                    sys.exit(f"imbalance_torch: {self.scenario.name}: {arm}: its loss at minibatch {number + 1} is "
                             f"{loss:.6f}, that of {RIVAL} {right[number]:.6f}")

    def _verify(self) -> None:
        """Weights and states of ours are, bit by bit, what one process makes of the same samples."""
        progress(f"{self.scenario.name}: in one process")
        for arm, world in self._replays.items():
            for works in self._works:
                work = works[arm]
                world.ask("train", work._replace(seconds=[0.0] * self.samples, speeds=[1.0]))
            ranks, alone = self._worlds[arm].ask("digest")[0], world.ask("digest")[0]
            if ranks != alone:
                sys.exit(f"imbalance_torch: {self.scenario.name}: {arm} has other bits in one process: "
                         f"{ranks}, {alone}")
        self._works.clear()

    def rows(self) -> Iterator[Row]:
        goals, figures = self.scenario.goals, self.figures
        for ours in OURS:
            yield self._row("wall", ours, RIVAL, lambda arm: figures[arm].wall, goals.get(ours))
        if self.scenario.ranks > 1:  # one rank has the same plan in both
            for ours in OURS:
                yield self._row("wall", ours, "fsdp2 LB-Mini", lambda arm: figures[arm].wall, None)
        for ours in OURS:
            yield self._row("critical path", ours, RIVAL, lambda arm: figures[arm].critical, goals.get(ours))

    def _row(self, what: str, ours: str, rival: str, of: Callable[[str], list[float]], goal: Optional[Goal]) -> Row:
        name = f"{self.scenario.name}: {what}, {ours}, against {rival}, ms"
        for arm in (ours, rival):
            if arm in self.missing:
                return Row(name, goal=goal, missing=f"{arm}: {self.missing[arm]}")
        return compare(name, of(ours), of(rival), 1e3 / self.flags.minibatches, goal)

    def note(self) -> str:
        lines = [f"{self.scenario.name}:  tokens/s, idle ranks (median), wall beyond the critical path"]
        for arm in self._worlds:
            figures = self.figures[arm]
            speed = statistics.median(tokens / wall for tokens, wall in zip(self.tokens, figures.wall))
            beyond = statistics.median(wall / path - 1 for wall, path in zip(figures.wall, figures.critical))
            lines.append(f"  {arm:15} {speed:8.0f}   {statistics.median(figures.idle):6.1%}   {beyond:6.1%}")
        return "\n".join(lines)


def maker(arm: type[Trainer], sleeps: bool) -> Callable[..., Trainer]:
    return lambda setup: arm(setup, sleeps)


def calibrated(ranks: int) -> Cost:
    """Of the GPT on this machine while all ranks compute: a s^2 + b s that is least wrong, relative."""
    world = World("calibration", maker(Trainer, False), ranks, pinned=True)
    try:
        found: list[tuple[int, float]] = []
        for turn in range(3):
            plan = [[[sample] for sample in range(len(CALIBRATED))]] * ranks
            answers = world.ask("train", Work(turn, list(CALIBRATED), plan, [0.0] * len(CALIBRATED), [1.0] * ranks))
            if turn:
                found += [(length, part.own) for done in answers for length, part in zip(CALIBRATED, done.parts)]
    finally:
        world.close()
    left = torch.tensor([[length**2 / own, length / own] for length, own in found], dtype=torch.float64)
    a, b = torch.linalg.lstsq(left, torch.ones(len(found), 1, dtype=torch.float64)).solution.flatten().tolist()
    return lambda tokens: max(a, 0.0) * tokens**2 + b * tokens


def progress(what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{what:79}\r", end="", file=sys.stderr, flush=True)


def run(flags: argparse.Namespace) -> None:
    flags.rounds = flags.rounds or (7 if flags.quick else 9)
    flags.minibatches = flags.minibatches or (1 if flags.quick else 3)
    report = Report("samples of unequal lengths with PyTorch")
    report.notes.append(f"{flags.rounds} rounds of {flags.minibatches} minibatches, seed {flags.seed}; at the start "
                        f"{machine_now()}")
    for scenario in SCENARIOS:
        if flags.only not in scenario.name or (flags.quick and not scenario.in_quick):
            continue
        measured = Measured(flags, scenario)
        report.rows += measured.rows()
        report.notes.append(measured.note())
        if flags.plots and scenario is SCENARIOS[0]:
            imbalance_plots.draw_timeline(flags.plots, {arm: figures.last for arm, figures in measured.figures.items()})
    report.notes.append("verified: ours learns the bits that one process learns, states included; losses of all agree")
    report.notes.append(f"at the end {machine_now()}; torch {torch.__version__}")
    report.publish(flags.json)
    if flags.plots:
        imbalance_plots.draw_rows(flags.plots, report)
