#!/usr/bin/env python3
"""What a format costs in quality: one small language model, trained in each format of weights and optimizer states.

Trains on a text with shardmesh.numerics.Step (AdamW) in every format, from the same starts and on the same batches, and
prints the validation loss of each and its difference to fp32. A finished run is kept in a file and not repeated, as long
as the settings and shardmesh's compiled module are the same, so the program can be stopped and started again. First it
checks that fp32 trains as torch.optim.AdamW does.

Needs shardmesh, torch, and a text; matplotlib for --plot:
  apt-get install jargon-text
  python3 -m venv .cache/quality-venv && .cache/quality-venv/bin/pip install torch matplotlib '.[numerics]'
  .cache/quality-venv/bin/python bench/quality/quality.py
"""
from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import quality_report as report

try:
    import quality_run as training
    from shardmesh import _core
except ImportError as error:
    sys.exit(f"quality: {error}. What it needs:\n{__doc__}")

Formats = training.Formats
FORMATS = (
    *(Formats(weights, "fp32") for weights in ("fp32", "bf16", "bf16_sr", "bf16+8sr")),
    Formats("bf16_sr", "dyn8"), Formats("bf16_sr", "fp8x32"), Formats("bf16+8sr", "fp8x32"),
    training.TORCH,
)
JARGON = Path("/usr/share/doc/jargon-text/jargon.txt.gz")


@dataclass(frozen=True)
class Job:
    """One run, and the file that keeps its result."""

    formats: training.Formats
    seed: int
    folder: Path
    settings: dict[str, Any]

    @property
    def file(self) -> Path:
        return self.folder / f"{self.formats.weights}-{self.formats.states}-seed{self.seed}.json"

    def finished(self) -> report.Run | None:
        """What the file has; None where there is none, or one of other settings."""
        if not self.file.exists():
            return None
        kept = json.loads(self.file.read_text())
        return kept["run"] if kept["settings"] == self.settings else None

    def keep(self, result: training.Result) -> None:
        run = {**asdict(self.formats), "seed": self.seed, **asdict(result)}
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps({"settings": self.settings, "run": run}))
        os.replace(partial, self.file)


def main() -> None:
    options = parsed()
    content = text_of(options.text)
    settings = settings_of(content, options.steps, options.every, options.beta2)
    folder = options.folder / ("quick" if options.quick else f"full-{options.beta2}")
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [Job(formats, seed, folder, settings) for seed in range(options.seeds) for formats in FORMATS]
    missing = [job for job in jobs if job.finished() is None]
    if missing:
        training.check(content, options.beta2)
        missing.sort(key=lambda job: job.formats == training.TORCH)  # last: the least missed, if one stops early
        train_all(missing, content, options.processes)
    jobs.sort(key=lambda job: FORMATS.index(job.formats))
    runs = [run for job in jobs if (run := job.finished()) is not None]
    print(report.table(runs))
    if options.json:
        options.json.write_text(json.dumps(report.as_json(settings, runs), indent=1) + "\n")
    if options.plot:
        report.plot(runs, options.plot)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", type=Path, default=JARGON, help="the text to train on, plain or .gz; default: %(default)s")
    add("--steps", type=positive, default=2000, help="of each run; default: %(default)s")
    add("--every", type=positive, default=200, help="steps between validations; default: %(default)s")
    add("--beta2", type=float, default=0.95, help="how slowly second moments move; default: %(default)s")
    add("--seeds", type=positive, default=3, help="runs of each format; default: %(default)s")
    add("--processes", type=positive, default=2, help="runs side by side, a thread each; default: %(default)s")
    add("--quick", action="store_true", help="100 steps, one seed: does it work? Its losses mean nothing")
    add("--folder", type=Path, default=Path(".cache/quality"), help="keeps finished runs; default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="write settings, rows and every run")
    add("--plot", type=Path, metavar="FILE", help="draw the losses into FILE (.svg, .png)")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.every, options.seeds = 100, 50, 1
    return options


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def text_of(path: Path) -> bytes:
    if not path.exists():
        raise SystemExit(f"quality: there is no {path}; apt-get install jargon-text, or name a text with --text")
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def settings_of(content: bytes, steps: int, every: int, beta2: float) -> dict[str, Any]:
    """All that the result of a run depends on, besides its formats and its seed."""
    names = ("BATCH", "CONTEXT", "LAYERS", "WIDTH", "HEADS", "LR", "WEIGHT_DECAY", "WARMUP", "LAST_LR",
             "VALIDATION_SHARE", "VALIDATION_WINDOWS")
    return {"text_sha256": hashlib.sha256(content).hexdigest(),
            "core_sha256": hashlib.sha256(Path(_core.__file__).read_bytes()).hexdigest(), "steps": steps, "every": every,
            "betas": [training.BETA1, beta2], **{name.lower(): getattr(training, name) for name in names}}


def train_all(jobs: list[Job], content: bytes, processes: int) -> None:
    """Shows how far all of them are, until they are finished; raises what went wrong in one."""
    context = multiprocessing.get_context("spawn")
    steps = context.Value("q", 0)
    total = len(jobs) * jobs[0].settings["steps"]
    with ProcessPoolExecutor(processes, context, begin_process, (content, steps)) as pool:
        waiting = {pool.submit(train_one, job) for job in jobs}
        try:
            while waiting:
                finished, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                for each in finished:
                    each.result()
                show(steps.value, total)
        finally:
            pool.shutdown(cancel_futures=True)
    print(file=sys.stderr)


BEGUN = time.monotonic()


def show(done: int, total: int, width: int = 40) -> None:
    full, passed = width * done // total, time.monotonic() - BEGUN
    left = f"{passed * (total - done) / done / 60:.0f} min left" if done else ""
    print(f"\r[{'#' * full}{'.' * (width - full)}] {done}/{total} steps, {left}  ", end="", file=sys.stderr, flush=True)


class Process:
    """What a process of the pool was started with."""

    content: bytes
    steps: Any


def begin_process(content: bytes, steps: Any) -> None:
    Process.content, Process.steps = content, steps


def stepped() -> None:
    with Process.steps.get_lock():
        Process.steps.value += 1


def train_one(job: Job) -> None:
    settings = job.settings
    job.keep(training.run(Process.content, job.formats, job.seed, settings["betas"][1], settings["steps"],
                          settings["every"], stepped))


if __name__ == "__main__":
    main()
