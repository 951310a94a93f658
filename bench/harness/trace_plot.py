#!/usr/bin/env python3
"""Draws a timeline that `shardctl trace` wrote: a band for each rank, a row for each of its threads.

  shardctl trace llama --steps 1 --output step.trace.json
  python3 bench/harness/trace_plot.py step.trace.json --output step.svg

https://ui.perfetto.dev opens the same file, with zoom and search. Needs matplotlib.
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

# By the event's category; what is drawn later lies above.
COLORS = {
    "wait for members": "0.85",
    "wait for lead": "0.85",
    "init": "C2",
    "norm": "C4",
    "step": "C0",
    "reduce_bucket": "C1",
    "gradients": "C1",
    "weights": "C2",
    "quantize": "C5",
    "digest": "C6",
    "range": "C9",
}
OTHER = "C7"


class Span(NamedTuple):
    """Milliseconds from the trace's beginning; `duration` 0: a moment."""

    row: int
    category: str
    begin: float
    duration: float


class Timeline(NamedTuple):
    rows: list[str]
    spans: list[Span]


def read(path: Path) -> Timeline:
    try:
        events = json.loads(path.read_text())["traceEvents"]
        names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
        found = [e for e in events if e["ph"] in "Xi"]
        keys = sorted({(e["pid"], e["tid"]) for e in found})
        row_of = {key: index for index, key in enumerate(keys)}
        spans = [Span(row_of[e["pid"], e["tid"]], e["cat"], e["ts"] / 1000, e.get("dur", 0) / 1000) for e in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"trace_plot: {path} is no trace of shardctl ({error!r})") from None
    if not spans:
        raise SystemExit(f"trace_plot: {path} has no spans; nothing to draw")
    order = list(COLORS)
    spans.sort(key=lambda s: (order.index(s.category) if s.category in COLORS else len(order), s.begin))
    return Timeline([f"{names.get(pid, pid)}, thread {tid}" for pid, tid in keys], spans)


def draw(timeline: Timeline, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("trace_plot: matplotlib is needed; pip install matplotlib") from None
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "trace", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 1.2 + 0.45 * len(timeline.rows)), layout="constrained")
    shown: set[str] = set()
    for span in timeline.spans:
        label = None if span.category in shown else span.category
        shown.add(span.category)
        color = COLORS.get(span.category, OTHER)
        if span.duration == 0:
            axes.plot(span.begin, span.row, "|", color="0.2", markersize=14, label=label)
            continue
        inner = span.category == "range"
        axes.barh(span.row, span.duration, 0.4 if inner else 0.8, span.begin, color=color, label=label, linewidth=0.3,
                  edgecolor="white")
    axes.set(xlabel="ms", yticks=range(len(timeline.rows)), yticklabels=timeline.rows)
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=6)
    pyplot.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="JSON", help="a file of shardctl trace")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="a picture (.svg, .png)")
    arguments = parser.parse_args()
    timeline = read(arguments.trace)
    draw(timeline, arguments.output)
    print(f"wrote {arguments.output}: {len(timeline.rows)} threads, {len(timeline.spans)} spans")


if __name__ == "__main__":
    main()
