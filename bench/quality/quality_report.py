"""What the runs of bench/quality say together: a table, and a plot. Needs matplotlib for the plot alone."""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypedDict

BASE = ("fp32", "fp32")
NEAR = 0.005  # of the plot


class Run(TypedDict):
    """One finished run, as its file has it."""

    weights: str
    states: str
    seed: int
    parameters: int
    bytes: int
    losses: list[tuple[int, float]]


Curve = dict[int, float]  # losses by step
Runs = dict[tuple[str, str], dict[int, Run]]  # by formats and seed


@dataclass(frozen=True)
class Row:
    """Losses are of validation, after the last step, in nats per byte."""

    weights: str
    states: str
    bytes_per_parameter: float
    seeds: int
    mean: float
    spread: float  # standard deviation over the seeds
    difference: float  # to fp32 of the same seed, mean
    error: float  # standard error of that mean


def grouped(runs: Sequence[Run]) -> Runs:
    found: Runs = defaultdict(dict)
    for run in runs:
        found[run["weights"], run["states"]][run["seed"]] = run
    return found


def spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else math.nan


def final(run: Run) -> float:
    return run["losses"][-1][1]


def rows(runs: Sequence[Run]) -> list[Row]:
    """Of the formats whose seeds fp32 has too, in the order of `runs`."""
    by_formats = grouped(runs)
    base = by_formats[BASE]
    return [row(of_seed, base) for of_seed in by_formats.values() if of_seed and of_seed.keys() <= base.keys()]


def row(of_seed: dict[int, Run], base: dict[int, Run]) -> Row:
    losses = [final(run) for run in of_seed.values()]
    apart = [final(run) - final(base[seed]) for seed, run in of_seed.items()]
    any_run = next(iter(of_seed.values()))
    return Row(any_run["weights"], any_run["states"], any_run["bytes"] / any_run["parameters"], len(losses),
               fmean(losses), spread(losses), fmean(apart), spread(apart) / math.sqrt(len(apart)))


def table(runs: Sequence[Run]) -> str:
    """In Markdown."""
    columns = ("weights", "states", "bytes per parameter", "validation loss", "spread",
               "difference to fp32", "its error")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for each in rows(runs):
        own = (each.weights, each.states) == BASE
        apart = "| |" if own else f"{each.difference:+.5f} | {number(each.error, 5)} |"
        lines.append(f"| {each.weights} | {each.states} | {each.bytes_per_parameter:.2f} | {each.mean:.4f} | "
                     f"{number(each.spread, 4)} | {apart}")
    return "\n".join(lines)


def number(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def as_json(settings: dict[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    """Numbers of a single seed that need several are null."""
    clean = [{name: None if value != value else value for name, value in asdict(each).items()} for each in rows(runs)]
    return {"settings": settings, "rows": clean, "runs": list(runs)}


def plot(runs: Sequence[Run], path: Path) -> None:
    """The losses, how far each is from fp32, and the same near 0: means over the seeds, with standard errors."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("quality: the plot needs matplotlib; pip install matplotlib") from None
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "quality", "font.size": 9})
    from matplotlib import pyplot

    figure, (losses, apart, near) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    by_formats = grouped(runs)
    for index, (formats, of_seed) in enumerate(by_formats.items()):
        style = {"label": ", ".join(formats), "color": f"C{index}", "linewidth": 1.2}
        draw(losses, [curve(run) for run in of_seed.values()], style)
        if formats != BASE:
            paired = [minus(curve(run), curve(by_formats[BASE][seed])) for seed, run in of_seed.items()]
            draw(apart, paired, style)
            draw(near, paired, style)
    losses.set(title="validation loss, nats per byte")
    losses.legend(title="weights, states", fontsize=8)
    apart.set(title="difference to weights fp32, states fp32")
    near.set(title="the same, near 0", ylim=(-NEAR, NEAR))
    for axes in losses, apart, near:
        axes.set_xlabel("steps")
        axes.grid(alpha=0.3)
    pyplot.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw(axes: Any, curves: list[Curve], style: dict[str, Any]) -> None:
    by_step = [[values[step] for values in curves] for step in curves[0]]
    errors = [spread(values) / math.sqrt(len(values)) for values in by_step]
    axes.errorbar(list(curves[0]), [fmean(values) for values in by_step], errors, capsize=2, **style)


def minus(curve: Curve, base: Curve) -> Curve:
    return {step: loss - base[step] for step, loss in curve.items()}


def curve(run: Run) -> Curve:
    """Without the start, whose loss would hide all others."""
    return {step: loss for step, loss in run["losses"] if step > 0}
