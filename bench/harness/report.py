"""Rows of benchmarks that are written in Python: what harness.h is to the others. No more than the standard library.

A row's figure is the median of the rounds' ratios: every round measures all contestants, one after the other.

  report = Report("copying")
  report.add(compare("copy of 1 GiB, ms", ours, theirs, 1e3, at_least(2)))   # lists of seconds, one of each round
  report.publish("rows.json")
"""
from __future__ import annotations

import json
import os
import statistics
from typing import Any, NamedTuple, Optional, Sequence


class Goal(NamedTuple):
    sign: str  # ">=" or "<="
    value: float

    def met_by(self, ratio: float) -> bool:
        return ratio >= self.value if self.sign == ">=" else ratio <= self.value

    def __str__(self) -> str:
        return f"{self.sign} {self.value:g}"


def at_least(value: float) -> Goal:
    return Goal(">=", value)


def at_most(value: float) -> Goal:
    return Goal("<=", value)


class Row(NamedTuple):
    name: str  # says the unit of `ours` and `rival`
    ours: float = 0
    rival: float = 0
    ratios: Sequence[float] = ()
    goal: Optional[Goal] = None
    missing: str = ""  # why there are no figures; empty: they are there

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def met(self) -> bool:
        return self.goal is None or self.goal.met_by(self.ratio)

    def json(self) -> dict[str, Any]:
        goal = str(self.goal) if self.goal else None
        if self.missing:
            nothing = dict.fromkeys(("ours", "rival", "ratio", "min", "max"))
            return {"name": self.name, **nothing, "goal": goal, "met": None, "missing": self.missing}
        return {"name": self.name, "ours": self.ours, "rival": self.rival, "ratio": self.ratio, "min": min(self.ratios),
                "max": max(self.ratios), "goal": goal, "met": self.met()}


def compare(name: str, ours: Sequence[float], rival: Sequence[float], scale: float, goal: Optional[Goal] = None) -> Row:
    """rival / ours: how many times less ours is. The same number of rounds, not zero."""
    return _row(name, ours, rival, [theirs / mine for mine, theirs in zip(ours, rival)], scale, goal)


def cost(name: str, ours: Sequence[float], other: Sequence[float], scale: float, goal: Optional[Goal] = None) -> Row:
    """ours / other: how much more ours costs."""
    return _row(name, ours, other, [mine / theirs for mine, theirs in zip(ours, other)], scale, goal)


def _row(name: str, ours: Sequence[float], rival: Sequence[float], ratios: list[float], scale: float,
         goal: Optional[Goal]) -> Row:
    return Row(name, statistics.median(ours) * scale, statistics.median(rival) * scale, ratios, goal)


class Report:
    def __init__(self, title: str) -> None:
        self._title = title
        self.rows: list[Row] = []
        self.notes: list[str] = []  # printed below the table

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def text(self) -> str:
        width = max((len(row.name) for row in self.rows), default=0)
        head = f"{'':{width}}  {'ours':>9}  {'other':>9}  {'ratio':>7}  {'min - max':>15}  {'goal':>7}  met"
        lines = [self._title, head]
        for row in self.rows:
            if row.missing:
                lines.append(f"{row.name:{width}}  not measured: {row.missing}")
                continue
            met = "" if row.goal is None else "yes" if row.met() else "NO"
            spread = f"{min(row.ratios):6.2f} - {max(row.ratios):6.2f}"
            lines.append(f"{row.name:{width}}  {row.ours:9.2f}  {row.rival:9.2f}  {row.ratio:7.2f}  {spread}  "
                         f"{str(row.goal or ''):>7}  {met}".rstrip())
        return "\n".join(lines + self.notes)

    def publish(self, path: Optional[str] = None) -> None:
        """Prints it, and writes its rows to `path`, if there is one."""
        print(self.text(), flush=True)
        if path:
            with open(path, "w", encoding="utf-8") as file:
                json.dump([row.json() for row in self.rows], file, indent=2)
                file.write("\n")


def machine_now() -> str:
    return f"{os.cpu_count()} cores, load {' '.join(f'{load:.2f}' for load in os.getloadavg())}"
