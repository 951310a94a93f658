#!/usr/bin/env python3
"""Trains handwritten digits through shardmesh, kills the coordinator and a worker on the way, and compares meshes.

One coordinator, and four workers under one shardmesh-node, which keeps their memory. The job runs five times, always
with the same seed, slots and steps:
  1. on a 2x2 mesh (ddp, fsdp) with two attached trainers, one of which has `_orig_mod.` before every name; a reader
     follows the published versions and scores the held-out digits; the coordinator is killed with -9 and started again;
     then a checkpoint is saved, while it trains; later a worker is killed with -9: shardmesh-node starts it again, and
     it goes on where it was
  2. on one worker, one trainer through gRPC (Push and Pull)
  3. on a 4x1 mesh (ddp=4, fsdp=1), two attached trainers
  4. on the 2x2 mesh once more, undisturbed
  5. from the checkpoint of the first run to the end, on three workers
Then a table: accuracy, steps per second, bytes gathered (by the worker that was killed: since then), digest of weights
and optimizer state. The digests must be one value, the accuracy at least --accuracy, and every trainer must have made
every step of its run, once.

Example: ./demo --steps 600
"""
import argparse
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

try:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError:
    sys.exit("demo.py: the package python3-rich is missing; ./demo installs it")

SLOTS = 4
WORKERS = 4
VICTIM = "w-1"  # the worker that is killed
LOG_LINES = 15  # printed of a process that ended badly
HERE = pathlib.Path(__file__).resolve().parent


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin-dir", default=HERE.parents[1] / "bazel-bin",
                        help="where the built programs are (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1500, help="steps of each run (default: %(default)s)")
    parser.add_argument("--accuracy", type=float, default=0.96, help="held-out accuracy to reach (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that one step may take (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the table's rows to this file, too")
    parser.add_argument("--keep-logs", metavar="DIR", help="keep the logs of all processes in a new folder below this one")
    return parser.parse_args()


class Failure(Exception):
    """Something the demo promises did not hold; the text says what."""


class Events:
    """Reads one process's JSON lines in a thread; keeps the newest event of each kind."""

    def __init__(self, process, on_event=None):
        self.latest, self.count = {}, {}
        self._lock = threading.Lock()
        self._on_event = on_event
        self._thread = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._thread.start()

    def _read(self, stream):
        for line in stream:
            event = json.loads(line)
            with self._lock:
                self.latest[event["event"]] = event
                self.count[event["event"]] = self.count.get(event["event"], 0) + 1
            if self._on_event:
                self._on_event(event)

    def get(self, kind):
        with self._lock:
            return self.latest.get(kind)

    def join(self):
        self._thread.join(timeout=30)


class Cluster:
    """The coordinator and the workers, with their files in a folder of their own."""

    def __init__(self, bin_dir, folder):
        self.bin, self.folder = pathlib.Path(bin_dir), pathlib.Path(folder)
        self.processes, self.logs, self.coordinator, self.address = [], {}, None, "127.0.0.1:0"

    def program(self, name):
        path = self.bin / {"shardmesh-coordinator": "server", "shardmesh-node": "worker", "shardctl": "client/cli",
                           "digits_trainer": "examples/digits", "digits_reader": "examples/digits"}[name] / name
        if not path.exists():
            raise Failure(f"{path} is missing; build it with ./demo")
        return str(path)

    def spawn(self, name, *arguments, log, prefix=(), **options):
        """prefix: words of the command before the program."""
        path = self.folder / f"{log}.log"
        command = [*prefix, self.program(name), *map(str, arguments)]
        with open(path, "a", encoding="utf-8") as stderr:
            process = subprocess.Popen(command, text=True, stderr=stderr, **options)
        self.processes.append(process)
        self.logs[process.pid] = path
        return process

    def ended_badly(self, process, who):
        """The Failure that says so, with the end of the process's log."""
        lines = self.logs[process.pid].read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        return Failure("\n  ".join([f"{who} ended with {process.returncode}; its log ends:", *lines]))

    def start_coordinator(self):
        address_file = self.folder / "address"
        address_file.unlink(missing_ok=True)
        self.coordinator = self.spawn("shardmesh-coordinator", "--listen", self.address, "--state", self.folder / "state.db",
                                      "--address-file", address_file, log="coordinator")
        self.await_file(address_file, self.coordinator, "coordinator")
        self.address = address_file.read_text(encoding="utf-8").strip()

    def start_workers(self):
        """w-0, w-1, ...: children of a shardmesh-node, which holds their memory and starts again what is killed."""
        node = self.spawn("shardmesh-node", "--coordinator", self.address, "--workers", WORKERS, "--name", "w",
                          "--local-dir", self.folder / "local", "--address-dir", self.folder / "workers",
                          "--log-dir", self.folder, "--stop-grace", 5, log="node")
        for i in range(WORKERS):
            self.await_file(self.folder / "workers" / f"w-{i}", node, f"shardmesh-node, or worker w-{i},")

    def worker_pid(self, name):
        return next(worker["pid"] for worker in self.shardctl("status") if worker["worker"] == name)

    def await_file(self, path, process, who):
        deadline = time.monotonic() + 60
        while not path.exists():
            if process.poll() is not None:
                raise self.ended_badly(process, f"the {who}")
            if time.monotonic() > deadline:
                raise Failure(f"the {who} did not start within 60 s")
            time.sleep(0.02)

    def shardctl(self, *arguments):
        done = subprocess.run([self.program("shardctl"), *map(str, arguments), "--coordinator", self.address, "--json"],
                              capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            raise Failure(f"shardctl {' '.join(map(str, arguments))}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def stop(self):
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


class Run:
    """One training of the job: its processes, and what they report."""

    def __init__(self, cluster, flags, title, job, mesh, trainers, remote=False, after=None):
        """`after`: the step after which a job that is there goes on; None: it is created."""
        self.cluster, self.flags, self.title, self.job, self.after = cluster, flags, title, job, after
        self.trainers, self.events = [], []
        self.made = [[] for _ in trainers]  # of each trainer: its steps, and when it said so
        for i, (slots, prefix) in enumerate(trainers):
            arguments = ["--coordinator", cluster.address, "--job", job, "--slots", SLOTS, "--my-slots", slots,
                         "--steps", flags.steps, "--timeout", flags.timeout, "--prefix", prefix,
                         "--data", HERE / "digits.bin"]
            arguments += ["--create", "--mesh", mesh] if i == 0 and after is None else []
            arguments += ["--remote"] if remote else []
            trainer = cluster.spawn("digits_trainer", *arguments, log=f"{job}-trainer-{i}", stdout=subprocess.PIPE)
            self.trainers.append(trainer)
            self.events.append(Events(trainer, functools.partial(self.note_step, self.made[i])))

    @staticmethod
    def note_step(made, event):
        if event["event"] == "step":
            made.append((event["step"], time.monotonic()))

    def pause_after(self, moment):
        """Seconds from `moment` to the next committed step; a step that was under way to its commit then does not count."""
        later = [when - moment for _, when in list(self.made[0]) if when > moment]
        return later[1] if len(later) > 1 else None

    def step(self):
        event = self.events[0].get("step")
        return event["step"] if event else 0

    def done(self):
        failed = [t for t in self.trainers if t.poll() not in (None, 0)]
        if failed:
            raise self.cluster.ended_badly(failed[0], f"{self.title}: a trainer")
        return all(t.poll() == 0 for t in self.trainers)

    def result(self):
        for events in self.events:
            events.join()
        for made in self.made:
            first = (self.after or 0) + 1
            if [step for step, _ in made] != list(range(first, self.flags.steps + 1)):
                raise Failure(f"{self.title}: a trainer made {len(made)} steps, not each of {first} to {self.flags.steps} once")
        digest = self.cluster.shardctl("digest", self.job)
        status = self.cluster.shardctl("status", self.job)
        gathered = sum(job["gathered_bytes"] for worker in status for job in worker["jobs"] if job["name"] == self.job)
        return {"run": self.title, "steps": digest["step"], "digest": digest["digest"],
                "steps_per_second": self.events[0].get("done")["steps_per_second"], "bytes_gathered": gathered}


def follow(run, progress, reader=None, on_step=None):
    """Shows the run's progress until it is done; on_step(step) is called now and then."""
    task = progress.add_task(run.title, total=run.flags.steps, note="")
    while not run.done():
        if on_step:
            on_step(run.step())
        version = reader.get("version") if reader else None
        note = f"held-out {version['accuracy']:.4f} at {version['step']}" if version else ""
        progress.update(task, completed=run.step(), note=note)
        time.sleep(0.02)
    progress.update(task, completed=run.flags.steps)


def disturbed_run(cluster, flags, progress, console):
    """Run 1: a reader beside it; the coordinator and, when that is back, a worker killed in the middle."""
    run = Run(cluster, flags, "2x2, 2 attached trainers", "digits", "ddp=2,fsdp=2", [("0,1", "_orig_mod."), ("2,3", "")])
    reader = cluster.spawn("digits_reader", "--coordinator", cluster.address, "--job", "digits", "--steps", flags.steps,
                           "--timeout", flags.timeout, "--data", HERE / "digits.bin", log="reader", stdout=subprocess.PIPE)
    scores = Events(reader)
    state = {}

    def disturb(step):
        if "killed_at" not in state and step >= flags.steps // 3:
            cluster.coordinator.kill()
            cluster.coordinator.wait()
            state["killed_at"] = step
        elif "killed_at" in state and "back_at" not in state and step >= state["killed_at"] + flags.steps // 10:
            cluster.start_coordinator()
            state["back_at"] = run.step()
        elif "back_at" in state and "saved" not in state and step >= flags.steps // 2:
            begin = time.monotonic()
            state["saved"] = cluster.shardctl("checkpoint", "digits", cluster.folder / "checkpoints")
            state["saving"], state["saved_by"] = time.monotonic() - begin, run.step()
        elif "saved" in state and "worker_killed" not in state and step >= flags.steps * 2 // 3:
            state["worker_pid"] = cluster.worker_pid(VICTIM)
            state["worker_killed_at"], state["worker_killed"] = run.step(), time.monotonic()
            os.kill(state["worker_pid"], signal.SIGKILL)

    follow(run, progress, scores, disturb)
    pause = run.pause_after(state["worker_killed"]) if "worker_killed" in state else None
    if pause is None:
        raise Failure("training ended before coordinator and worker were killed and back, and a checkpoint saved; use more than "
                      f"{flags.steps} --steps")
    if cluster.worker_pid(VICTIM) == state["worker_pid"]:
        raise Failure(f"worker {VICTIM} was killed, and is still process {state['worker_pid']}")
    if reader.wait(timeout=60) != 0:
        raise cluster.ended_badly(reader, "the reader")
    scores.join()
    score = scores.get("version")
    result = dict(run.result(), accuracy=score["accuracy"])
    if score["step"] != flags.steps:
        raise Failure(f"the reader's last version is {score['step']}, not {flags.steps}")
    console.print(f"coordinator killed with -9 at step {state['killed_at']}, answering again at step {state['back_at']}: "
                  f"{state['back_at'] - state['killed_at']} steps were made without it, {result['steps']} of {flags.steps} in all")
    console.print(f"checkpoint of step {state['saved']['step']} saved in {state['saving'] * 1000:.0f} ms, while training went on "
                  f"to step {state['saved_by']}")
    console.print(f"worker {VICTIM} killed with -9 at step {state['worker_killed_at']}: the next step was committed "
                  f"{pause * 1000:.0f} ms later, and both trainers made every step once")
    console.print(f"the reader scored {scores.count['version']} whole versions; the last one, of step {score['step']}: "
                  f"held-out accuracy {score['accuracy']:.4f}")
    return result, state["saved"]["step"]


def restored_run(cluster, flags, progress, saved):
    """Run 5: what was saved at step `saved` goes on, on three workers."""
    job = "digits-restored"
    restored = cluster.shardctl("restore", cluster.folder / "checkpoints", "--job", job, "--mesh", "fsdp=3")
    if restored["step"] != saved:
        raise Failure(f"the checkpoint of step {saved} was restored as step {restored['step']}")
    return plain_run(cluster, flags, progress, f"3x1, restored from step {saved}", job, "", [("0,1", ""), ("2,3", "")], after=saved)


def plain_run(cluster, flags, progress, *arguments, **options):
    run = Run(cluster, flags, *arguments, **options)
    follow(run, progress)
    return run.result()


def report(console, results, flags):
    """Prints the table, and raises Failure where a claim does not hold."""
    table = Table(title="the same job, five ways")
    for column in ("run", "accuracy", "steps", "steps/s", "bytes gathered", "digest"):
        table.add_column(column, justify="left" if column in ("run", "digest") else "right", no_wrap=True)
    for row in results:
        table.add_row(row["run"], f"{row['accuracy']:.4f}" if "accuracy" in row else "", str(row["steps"]),
                      f"{row['steps_per_second']:.0f}", f"{row['bytes_gathered']:,}", row["digest"])
    console.print(table)
    if flags.json:
        pathlib.Path(flags.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if any(row["steps"] != flags.steps for row in results):
        raise Failure(f"a run has not {flags.steps} steps")
    if len({row["digest"] for row in results}) != 1:
        raise Failure("the digests differ")
    if results[0]["accuracy"] < flags.accuracy:
        raise Failure(f"held-out accuracy {results[0]['accuracy']:.4f} is below {flags.accuracy}")
    console.print("one digest on every mesh, no step lost")


def terminal():
    console = Console()
    return console if console.is_terminal else Console(width=120)


def bars(console):
    return Progress(TextColumn("{task.description:32}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
                    TimeElapsedColumn(), TextColumn("{task.fields[note]}"), console=console)


def run(flags, console, body):
    """body(folder): the demo, with its files in a new folder, which stays where it fails. Returns the exit code."""
    if flags.keep_logs:
        os.makedirs(flags.keep_logs, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="shardmesh-demo-", dir=flags.keep_logs)
    try:
        body(folder)
    except BaseException as error:
        flags.keep_logs = folder
        console.print(f"logs are in {folder}")
        if not isinstance(error, Failure):
            raise
        console.print(f"demo failed: {error}", style="bold red", markup=False)
        return 1
    finally:
        if not flags.keep_logs:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def all_runs(cluster, flags, console):
    two_trainers = [("0,1", "_orig_mod."), ("2,3", "")]
    cluster.start_coordinator()
    cluster.start_workers()
    console.print(f"coordinator at {cluster.address}, {WORKERS} workers; {flags.steps} steps of {SLOTS} slots, bf16_sr weights, AdamW")
    with bars(console) as progress:
        disturbed, saved = disturbed_run(cluster, flags, progress, console)
        results = [disturbed,
                   plain_run(cluster, flags, progress, "1 worker, remote Push/Pull", "digits-1", "fsdp=1",
                             [("0,1,2,3", "")], remote=True),
                   plain_run(cluster, flags, progress, "4x1, 2 attached trainers", "digits-4x1", "ddp=4,fsdp=1", two_trainers),
                   plain_run(cluster, flags, progress, "2x2 again, undisturbed", "digits-2x2", "ddp=2,fsdp=2", two_trainers),
                   restored_run(cluster, flags, progress, saved)]
    report(console, results, flags)


def main():
    flags, console = parse_arguments(), terminal()

    def body(folder):
        cluster = Cluster(flags.bin_dir, folder)
        try:
            all_runs(cluster, flags, console)
        finally:
            cluster.stop()

    return run(flags, console, body)


if __name__ == "__main__":
    sys.exit(main())
