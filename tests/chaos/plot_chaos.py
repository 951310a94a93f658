#!/usr/bin/env python3
"""Draws what step_test or hosts_test wrote: when what was killed, stopped or cut, and how long each job's training paused.

  bazel test //tests/chaos:step_test --nocache_test_results
  unzip -o bazel-testlogs/tests/chaos/step_test/test.outputs/outputs.zip -d /tmp
  python3 tests/chaos/plot_chaos.py /tmp/chaos.jsonl --output docs/chaos.svg

Needs matplotlib.
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple, Sequence

COLORS = {
    "worker killed": "C0",
    "two workers killed": "C3",
    "worker stopped": "C7",
    "coordinator killed": "C2",
    "worker, coordinator killed": "C1",
    "node killed": "C4",
}


class Mark(NamedTuple):
    """Seconds; `stop` 0: it was killed."""

    who: str
    kind: str
    at: float
    stop: float


class Pause(NamedTuple):
    """Of a job's training, in an event: seconds from one step to the next."""

    mesh: str
    kind: str
    at: float
    length: float


def read(path: Path) -> list[dict[str, Any]]:
    try:
        events = [json.loads(line) for line in path.read_text().splitlines()]
        marks(events), pauses(events)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"plot_chaos: {path} holds no events of step_test or hosts_test ({error!r})") from None
    if not events:
        raise SystemExit(f"plot_chaos: {path} has no event; nothing to draw")
    return events


def marks(events: Sequence[dict[str, Any]]) -> list[Mark]:
    """One for each process that an event met."""
    found = []
    for event in events:
        who = event["workers"] + [name for name in ("coordinator", "node") if name in event["kind"]]
        found += [Mark(name, event["kind"], event["at_ms"] / 1000, event["stop_ms"] / 1000) for name in who]
    return found


def pauses(events: Sequence[dict[str, Any]]) -> list[Pause]:
    return [
        Pause(job["mesh"], event["kind"], job["at_ms"] / 1000, job["pause_ms"] / 1000)
        for event in events
        for job in event["jobs"]
    ]


def colors(kinds: Sequence[str]) -> dict[str, Any]:
    """Of kinds of events; those that COLORS does not name have one each of a palette of twenty."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgb

    taken = {to_rgb(COLORS[kind]) for kind in kinds if kind in COLORS}
    palette = [color for color in colormaps["tab20"].colors if color not in taken]
    others = sorted(set(kinds) - set(COLORS))
    return {**COLORS, **{kind: palette[i % len(palette)] for i, kind in enumerate(others)}}


def draw(events: Sequence[dict[str, Any]], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plot_chaos: matplotlib is needed; pip install matplotlib") from None
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "chaos", "font.size": 9})
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(11, 5.5), sharex=True, layout="constrained")
    of_kind = colors([event["kind"] for event in events])
    draw_timeline(above, marks(events), pauses(events), of_kind)
    draw_lengths(below, pauses(events), of_kind)
    figure.legend(*below.get_legend_handles_labels(), loc="outside upper center", ncols=6)
    pyplot.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_timeline(axes: Any, found: Sequence[Mark], of_jobs: Sequence[Pause], color_of: dict[str, Any]) -> None:
    rows = sorted({mark.who for mark in found}) + sorted({f"job {pause.mesh}" for pause in of_jobs})
    for mark in found:
        color = color_of[mark.kind]
        if mark.stop > 0:
            axes.barh(rows.index(mark.who), mark.stop, 0.6, mark.at, color=color)
        else:
            axes.plot(mark.at, rows.index(mark.who), "x", color=color, markersize=5)
    for pause in of_jobs:
        axes.barh(rows.index(f"job {pause.mesh}"), pause.length, 0.6, pause.at, color=color_of[pause.kind])
    axes.set(title="x: killed; bar of a worker or host: stopped or cut off; bar of a job: no step", yticks=range(len(rows)), yticklabels=rows)
    axes.invert_yaxis()


def draw_lengths(axes: Any, of_jobs: Sequence[Pause], color_of: dict[str, Any]) -> None:
    for kind in sorted({pause.kind for pause in of_jobs}):
        of_kind = [pause for pause in of_jobs if pause.kind == kind]
        axes.plot([p.at for p in of_kind], [p.length * 1000 for p in of_kind], ".", color=color_of[kind], label=kind)
    axes.set(xlabel="s", ylabel="longest time without a step, ms", yscale="log")
    axes.grid(axis="y", alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events", type=Path, metavar="JSONL", help="chaos.jsonl of step_test or hosts_test")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="a picture (.svg, .png)")
    arguments = parser.parse_args()
    events = read(arguments.events)
    draw(events, arguments.output)
    print(f"wrote {arguments.output}: {len(events)} events")


if __name__ == "__main__":
    main()
