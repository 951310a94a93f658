"""Training jobs that go on while a test does something to their service: trainers with DataLoader workers, of assigned
and of pulled slots, and a follower of each (adversity_roles.py). Every process is below the library of
altered_system.h, so that a test moves its clock and says how many threads it gets.

    jobs = TrainingJobs(most_threads=45)
    jobs.start_all()
    jobs.cluster.kill("coordinator")
    jobs.train_on("the coordinator's end", followed=False)
    ...
    jobs.check_digests()
"""
import json
import os
import signal
import struct
import subprocess
import sys
import time

from cluster import Cluster, program, until

KINDS, BETWEEN = ("assigned", "pulled"), 8
ROLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "adversity_roles.py")
SECONDS = 45  # less than a clock is moved by: whoever waits for that clock is found
REST = 0.015  # what a real batch takes; no job has so many steps that its undisturbed twin takes as long
UNTIL_END = 50  # steps: those that a trainer may make before it sees where its end is


def read_step(file):
    try:
        with open(file, encoding="ascii") as text:
            return int(text.read())
    except FileNotFoundError:
        return -1


class TrainingJobs:
    """cluster: two workers of a node. Failures are AssertionErrors that have the logs."""

    def __init__(self, most_threads=0):
        """most_threads: that each process may have at a time; see allow_threads."""
        self._clock, self._most_threads, self.roles = 0, most_threads, {}
        self.cluster = Cluster(workers=2, retained=True, coordinator_flags=("--default-mesh", "fsdp=2"),
                               environment=self._altered)

    def _altered(self, folder):
        self._system = os.path.join(folder, "system")
        self._write_system()
        return {"LD_PRELOAD": program("tests/testing/system/altered_system_preload.so"), "SHARDMESH_TEST_SYSTEM": self._system}

    @property
    def environment(self):
        """Of programs that the changes of the system apply to."""
        return {**os.environ, **self._altered(self.cluster.folder)}

    def _write_system(self):
        """SystemChanges: the wall clock's lead in nanoseconds, and the number of threads."""
        with open(self._system, "r+b" if os.path.exists(self._system) else "w+b") as file:
            file.write(struct.pack("=qq", int(self._clock * 1e9), self._most_threads))

    def move_clock(self, seconds):
        self._clock = seconds
        self._write_system()

    def allow_threads(self, most):
        """At a time, beside a process's first; 0: any number. A process that has more keeps them."""
        self._most_threads = most
        self._write_system()

    def start(self, role, job, altered=True, rest=REST):
        file = os.path.join(self.cluster.folder, f"{job}-{role}")
        with open(file + ".log", "ab") as log:
            process = subprocess.Popen([sys.executable, ROLES, role, self.cluster.address, job, file, str(rest)],
                                       stdout=log, stderr=log, start_new_session=True,
                                       env=self.environment if altered else None)
        self.roles[job, role] = process, file
        return process

    def start_all(self):
        """A trainer and a follower of each kind; the jobs are named after the kinds."""
        for kind in KINDS:
            self.start(kind, kind)
        self.train_on("the start")
        for kind in KINDS:
            self.start("follower", kind)
        self.train_on("followers came")

    def close(self):
        for process, _ in self.roles.values():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        self.cluster.close()

    def log(self, role, job):
        with open(os.path.join(self.cluster.folder, f"{job}-{role}.log"), encoding="utf-8", errors="replace") as log:
            return log.read()

    def said(self):
        text = self.cluster.logs()
        for job, role in self.roles:
            text += f"--- {role} of {job}\n{self.log(role, job)}"
        return text[-20000:]

    def train_on(self, after, followed=True, seconds=0):
        """Every job makes some steps, and every follower sees some; if not `followed`, it only lives on. For at least
        that long."""
        over = time.monotonic() + seconds
        goals = {role: read_step(file) + BETWEEN * (followed or role[1] != "follower")
                 for role, (_, file) in self.roles.items()}
        for role, (process, file) in self.roles.items():
            try:
                until(lambda: process.poll() is not None or (read_step(file) >= goals[role] and time.monotonic() >= over),
                      seconds + SECONDS, f"{role} after {after}")
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self.said()}") from None
            if process.poll() is not None:
                raise AssertionError(f"{role} ended with {process.poll()} after {after}\n{self.said()}")

    def kill_trainer(self, kind):
        """Alone: its DataLoader workers live on, until they see that it is gone."""
        process, _ = self.roles[kind, kind]
        process.kill()
        process.wait()
        self.start(kind, kind)

    def await_end(self, role, job, seconds=300):
        """Of a process that is to end with status 0."""
        status = self.roles[job, role][0].wait(timeout=seconds)
        if status != 0:
            raise AssertionError(f"{role} of {job} ended with {status}\n{self.said()}")
        del self.roles[job, role]

    def end_at(self, job, step):
        path = os.path.join(self.cluster.folder, f"{job}.end")
        with open(path + ".new", "w", encoding="ascii") as file:
            file.write(str(step))
        os.replace(path + ".new", path)

    def digest(self, job):
        """Of the newest committed step: that, and the digest."""
        said = json.loads(self.cluster.shardctl("digest", job, "--json"))
        return said["step"], said["digest"]

    def check_digests(self):
        """Ends the jobs. Each has the digest of one of its kind that nobody disturbed, and no other job of the service
        has failed either."""
        ends = {kind: read_step(self.roles[kind, kind][1]) + UNTIL_END for kind in KINDS}
        for kind in KINDS:
            self.end_at(kind, ends[kind])
        for job, role in list(self.roles):
            self.await_end(role, job)
        for kind in KINDS:
            self.end_at(f"calm-{kind}", ends[kind])
            self.start(kind, f"calm-{kind}", rest=0)
        for kind in KINDS:
            self.await_end(kind, f"calm-{kind}")
            found, right = self.digest(kind), self.digest(f"calm-{kind}")
            if found != right or found[0] != ends[kind]:
                raise AssertionError(f"{kind} is at {found}; undisturbed at {right}\n{self.said()}")
        failed = [job for job in self.list_jobs() if job["state"] == "failed"]
        if failed:
            raise AssertionError(f"jobs were lost: {failed}\n{self.said()}")

    def list_jobs(self):
        return json.loads(self.cluster.shardctl("jobs", "--json"))
