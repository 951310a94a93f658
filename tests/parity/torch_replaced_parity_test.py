#!/usr/bin/env python3
"""Other weights and states for a job that trains: while the coordinator is away for a moment, at every call that this
makes, and while it stays away. Nothing is lost either way."""
import os
import re
import shutil
import signal
import sys
import threading
import unittest

import torch
from shardmesh import errors
from shardmesh.torch import Optimizer
from torch import nn

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "testing")]
from cluster import Cluster, until
from cut_line import CutLine
from service import BIN


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()


@unittest.skipUnless(BIN, "SHARDMESH_BIN_DIR is not set to bazel's folder of programs: ./test --lane parity sets it")
class ReplacedTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster(workers=2, coordinator_flags=("--default-mesh", "fsdp=2"))
        cls.addClassCleanup(cls.cluster.close)
        cls.line = CutLine(cls.cluster.address)
        cls.addClassCleanup(cls.line.close)
        cls.back = None

    def kill_for_a_moment(self):
        self.cluster.kill("coordinator")
        self.back = threading.Timer(0.2, self.cluster.start_coordinator)
        self.back.start()

    def optimizer(self, name, model, **options):
        return Optimizer(model, "adamw", lr=1e-2, service=self.line.address, job=name, **{"timeout": 30.0, **options})

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
                    self.line.arm(piece, self.kill_for_a_moment, forward=piece % 2 == 0)
                    change(model, optimizer, before)
                    over = self.line.disarm()
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


    def test_the_coordinator_stays_away_and_the_old_job_stays(self):
        model = small_model()
        optimizer = self.optimizer("stays", model, timeout=2.0)
        train(model, optimizer, 2)
        digest, states = optimizer.job.digest(), optimizer.state_dict()
        train(model, optimizer, 1)
        later = optimizer.job.digest()
        self.cluster.kill("coordinator")
        with self.assertRaises((errors.Unavailable, errors.DeadlineExceeded)):
            optimizer.load_state_dict(states)
        self.cluster.start_coordinator()
        self.assertEqual(optimizer.job.digest(), later)
        optimizer.load_state_dict(states)
        self.assertEqual(optimizer.job.digest().step, digest.step)
        optimizer.close()

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
