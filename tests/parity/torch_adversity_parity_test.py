#!/usr/bin/env python3
"""PyTorch trainers with DataLoader workers and followers through what happens to a service on a bad day: the wall clock
is set back and forward, the coordinator is away, workers are killed, a cleaner removes socket files, trainers with live
children are killed. No job is lost, and each ends with the digest of a job that nobody disturbed."""
import json
import os
import signal
import struct
import subprocess
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "testing")]
from cluster import Cluster, until
from service import BIN

KINDS, BETWEEN = ("assigned", "pulled"), 8
PRELOAD = os.path.join(BIN, "tests/testing/altered_system_preload.so")
SECONDS = 90


def read_step(file):
    try:
        with open(file, encoding="ascii") as text:
            return int(text.read())
    except FileNotFoundError:
        return -1


@unittest.skipUnless(BIN, "SHARDMESH_BIN_DIR is not set to bazel's folder of programs: ./test --lane parity sets it")
class AdversityTest(unittest.TestCase):
    def setUp(self):
        self.cluster = Cluster(workers=2, kept=True, coordinator_flags=("--default-mesh", "fsdp=2"), environment=lambda folder: {
            "LD_PRELOAD": PRELOAD, "SHARDMESH_TEST_SYSTEM": self.system_file(folder)})
        self.addCleanup(self.cluster.close)
        self.roles = {}
        self.addCleanup(self.end_all)

    def system_file(self, folder):
        """What altered_system.h reads: two 64-bit numbers, of which the first is the wall clock's lead in ns."""
        self.system = os.path.join(folder, "system")
        self.move_clock(0)
        return self.system

    def move_clock(self, seconds):
        with open(self.system, "r+b" if os.path.exists(self.system) else "w+b") as file:
            file.write(struct.pack("=qq", int(seconds * 1e9), 0))

    def start(self, role, job):
        file = os.path.join(self.cluster.folder, f"{job}-{role}")
        environment = {**os.environ, "LD_PRELOAD": PRELOAD, "SHARDMESH_TEST_SYSTEM": self.system}
        with open(file + ".log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, os.path.join(HERE, "adversity_roles.py"), role, self.cluster.address, job, file],
                stdout=log, stderr=log, env=environment, start_new_session=True)
        self.roles[job, role] = process, file
        return process

    def end_all(self):
        for process, _ in self.roles.values():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def said(self):
        """For a failure."""
        text = self.cluster.logs()
        for _, file in self.roles.values():
            with open(file + ".log", encoding="utf-8", errors="replace") as log:
                text += f"--- {file}\n{log.read()}"
        return text[-20000:]

    def train_on(self, after, followed=True):
        """Every job makes some steps, and every follower sees some; if not `followed`, it only lives on."""
        goals = {role: read_step(file) + BETWEEN * (followed or role[1] != "follower")
                 for role, (_, file) in self.roles.items()}
        for role, (process, file) in self.roles.items():
            try:
                until(lambda: read_step(file) >= goals[role] or process.poll() is not None, SECONDS,
                      f"{role} after {after}")
            except AssertionError as error:
                self.fail(f"{error}\n{self.said()}")
            self.assertIsNone(process.poll(), f"{role} after {after}\n{self.said()}")

    def end_at(self, job, step):
        path = os.path.join(self.cluster.folder, f"{job}.end")
        with open(path + ".new", "w", encoding="ascii") as file:
            file.write(str(step))
        os.replace(path + ".new", path)

    def undisturbed(self, kind, step):
        """The digest of such a job at that step."""
        job = f"calm-{kind}"
        self.end_at(job, step)
        self.assertEqual(self.start(kind, job).wait(timeout=300), 0, self.said())
        return self.digest(job)

    def digest(self, job):
        return json.loads(self.cluster.shardctl("digest", job, "--json"))["digest"]

    def kill_trainer(self, kind):
        """Alone: its DataLoader workers live on, until they see that it is gone."""
        process, _ = self.roles[kind, kind]
        process.kill()
        process.wait()
        self.start(kind, kind)

    def test_nothing_is_lost(self):
        for kind in KINDS:
            self.start(kind, kind)
        self.train_on("the start")
        for kind in KINDS:
            self.start("follower", kind)
        self.train_on("followers came")
        for seconds in (-60, 60):
            self.move_clock(seconds)
            self.train_on(f"the clock was set by {seconds} s")
            self.cluster.kill("w-0")
            self.train_on(f"a kill with the clock at {seconds} s")
            self.move_clock(0)
            self.train_on("the clock was right again")
        self.cluster.kill("coordinator")
        self.train_on("the coordinator's end", followed=False)
        self.cluster.start_coordinator()
        self.train_on("the coordinator's return")
        sockets = [os.path.join(folder, name) for folder, _, names in os.walk(self.cluster.folder) for name in names
                   if name.endswith(".sock")]
        self.assertTrue(sockets)
        for path in sockets:
            os.unlink(path)
        self.train_on("the sockets were removed")
        until(lambda: all(map(os.path.exists, sockets)), SECONDS, "sockets that are there again")
        self.cluster.kill("w-1")
        self.train_on("a kill after the sockets were removed")
        for kind in KINDS:
            for _ in range(3):
                self.kill_trainer(kind)
                self.train_on("a trainer with live children was killed")
        ends = {kind: read_step(self.roles[kind, kind][1]) + 100 for kind in KINDS}
        for kind in KINDS:
            self.end_at(kind, ends[kind])
        for (job, role), (process, _) in list(self.roles.items()):
            self.assertEqual(process.wait(timeout=300), 0, f"{job} {role}\n{self.said()}")
        for kind in KINDS:
            self.assertEqual(self.digest(kind), self.undisturbed(kind, ends[kind]), kind)


if __name__ == "__main__":
    unittest.main()
