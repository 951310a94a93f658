"""Pictures of bench/imbalance/imbalance_torch.py. They need matplotlib."""
from __future__ import annotations

import pathlib
from typing import Any

import plot
from imbalance_arms import Done
from report import Report


def draw_rows(folder: str, report: Report) -> None:
    """Ratios with their goals."""
    rows = [row.json() for row in report.rows if not row.missing]
    plot.draw(rows, pathlib.Path(folder, "imbalance_torch.svg"))


def draw_timeline(folder: str, of_arms: dict[str, list[Done]]) -> None:
    """One minibatch: each rank's microbatches, until it knows of the step."""
    pyplot = plot.pyplot_for("timeline")
    arms = {arm: ranks for arm, ranks in of_arms.items() if ranks}
    size = 8, 1.3 * len(arms)
    _, axes = pyplot.subplots(len(arms), 1, figsize=size, sharex=True, layout="constrained", squeeze=False)
    for of_arm, (arm, ranks) in zip(axes[:, 0], arms.items()):
        draw_arm(of_arm, arm, ranks)
    axes[-1, 0].set_xlabel("ms; a color is a microbatch, black what it takes without waiting, grey the rest until the step is done")
    pyplot.savefig(pathlib.Path(folder, "imbalance_timeline.svg"), metadata={"Date": None})


def draw_arm(axes: Any, arm: str, ranks: list[Done]) -> None:
    for rank, done in enumerate(ranks):
        axes.barh(rank, done.end * 1e3, 0.8, color="0.85")
        for index, part in enumerate(done.parts):
            axes.barh(rank, (part.end - part.begin) * 1e3, 0.6, left=part.begin * 1e3, color=f"C{index % 10}")
            axes.barh(rank, part.own * 1e3, 0.15, left=part.begin * 1e3, color="k")  # without waiting
    axes.set(title=arm, yticks=range(len(ranks)), yticklabels=[f"rank {rank}" for rank in range(len(ranks))])
    axes.title.set_fontsize(9)
