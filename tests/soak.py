#!/usr/bin/env python3
"""Uses a service for minutes as a bad day would, and looks whether it has then what it had before.

  tests/soak.py --minutes 10

Jobs with assigned and pulled slots are trained by PyTorch with DataLoader workers, followed and read, saved, deleted and
made again; trainers with live children, followers, readers and workers are killed. Then all jobs are deleted, and within
30 s every process of the service (coordinator, node, workers) must have no more descriptors, shared memory files,
mappings of them and threads than before, and no more memory and threads of gRPC's pools than a bound. Exit code 1
if one has.

Needs the programs (SHARDMESH_BIN_DIR is Bazel's folder of them), the Python package and PyTorch.
"""
import argparse
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import NamedTuple

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "testing"))
from cluster import Cluster, until

import shardmesh

SETTLES = 30.0  # seconds after the last DeleteJob
WARM_UP = 8.0
EVENT = 1.0  # seconds from one event to the next, at most
LOOK = 0.1
WORKERS = 2
# What freed heap may keep: glibc has up to 8 arenas a core, each of which may keep what one call had at once, a chunk of
# 1 MiB (kPushChunkBytes).
HEAP = 8 * (os.cpu_count() or 1) << 20
# What gRPC 1.51's pools of threads may keep, by the name of a thread (15 letters). An executor
# (src/core/lib/iomgr/executor.cc) starts one when two closures wait for each that it has, up to two a core. The event
# engine (src/core/lib/event_engine/thread_pool.cc) lets as many wait as there are cores, at least two, and one polls.
CORES = os.cpu_count() or 1
POOLS = {"default-executo": 2 * CORES, "resolver-execut": 2 * CORES, "event_engine": max(2, CORES) + 1}
PAGES = 1 << 20  # of shared memory that is not a job's: code, and files in tmpfs


class Look(NamedTuple):
    """At a process."""

    descriptors: int
    memfds: int
    mappings: int  # of memfds
    threads: int  # without those of gRPC's pools
    pooled: int  # those
    beyond: int  # of them, more than their pools may keep
    heap: int  # bytes: RssAnon
    shared: int  # bytes: RssShmem


def name_of_thread(folder):
    try:
        with open(folder + "/comm", encoding="utf-8", errors="replace") as name:
            return name.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        return "ended"


def look(pid):
    """None: it is gone."""
    folder = f"/proc/{pid}/"
    try:
        links = []
        for name in os.listdir(folder + "fd"):
            try:
                links.append(os.readlink(folder + "fd/" + name))
            except FileNotFoundError:
                pass  # closed meanwhile
        with open(folder + "maps", encoding="utf-8", errors="replace") as maps:
            mappings = sum("/memfd:" in line for line in maps)
        with open(folder + "status", encoding="utf-8") as status:
            fields = dict(line.split(":", 1) for line in status)
        threads = Counter(name_of_thread(folder + "task/" + thread) for thread in os.listdir(folder + "task"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    if "RssAnon" not in fields:
        return None  # a zombie
    kib = {name: int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem")}
    memfds = sum(link.startswith("/memfd:") for link in links)
    pooled = {name: threads.pop(name, 0) for name in POOLS}
    beyond = sum(max(0, count - POOLS[name]) for name, count in pooled.items())
    return Look(len(links), memfds, mappings, threads.total(), sum(pooled.values()), beyond, kib["RssAnon"],
                kib["RssShmem"])


class Roles:
    """The processes that use the service."""

    def __init__(self, folder, address):
        self._errors, self._address = os.path.join(folder, "errors"), address
        self._program = subprocess.Popen([sys.executable, os.path.join(HERE, "soak_roles.py")], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)
        self.running = {}  # by pid: its command
        self._handles = {}  # by pid, which may be another process's one day

    def start(self, role, job, **more):
        command = {"role": role, "service": self._address, "job": job, **more}
        self._program.stdin.write(json.dumps({**command, "errors": self._errors}) + "\n")
        self._program.stdin.flush()
        pid = int(self._program.stdout.readline())
        self.running[pid] = command
        try:
            self._handles[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            pass  # it has ended

    def of(self, roles, job=None):
        return [pid for pid, command in self.running.items()
                if command["role"] in roles and job in (None, command["job"])]

    def kill(self, pid):
        """It alone: its children live on, until they see it. Returns what it did."""
        if pid in self._handles:
            handle = self._handles.pop(pid)
            try:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            except ProcessLookupError:
                pass
            os.close(handle)
        return self.running.pop(pid, None)

    def replace(self, pid):
        command = dict(self.kill(pid))
        self.start(command.pop("role"), command.pop("job"), **{name: value for name, value in command.items()
                                                              if name != "service"})

    def restart_ended(self):
        """Those that ended by themselves. How many."""
        ended = [pid for pid in self.running if pid not in self._handles or select.select([self._handles[pid]], [], [], 0)[0]]
        for pid in ended:
            self.replace(pid)
        return len(ended)

    def close(self):
        for pid in {*self.running, *self._handles}:
            self.kill(pid)
        self._program.stdin.close()
        self._program.wait(timeout=30)
        self._program.stdout.close()

    def errors(self):
        if not os.path.exists(self._errors):
            return []
        with open(self._errors, encoding="utf-8") as said:
            return [json.loads(line) for line in said]


class Soak:
    def __init__(self, flags, cluster):
        self.flags, self.cluster = flags, cluster
        self.random = random.Random(flags.seed)
        self.client = shardmesh.connect(cluster.address)
        self.roles = Roles(cluster.folder, cluster.address)
        self.counts = dict.fromkeys(("jobs", "deletes", "trainers", "readers", "workers", "checkpoints", "refused", "ended"), 0)
        self.steps = 0
        self.names = ["coordinator", "node", *(f"w-{number}" for number in range(WORKERS))]
        self.made, self.leaving = 0, []  # pids of those whose job was deleted under them

    # -- what is measured -----------------------------------------------------------------------------------------

    def looks(self):
        found = {name: look(self.cluster.pid(name) or 0) for name in self.names}
        return {name: seen for name, seen in found.items() if seen is not None}

    def settled(self, seconds):
        """When no count of any process has changed for 2 s, or the time is over."""
        deadline, last, since = time.monotonic() + seconds, None, 0.0
        while time.monotonic() < deadline:
            looks = self.looks()
            counts = {name: seen[:4] for name, seen in looks.items()}
            if counts != last:
                last, since = counts, time.monotonic()
            if len(looks) == len(self.names) and time.monotonic() - since > 2.0:
                return looks
            time.sleep(LOOK)
        return self.looks()

    # -- what happens ---------------------------------------------------------------------------------------------

    def make(self, kind):
        self.made += 1
        self.counts["jobs"] += 1
        job, ranks = f"{kind}-{self.made}", 2 if kind == "pulled" else 1
        for rank in range(ranks):
            self.roles.start(kind, job, rank=rank, ranks=ranks)
        self.roles.start("follower", job, copy=self.made % 2 == 0)
        self.roles.start("reader", job)

    def jobs(self):
        return {job.name: job for job in self.client.jobs()}

    def delete(self, job):
        """With its trainers and readers killed before, or going on."""
        if self.random.random() < 0.5:
            for pid in self.roles.of(ROLES, job):
                self.roles.kill(pid)
        for pid in self.roles.of(ROLES, job):
            del self.roles.running[pid]  # it sees that its job is gone, and ends
            self.leaving.append(pid)
        self.shardctl("delete", job)
        self.counts["deletes"] += 1

    def shardctl(self, *arguments):
        try:
            self.cluster.shardctl(*arguments)
        except subprocess.CalledProcessError:
            self.counts["refused"] += 1

    def event(self):
        choice = self.random.choices(("trainer", "reader", "worker", "checkpoint", "delete"), (4, 4, 2, 3, 2))[0]
        if choice in ("trainer", "reader"):
            pids = self.roles.of(TRAINERS if choice == "trainer" else READERS)
            if pids:
                self.roles.replace(self.random.choice(pids))
                self.counts[choice + "s"] += 1
        elif choice == "worker":
            self.cluster.kill(f"w-{self.random.randrange(WORKERS)}")
            self.counts["workers"] += 1
        elif names := sorted(self.jobs()):
            job = self.random.choice(names)
            if choice == "delete":
                self.delete(job)
                self.make(job.split("-")[0])
            else:
                self.counts["checkpoints"] += 1
                self.shardctl("checkpoint", job, os.path.join(self.cluster.folder, "saved", job), "--keep-last", "2")

    def trained(self, least):
        """Whether each job that is being trained has as many steps."""
        jobs, wanted = self.jobs(), {command["job"] for command in self.roles.running.values()}
        return all(name in jobs and (jobs[name].committed or 0) >= least for name in wanted)

    def stop(self):
        for pid in list(self.roles.running):
            self.roles.kill(pid)
        for pid in self.leaving:
            self.roles.kill(pid)
        for job in sorted(self.jobs()):
            self.shardctl("delete", job)
        until(lambda: not self.jobs(), 30, "the end of all jobs")

    def warm_up(self):
        """Everything once, so that what is made at the first use is there. The peak of each process's heap."""
        for kind in TRAINERS:
            self.make(kind)
        until(lambda: self.trained(3), 120, "the first steps")
        peak, end = {}, time.monotonic() + WARM_UP
        while time.monotonic() < end:
            for name, seen in self.looks().items():
                peak[name] = max(peak.get(name, 0), seen.heap)
            time.sleep(LOOK)
        self.shardctl("checkpoint", sorted(self.jobs())[0], os.path.join(self.cluster.folder, "saved", "first"))
        self.stop()
        return peak

    def storm(self, progress):
        begin = time.monotonic()
        end = begin + 60 * self.flags.minutes
        for kind in TRAINERS:
            self.make(kind)
        until(lambda: self.trained(1), 120, "the first steps")
        next_event = 0.0
        while (now := time.monotonic()) < end:
            if now >= next_event:
                self.event()
                next_event = time.monotonic() + self.random.uniform(0.1, EVENT)
            self.counts["ended"] += self.roles.restart_ended()
            self.steps = max([self.steps, *((job.committed or 0) for job in self.jobs().values())])
            progress((now - begin) / (end - begin), self)
            time.sleep(LOOK)
        progress(1.0, self)

    def run(self, progress):
        first = self.settled(SETTLES)
        peak = self.warm_up()
        before = self.settled(SETTLES)
        self.storm(progress)
        self.stop()
        deleted = time.monotonic()
        while True:
            after = self.looks()
            left = self.left(before, peak, first, after)
            if not left or time.monotonic() - deleted > SETTLES:
                return {"first": as_dicts(first), "before": as_dicts(before), "after": as_dicts(after), "peak": peak,
                        "left": left, "seconds": round(time.monotonic() - deleted, 1), "counts": self.counts,
                        "steps": self.steps, "errors": self.roles.errors()}
            time.sleep(LOOK)

    def left(self, before, peak, first, after):
        """What is more than it may be: lines of text."""
        lines = [f"{name} is gone" for name in self.names if name not in after]
        for name, seen in after.items():
            then = before[name]
            for what in ("descriptors", "memfds", "mappings", "threads"):
                had, has = getattr(then, what), getattr(seen, what)
                had = min(had, getattr(first[name], what)) if what in ("memfds", "mappings") else had
                if has > had:
                    lines.append(f"{name} has {has} {what}, and had {had}")
            if seen.beyond > 0:
                lines.append(f"{name} has {seen.pooled} threads of gRPC's pools, {seen.beyond} more than these keep ({POOLS})")
            for what, bound in (("heap", max(peak[name], then.heap) + HEAP), ("shared", first[name].shared + PAGES)):
                if getattr(seen, what) > bound:
                    lines.append(f"{name} has {mib(getattr(seen, what))} of {what} memory; at most {mib(bound)}")
        return lines


TRAINERS, READERS = ("assigned", "pulled"), ("follower", "reader")
ROLES = TRAINERS + READERS


def as_dicts(looks):
    return {name: seen._asdict() for name, seen in looks.items()}


def mib(count):
    return f"{count / (1 << 20):.1f} MiB"


def bar(part, soak):
    counts = " ".join(f"{name} {count}" for name, count in soak.counts.items())
    filled = round(24 * part)
    print(f"\r[{'#' * filled}{'.' * (24 - filled)}] {100 * part:3.0f} %  {counts}", end="\n" if part >= 1.0 else "",
          file=sys.stderr, flush=True)


def table(report):
    rows = [("process", "descriptors", "memfds", "mappings", "threads", "pooled", "heap", "shared")]
    for name, then in report["before"].items():
        now = report["after"].get(name, {})
        cells = [f"{then[what]} -> {now.get(what, '-')}" for what in rows[0][1:6]]
        cells += [f"{mib(then[what])} -> {mib(now.get(what, 0))}" for what in rows[0][6:]]
        rows.append((name, *cells))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the storm (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="of the events (default: a random one)")
    parser.add_argument("--json", action="store_true", help="print the report as one line of JSON, and no bar")
    flags = parser.parse_args()
    print(f"seed {flags.seed}", file=sys.stderr)
    with Cluster(workers=WORKERS, retained=True, coordinator_flags=("--default-mesh", f"fsdp={WORKERS}")) as cluster:
        soak = Soak(flags, cluster)
        try:
            report = soak.run((lambda *_: None) if flags.json else bar)
        except BaseException:
            print(cluster.logs()[-8000:], file=sys.stderr)
            raise
        finally:
            soak.roles.close()
    report["seed"] = flags.seed
    bugs = [error for error in report["errors"] if error[0].startswith("BUG ")]
    if flags.json:
        print(json.dumps(report))
    else:
        print(table(report))
        for line in report["left"] + [f"{kind}: {text}" for kind, text in bugs]:
            print("LEFT " + line)
        print(f"{'as before' if not report['left'] else 'NOT as before'} {report['seconds']} s after the last job was deleted")
    return 1 if report["left"] or bugs else 0


if __name__ == "__main__":
    sys.exit(main())
