#!/usr/bin/env python3
"""Trains a GPT of about 10 million parameters on Shakespeare with shardmesh.torch, twice, and again under FSDP2.

Two ranks of one thread each, torch.compile in all runs, the same model, batches and steps:
  1. shardmesh.torch.Optimizer with weights stored as bf16_sr, 8-bit states (dyn8), and the matrices of the
     blocks gathered in fp8. Beside it a follower prints text that the newest weights write, every 100 steps
  2. shardmesh.torch.Optimizer in fp32
  3. FSDP2 over gloo, fused AdamW in fp32
Then a table: losses, tokens per second, memory of all processes together (proportional set size: what several share
counts once), after compiling. Compare like with like: 2 with 3, which both compute in fp32, and 1 with 2, which
differ in formats alone. The held-out losses of each of these pairs must be at most --apart from each other.

Example: ./demo torch --steps 300 --plots .cache
"""
from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple, Optional

from process_memory import held_bytes, tree
from service import Service, end_with_parent

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parents[1] / "python/shardmesh"
RANKS = 2
SETTLED = 10  # steps, after which speed and memory are measured
FP32 = {"weights": "fp32", "states": "fp32", "gather": "stored"}
SPREAD = (
    "One run says little of a format: held-out losses of runs that differ in their seed alone have a standard\n"
    "deviation of 0.06 (10m, 300 steps, fp32, 4 seeds). Formats over several seeds: docs/quality.md"
)
LAST = 20  # steps of which the training loss is the mean
LOG_LINES = 20  # printed of a run that ended badly
MIB = 1 << 20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./demo torch", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--bin-dir", default=HERE.parents[1] / "bazel-bin", help="where the built programs are (default: %(default)s)")
    add("--size", default="10m", help="tiny, 10m, 30m (default: %(default)s)")
    add("--steps", type=int, default=300, help="of each run (default: %(default)s)")
    add("--quick", action="store_true", help="a tiny model, 60 steps")
    add("--weights", default="bf16_sr", help="(default: %(default)s)")
    add("--states", default="dyn8", help="(default: %(default)s)")
    add("--gather", default="fp8_tensor", help="(default: %(default)s)")
    add("--residency", default="full", choices=["full", "bucket"], help="(default: %(default)s)")
    add("--every", type=int, default=100, help="steps between two texts of the follower (default: %(default)s)")
    add("--apart", type=float, default=0.2, help="held-out losses may be (default: %(default)s)")
    add("--timeout", type=float, default=900, help="seconds that a run may take (default: %(default)s)")
    add("--only", choices=["low-bit", "fp32", "fsdp2"], help="one of the runs alone")
    add("--json", metavar="FILE", help="write the table's rows to this file, too")
    add("--plots", type=pathlib.Path, metavar="DIR", help="draw losses, time and memory into DIR/gpt.svg")
    flags = parser.parse_args()
    if flags.quick:
        flags.size, flags.steps, flags.every = "tiny", 60, 20
    return flags


class Failure(Exception):
    """Something the demo promises did not hold; the text says what."""


class Result(NamedTuple):
    name: str
    formats: str  # of weights, states, gathered weights
    losses: list[float]  # the mean over the ranks, step by step
    times: list[float]  # seconds from the first step's end to each step's
    held_out: float
    tokens_per_second: float
    step_ms: float
    first_step: float  # seconds: what compiling takes, mostly
    memory: int


class Run:
    """One training by torchrun, until it ends: `result` has what it recorded."""

    def __init__(self, flags: argparse.Namespace, scratch: pathlib.Path, name: str, script: str, *options: Any,
                 also: tuple[int, ...] = ()) -> None:
        """`also`: processes that work for it."""
        self.flags, self.name, self._also = flags, name, also
        self.folder = scratch / name
        self.folder.mkdir()
        self._log = self.folder / "log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS,
                   HERE / script, "--compile", *common(flags), "--record", self.folder, *options]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=environment(scratch),
                                             preexec_fn=end_with_parent)
        self._memory: list[int] = []

    def events(self) -> list[list[dict[str, Any]]]:
        """Of each rank, as far as they are written."""
        files = [self.folder / f"rank-{rank}.jsonl" for rank in range(RANKS)]
        texts = [file.read_text(encoding="utf-8") if file.exists() else "" for file in files]
        return [[json.loads(line) for line in text.splitlines(True) if line.endswith("\n")] for text in texts]

    def step(self) -> int:
        return min(len(events) for events in self.events())

    def watch(self) -> None:
        """Until it has ended. Failure: it ended badly, or takes too long."""
        deadline = time.monotonic() + self.flags.timeout
        while True:
            code = self._process.poll()
            if code == 0:
                break
            if code is not None or time.monotonic() > deadline:
                self.stop()
                said = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
                why = f"ended with {code}" if code is not None else f"took more than {self.flags.timeout:g} s"
                raise Failure("\n  ".join([f"the run of {self.name} {why}; it said last:", *said]))
            self._look()
            time.sleep(0.5)
        show("")

    def _look(self) -> None:
        step = self.step()
        if SETTLED <= step <= self.flags.steps:
            self._memory.append(held_bytes([*tree([self._process.pid]), *self._also], ("Pss:",)))
        losses = [events[step - 1]["losses"] for events in self.events() if 0 < step <= self.flags.steps]
        loss = f"loss {statistics.mean(sum(losses, [])):.3f}" if losses else "compiling"
        show(f"{self.name}: step {step}/{self.flags.steps}  {loss}")

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def result(self, formats: Iterable[str]) -> Result:
        ranks = self.events()
        steps = [[event for event in events if event["event"] == "step"] for events in ranks]
        if any([event["step"] for event in events] != list(range(1, self.flags.steps + 1)) for events in steps):
            made = [len(events) for events in steps]
            raise Failure(f"{self.name}: the ranks made {made} steps, not each of {self.flags.steps} once")
        losses = [statistics.mean(sum((event["losses"] for event in same), [])) for same in zip(*steps)]
        seconds = [max(event["seconds"] for event in same) for same in zip(*steps)]
        times = [sum(seconds[1 : n + 1]) for n in range(len(seconds))]
        usual = statistics.median(seconds[SETTLED:])
        held_out = statistics.mean(events[-1]["held_out"] for events in ranks)
        return Result(self.name, ", ".join(formats), losses, times, held_out, ranks[0][0]["tokens"] / usual,
                      usual * 1e3, seconds[0], max(self._memory, default=0))


def common(flags: argparse.Namespace) -> list[Any]:
    return ["--size", flags.size, "--steps", flags.steps]


def environment(scratch: pathlib.Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": str(scratch / "package"),
            "PYTHONDONTWRITEBYTECODE": "1"}


def lay_out_package(bin_dir: pathlib.Path, scratch: pathlib.Path) -> None:
    """shardmesh as Python finds it: the sources, and the extension modules that were built."""
    folder = scratch / "package/shardmesh"
    folder.mkdir(parents=True)
    for found in [*PACKAGE.iterdir(), *(bin_dir / "python/shardmesh").glob("_*.so")]:
        if found.name != "__pycache__":
            (folder / found.name).symlink_to(found.resolve())


def show(line: str) -> None:
    """A line that the next one replaces, where that is possible."""
    if sys.stdout.isatty():
        print(f"\r{line:79}\r", end="", flush=True)


class Follower:
    """Prints what train.py --follow writes."""

    def __init__(self, flags: argparse.Namespace, scratch: pathlib.Path, options: list[Any]) -> None:
        command = [sys.executable, HERE / "train.py", "--follow", "--every", flags.every, *common(flags), *options]
        self._errors = open(scratch / "follower", "w+", encoding="utf-8")
        self._process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=self._errors,
                                         text=True, env=environment(scratch), preexec_fn=end_with_parent)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.texts = 0

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.texts += line.startswith("--- step ")
            show("")
            print("  " + line, end="", flush=True)

    def end(self) -> None:
        """Failure: it ended badly, or not within a minute."""
        try:
            code: Optional[int] = self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            code = None
        self._thread.join(timeout=10)
        self._errors.seek(0)
        said = self._errors.read().splitlines()[-LOG_LINES:]
        self._errors.close()
        if code != 0:
            raise Failure("\n  ".join([f"the follower ended with {code}; it said last:", *said]))


def with_shardmesh(flags: argparse.Namespace, scratch: pathlib.Path, name: str, formats: dict[str, str],
                   follows: bool) -> Result:
    with Service(flags.bin_dir, RANKS, scratch / f"service of {name}") as service:
        job = ["--service", service.address, "--job", "gpt"]
        options = [f"--{option}={format}" for option, format in formats.items()]
        options += ["--every", str(flags.every), f"--residency={flags.residency}"]
        run = Run(flags, scratch, name, "train.py", *job, *options, also=tuple(tree([service.pid])))
        follower = Follower(flags, scratch, job) if follows else None
        try:
            run.watch()
        finally:
            run.stop()
        if follower is not None:
            follower.end()
            if flags.steps >= flags.every and not follower.texts:
                raise Failure("the follower wrote no text")
        return run.result(formats.values())


def in_low_bits(flags: argparse.Namespace, scratch: pathlib.Path) -> Result:
    formats = {option: getattr(flags, option) for option in FP32}
    return with_shardmesh(flags, scratch, "shardmesh, low bits", formats, follows=True)


def in_fp32(flags: argparse.Namespace, scratch: pathlib.Path) -> Result:
    return with_shardmesh(flags, scratch, "shardmesh, fp32", FP32, follows=False)


def with_fsdp2(flags: argparse.Namespace, scratch: pathlib.Path) -> Result:
    run = Run(flags, scratch, "FSDP2, fp32", "train_fsdp2.py")
    try:
        run.watch()
    finally:
        run.stop()
    return run.result(FP32.values())


def table(results: list[Result]) -> str:
    lines = [("", [result.name for result in results]),
             ("weights, states, gathered as", [result.formats for result in results]),
             (f"training loss, the last {LAST} steps",
              [f"{statistics.mean(result.losses[-LAST:]):.3f}" for result in results]),
             ("held-out loss", [f"{result.held_out:.3f}" for result in results]),
             ("tokens per second", [f"{result.tokens_per_second:.0f}" for result in results]),
             ("a step, ms (median)", [f"{result.step_ms:.0f}" for result in results]),
             ("the first step, which compiles, s", [f"{result.first_step:.0f}" for result in results]),
             ("memory of all processes, MiB", [f"{result.memory / MIB:.0f}" for result in results])]
    first = max(len(name) for name, _ in lines)
    width = max(len(cell) for _, cells in lines for cell in cells)
    return "\n".join((f"{name:{first}}" + "".join(f"  {cell:>{width}}" for cell in cells)) for name, cells in lines)


def draw(results: list[Result], folder: pathlib.Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is missing")
        return
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gpt", "font.size": 9})
    from matplotlib import pyplot

    figure, (by_step, by_time, step, memory) = pyplot.subplots(1, 4, figsize=(14, 3.6), layout="constrained",
                                                               width_ratios=[3, 3, 1, 1])
    for result in results:
        by_step.plot(result.losses, label=result.name, linewidth=1)
        by_time.plot(result.times, result.losses, label=result.name, linewidth=1)
    by_step.set(title="training loss", xlabel="step")
    by_step.legend()
    by_time.set(title="training loss", xlabel="seconds after the first step")
    names, colors = [result.name for result in results], [f"C{index}" for index in range(len(results))]
    step.bar(names, [result.step_ms for result in results], color=colors)
    step.set(title="a step, ms")
    memory.bar(names, [result.memory / MIB for result in results], color=colors)
    memory.set(title="memory, MiB")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "gpt.svg", metadata={"Date": None})
    print(f"wrote {folder / 'gpt.svg'}")


def report(results: list[Result], flags: argparse.Namespace) -> None:
    """Failure: a claim does not hold."""
    print(table(results))
    print(SPREAD)
    if flags.json:
        with open(flags.json, "w", encoding="utf-8") as file:
            json.dump([result._asdict() for result in results], file, indent=2)
    if flags.plots:
        draw(results, flags.plots)
    for one, other in zip(results, results[1:]):
        apart = abs(one.held_out - other.held_out)
        if apart > flags.apart:
            raise Failure(f"the held-out losses of {one.name} and {other.name} are {apart:.3f} from each other; at "
                          f"most {flags.apart:g} are promised")


def main() -> None:
    flags = parse_arguments()
    flags.bin_dir = pathlib.Path(flags.bin_dir).resolve()
    runs = {"low-bit": in_low_bits, "fp32": in_fp32, "fsdp2": with_fsdp2}
    try:
        with tempfile.TemporaryDirectory(prefix="shardmesh-gpt-") as folder:
            scratch = pathlib.Path(folder)
            lay_out_package(flags.bin_dir, scratch)
            report([run(flags, scratch) for name, run in runs.items() if flags.only in (None, name)], flags)
    except (Failure, RuntimeError, OSError) as failure:
        sys.exit(f"demo: {failure}")


if __name__ == "__main__":
    main()
