#!/usr/bin/env python3
"""PyTorch trainers with DataLoader workers and followers through what happens to a service on a bad day: the wall clock
is set back and forward, the coordinator is away, workers are killed, a cleaner removes socket files, no further thread
is given, trainers with live children are killed. No process has more than 45 threads besides its first. No job is lost,
and each ends with the digest of a job that nobody disturbed. (The coordinator is away at every single call in
torch_replaced_parity_test.py.)"""
import os
import subprocess
import sys
import unittest

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "testing")]
from adversity import KINDS, SECONDS, TrainingJobs
from cluster import until
from service import BIN, SHARDCTL

MOST_THREADS, HEARTBEAT_TIMEOUT = 45, 2


@unittest.skipUnless(BIN, "SHARDMESH_BIN_DIR is not set to bazel's folder of programs: ./test --lane parity sets it")
class AdversityTest(unittest.TestCase):
    def setUp(self):
        self.jobs = TrainingJobs(most_threads=MOST_THREADS)
        self.addCleanup(self.jobs.close)
        self.cluster, self.train_on = self.jobs.cluster, self.jobs.train_on

    def checkpoint(self):
        """By a shardctl that gets any number of threads."""
        return subprocess.run([SHARDCTL, "checkpoint", "assigned", os.path.join(self.cluster.folder, "checkpoints"),
                               "--coordinator", self.cluster.address], capture_output=True, text=True, timeout=120)

    def move_clock(self, seconds):
        self.jobs.move_clock(seconds)
        self.train_on(f"the clock was set by {seconds} s")
        self.cluster.kill("w-0")
        # Were the next incarnation refused, the coordinator would give the worker up meanwhile.
        self.train_on(f"a kill with the clock at {seconds} s", seconds=HEARTBEAT_TIMEOUT + 1)
        self.jobs.move_clock(0)
        self.train_on("the clock was right again")

    def take_the_coordinator_away(self):
        self.cluster.kill("coordinator")
        self.train_on("the coordinator's end", followed=False)
        self.cluster.start_coordinator()
        self.train_on("the coordinator's return")

    def remove_sockets(self):
        sockets = [os.path.join(folder, name) for folder, _, names in os.walk(self.cluster.folder) for name in names
                   if name.endswith(".sock")]
        self.assertTrue(sockets)
        for path in sockets:
            os.unlink(path)
        self.train_on("the sockets were removed")
        until(lambda: all(map(os.path.exists, sockets)), SECONDS, "sockets that are there again")
        self.cluster.kill("w-1")
        self.train_on("a kill after the sockets were removed")

    def give_no_further_thread(self):
        self.jobs.allow_threads(1)
        refused = self.checkpoint()
        self.assertNotEqual(refused.returncode, 0, refused.stdout)
        self.assertRegex(refused.stderr, "(?s)RESOURCE_EXHAUSTED.*RLIMIT_NPROC")
        self.jobs.start("newcomer", "pulled", altered=False)
        self.jobs.await_end("newcomer", "pulled")
        self.train_on("no further thread was given", followed=False)  # a follower's calls are refused likewise
        self.assertRegex(self.jobs.log("follower", "assigned"), "no thread is left for a call .*RLIMIT_NPROC")
        self.jobs.allow_threads(MOST_THREADS)
        self.train_on("threads were given again")
        saved = self.checkpoint()
        self.assertEqual(saved.returncode, 0, saved.stderr)

    def test_nothing_is_lost(self):
        self.jobs.start_all()
        for seconds in (-60, 60):
            self.move_clock(seconds)
        self.take_the_coordinator_away()
        self.remove_sockets()
        self.give_no_further_thread()
        for kind in KINDS:
            for _ in range(3):
                self.jobs.kill_trainer(kind)
                self.train_on("a trainer with live children was killed")
        self.jobs.check_digests()


if __name__ == "__main__":
    unittest.main()
