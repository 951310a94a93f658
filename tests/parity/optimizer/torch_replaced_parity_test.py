#!/usr/bin/env python3
"""Other weights and states for a job that trains, and jobs of models in files: while the coordinator is away for a
moment, at every call that this makes, and while it stays away. Nothing is lost either way, neither of the job nor of the
training jobs beside it, which end with the digests of jobs that nobody disturbed."""
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import unittest

import safetensors.torch
import torch
from shardmesh import errors
from shardmesh.torch import Optimizer
from torch import nn

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "testing")]
from adversity import TrainingJobs
from cluster import Cluster, until
from cut_line import CutLine
from service import BIN, SHARDCTL

MOST_THREADS = 45  # of each process beside


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def new_optimizer(service, name, model, **options):
    return Optimizer(model, "adamw", lr=1e-2, service=service, job=name, **{"timeout": 30.0, **options})


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()


@unittest.skipUnless(BIN, "SHARDMESH_BIN_DIR is not set to bazel's folder of programs: ./test --lane parity sets it")
class ReplacedTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.beside = TrainingJobs(most_threads=MOST_THREADS)
        cls.addClassCleanup(cls.beside.close)
        cls.cluster = cls.beside.cluster
        cls.line = CutLine(cls.cluster.address)
        cls.addClassCleanup(cls.line.close)
        cls.back = None
        cls.beside.start_all()

    @classmethod
    def tearDownClass(cls):
        cls.beside.check_digests()

    def tearDown(self):
        self.beside.train_on(self.id())

    def kill_for_a_moment(self):
        self.cluster.kill("coordinator")
        back = threading.Timer(0.2, self.cluster.start_coordinator)
        back.start()
        self.back = back

    def arm(self, piece, forward):
        self.back = None
        self.line.arm(piece, self.kill_for_a_moment, forward=forward)

    def disarm(self):
        """Whether the coordinator was never killed; else it is back."""
        over = self.line.disarm()
        if not over:
            until(lambda: self.back is not None, what="the coordinator's end")
            self.back.join()
        return over

    def optimizer(self, name, model, **options):
        return new_optimizer(self.line.address, name, model, **options)

    def through_every_call(self, what, prepare, change, check):
        """change() is made with the coordinator killed at its first call, its second, and so on until it makes no
        more; in turn the call is lost before it arrives, and its answer is."""
        piece, over = 0, False
        while not over:
            piece, over = piece + 1, True
            with self.subTest(what, piece=piece):
                name = f"{what}-{piece}"
                model = small_model()
                optimizer = self.optimizer(name, model)
                try:
                    before = prepare(model, optimizer)
                    self.arm(piece, forward=piece % 2 == 0)
                    change(model, optimizer, before)
                    over = self.disarm()
                    # By one call: between a delete and a create there would be no job. (What a coordinator that is
                    # killed has just done, it may not have logged.)
                    self.assertNotIn(f"event=job_deleted job={name}\n", self.cluster.logs())
                    check(model, optimizer, before)
                finally:
                    self.line.disarm()
                    optimizer.close()
                    if self.back is not None:
                        self.back.join()
                self.cluster.shardctl("delete", name)
        self.assertGreater(piece, 3, "the coordinator was never asked")

    def test_states_are_loaded_while_the_coordinator_is_away_at_any_call(self):
        def prepare(model, optimizer):
            train(model, optimizer, 2)
            saved = optimizer.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
            digest = optimizer.job.digest()
            train(model, optimizer, 1)
            return saved, digest

        def change(model, optimizer, before):
            (states, weights), _ = before
            model.load_state_dict(weights)
            optimizer.load_state_dict(states)

        def check(model, optimizer, before):
            self.assertEqual(optimizer.job.digest(), before[1])
            train(model, optimizer, 1)

        self.through_every_call("states", prepare, change, check)

    def test_first_weights_are_replaced_while_the_coordinator_is_away_at_any_call(self):
        def prepare(model, optimizer):
            return {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}

        def change(model, optimizer, before):
            model.load_state_dict(before)
            train(model, optimizer, 1)

        def check(model, optimizer, before):
            reference = small_model()
            reference.load_state_dict(before)
            train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), 1)
            for name, value in model.state_dict().items():
                torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-5, atol=1e-6)

        self.through_every_call("first", prepare, change, check)

    def imported(self, folder, name):
        """What `shardctl import` ends with, through the line."""
        return subprocess.run(
            [SHARDCTL, "import", folder, "--name", name, "--mesh", "fsdp=2", "--coordinator", self.line.address],
            capture_output=True, text=True, timeout=120, env=self.beside.environment)

    def state_of(self, name):
        return {job["name"]: job["state"] for job in self.beside.list_jobs()}.get(name)

    # Each call is lost before it arrives, and then its answer. An import whose first call is lost may end with
    # UNAVAILABLE, as every command to a coordinator that never answered; then there is no job, and nothing is in the
    # way of the next import.
    def test_a_model_is_imported_while_the_coordinator_is_away_at_any_call(self):
        folder = os.path.join(self.cluster.folder, "model")
        os.mkdir(folder)
        safetensors.torch.save_file(small_model().state_dict(), os.path.join(folder, "model.safetensors"))
        calm = self.imported(folder, "calm-import")
        self.assertEqual(calm.returncode, 0, calm.stderr)
        right = self.beside.digest("calm-import")
        self.cluster.shardctl("delete", "calm-import")
        piece, over, whole = 0, False, 0
        while not over:
            piece, over = piece + 1, True
            for forward in (False, True):
                with self.subTest("import", piece=piece, forward=forward):
                    name = f"import-{piece}-{forward}"
                    self.arm(piece, forward=forward)
                    done = self.imported(folder, name)
                    over = self.disarm()
                    if done.returncode != 0:
                        self.assertRegex(done.stderr, "UNAVAILABLE.*coordinator DescribeJob")
                        self.assertNotIn(f"job_created job={name} ", self.cluster.logs(), "a later call was lost")
                        self.assertIsNone(self.state_of(name))
                        again = self.imported(folder, name)
                        self.assertEqual(again.returncode, 0, again.stderr)
                    elif not over:
                        whole += 1
                    self.assertEqual(self.state_of(name), "ready")
                    self.assertEqual(self.beside.digest(name), right)
                    self.cluster.shardctl("delete", name)
        self.assertGreater(whole, 3, "the coordinator was asked only once")

    def test_the_coordinator_stays_away_and_the_old_job_stays(self):
        model = small_model()
        optimizer = self.optimizer("stays", model, timeout=2.0)
        train(model, optimizer, 2)
        digest, states = optimizer.job.digest(), optimizer.state_dict()
        train(model, optimizer, 1)
        later = optimizer.job.digest()
        self.cluster.kill("coordinator")
        began = time.monotonic()
        with self.assertRaises((errors.Unavailable, errors.DeadlineExceeded)):
            optimizer.load_state_dict(states)
        self.assertLess(time.monotonic() - began, 30, "the optimizer's timeout of 2 s")
        self.cluster.start_coordinator()
        self.assertEqual(optimizer.job.digest(), later)
        optimizer.load_state_dict(states)
        self.assertEqual(optimizer.job.digest().step, digest.step)
        optimizer.close()


@unittest.skipUnless(BIN, "SHARDMESH_BIN_DIR is not set to bazel's folder of programs: ./test --lane parity sets it")
class FailedRestoreTest(unittest.TestCase):
    """Without jobs beside: their worker is stopped for longer than they could go on."""

    def setUp(self):
        self.cluster = Cluster(workers=2, coordinator_flags=("--default-mesh", "fsdp=2"))
        self.addCleanup(self.cluster.close)

    def optimizer(self, name, model, **options):
        return new_optimizer(self.cluster.address, name, model, **options)

    def with_older_states(self, job, **options):
        model = small_model()
        optimizer = self.optimizer(job, model, **options)
        train(model, optimizer, 2)
        states = optimizer.state_dict()
        train(model, optimizer, 1)
        return optimizer, states

    def test_a_failed_restore_keeps_the_checkpoint_and_names_it(self):
        optimizer, states = self.with_older_states("calm")
        optimizer.load_state_dict(states)
        digest = optimizer.job.digest()
        optimizer.close()
        optimizer, states = self.with_older_states("kept", timeout=2.0)
        stopped = self.cluster.pid("w1")

        def replaced():
            until(lambda: "event=job_replaced job=kept" in self.cluster.logs(), what="the new job")
            os.kill(stopped, signal.SIGSTOP)

        watcher = threading.Thread(target=replaced)
        watcher.start()
        try:
            with self.assertRaises(errors.Error) as caught:
                optimizer.load_state_dict(states)
        finally:
            watcher.join()
            os.kill(stopped, signal.SIGCONT)
        folder = re.search(r"which is kept: (\S+)", str(caught.exception))
        self.assertIsNotNone(folder, str(caught.exception))
        optimizer.close()
        self.addCleanup(shutil.rmtree, os.path.dirname(os.path.dirname(folder[1])), ignore_errors=True)
        if "failed" in self.cluster.shardctl("jobs").lower():  # its worker was silent for too long
            self.cluster.shardctl("delete", "kept")
        again = small_model()
        optimizer = self.optimizer("kept", again, resume=folder[1])
        self.assertEqual(optimizer.job.digest(), digest)
        optimizer.close()


if __name__ == "__main__":
    unittest.main()
