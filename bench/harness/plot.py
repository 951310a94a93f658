#!/usr/bin/env python3
"""Draws the rows that benchmarks wrote with --json.

Time against the memory bound, for the rows named "..., times its (memory) bound, ms": what was measured, and what
moving the same bytes would take at the speed of memory in the same run. Beside it every other ratio with its goal,
from the smallest to the largest round.

  bazel run -c opt //bench:step -- --json $PWD/.cache/step.json
  python3 bench/harness/plot.py .cache/step.json --output docs/step.svg

Needs matplotlib.
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple, Sequence

BOUNDS = ", times its memory bound, ms", ", times its bound, ms"


class Bar(NamedTuple):
    """Milliseconds, and those of the bound."""

    name: str
    ours: float
    bound: float


class Dot(NamedTuple):
    """A ratio; goal and whether more is better are None where there is no goal."""

    name: str
    ratio: float
    least: float
    most: float
    goal: float | None
    more_is_better: bool | None


def bars(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    return [
        Bar(row["name"].rsplit(", times its", 1)[0], row["ours"], row["rival"])
        for row in rows
        if row["name"].endswith(BOUNDS) and row["ours"] is not None
    ]


def dots(rows: Sequence[dict[str, Any]]) -> list[Dot]:
    found = []
    for row in rows:
        if row["name"].endswith(BOUNDS) or row["ratio"] is None:
            continue
        sign, value = (row["goal"] or " ").split(" ", 1)
        goal, more = (float(value), sign == ">=") if row["goal"] else (None, None)
        found.append(Dot(row["name"], row["ratio"], row["min"], row["max"], goal, more))
    return found


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    rows = []
    for path in paths:
        try:
            of_file = json.loads(path.read_text())
            rows += [{key: row[key] for key in ("name", "ours", "rival", "ratio", "min", "max", "goal")} for row in of_file]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"plot: {path} holds no rows of a benchmark ({error!r}); write it with --json") from None
    return rows


def pyplot_for(salt: str) -> Any:
    """Of matplotlib, for files alone. `salt`: pictures of the same figures are the same file. SystemExit: there is none."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plot: matplotlib is needed; pip install matplotlib") from None
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 9})
    from matplotlib import pyplot

    return pyplot


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    pyplot = pyplot_for("plot")
    panels = [(drawing, found) for drawing, found in ((draw_bars, bars(rows)), (draw_dots, dots(rows))) if found]
    height = 1.2 + 0.4 * max(len(found) for _, found in panels)
    figure, axes = pyplot.subplots(1, len(panels), figsize=(7 * len(panels), height), layout="constrained", squeeze=False)
    for (drawing, found), of_panel in zip(panels, axes[0]):
        drawing(of_panel, found)
    pyplot.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_bars(axes: Any, found: Sequence[Bar]) -> None:
    for index, bar in enumerate(found):
        axes.barh(index - 0.18, bar.ours, 0.34, color="C0", label="measured" if index == 0 else None)
        axes.barh(index + 0.18, bar.bound, 0.34, color="0.7", label="memory bound" if index == 0 else None)
        axes.text(bar.ours, index - 0.18, f" {bar.ours / bar.bound:.2f}x", va="center")
    axes.set(title="time against the memory bound, ms", yticks=range(len(found)), yticklabels=[bar.name for bar in found])
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.legend()


def draw_dots(axes: Any, found: Sequence[Dot]) -> None:
    for index, dot in enumerate(found):
        axes.plot([dot.least, dot.most], [index, index], color="C0", linewidth=1.5)
        axes.plot(dot.ratio, index, "o", color="C0")
        if dot.goal is not None:
            axes.plot(dot.goal, index, ">" if dot.more_is_better else "<", color="C3")
    wide = max(dot.most for dot in found) > 3 * min(dot.least for dot in found)
    axes.set(title="ratio (median, range); red: goal", xscale="log" if wide else "linear")
    axes.set(yticks=range(len(found)), yticklabels=[dot.name for dot in found])
    axes.axvline(1, color="0.8", linewidth=1, zorder=0)
    axes.grid(axis="x", which="both", alpha=0.3)
    axes.invert_yaxis()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+", metavar="JSON", help="files that benchmarks wrote with --json")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="a picture (.svg, .png)")
    arguments = parser.parse_args()
    rows = read(arguments.rows)
    if not bars(rows) and not dots(rows):
        raise SystemExit("plot: no row has figures; nothing to draw")
    draw(rows, arguments.output)
    print(f"wrote {arguments.output}: {len(bars(rows))} times, {len(dots(rows))} ratios")


if __name__ == "__main__":
    main()
