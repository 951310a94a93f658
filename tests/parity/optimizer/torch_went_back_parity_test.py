#!/usr/bin/env python3
"""PyTorch trainers of a job that loses weights of which no copy is left, and goes back to its checkpoint: each rank is
told of it as it has chosen, does the lost steps again, and ends with the digest of a job that nobody disturbed. So does
one that keeps copies on another host, and is told nothing if they are of the newest step."""
import json
import os
import shutil
import signal
import sys
import tempfile
import unittest
from unittest import mock

import torch
from shardmesh import connect, errors
from shardmesh.torch import Optimizer

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "testing")]
import ranks
from cluster import Cluster, until
from service import BIN

SAVED, KILLED, LAST = 3, 5, 8


def batch_of(step, rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(model, optimizer):
    optimizer.zero_grad()
    model(batch_of(optimizer.committed_step + 1, 0)).square().mean().backward()


def run(rank, address, job, folder, kill, **options):
    """To step LAST, with a checkpoint of step SAVED and a kill behind step KILLED: what the rank was told."""
    torch.manual_seed(3)
    model, told = torch.nn.Linear(6, 5), []
    with Optimizer(model, "AdamW", lr=0.1, weights="bf16_sr", states="dyn8", mesh="fsdp=2", service=address, job=job,
                   **options) as optimizer:
        while optimizer.committed_step < LAST:
            step = optimizer.committed_step + 1
            optimizer.zero_grad()
            model(batch_of(step, rank)).square().mean().backward()
            try:
                optimizer.step()
            except errors.WentBack as back:
                told.append(("raised", back.step, back.lost_step, back.checkpoint, optimizer.committed_step))
                continue
            if optimizer.last.skipped:
                told.append(("skipped", optimizer.last.step, optimizer.last.skip_reason))
                continue
            if rank == 0 and step == SAVED and folder and not told:
                optimizer.save(folder)
            if rank == 0 and step == KILLED and kill and not told:
                kill()
        return told, [parameter.tolist() for parameter in model.parameters()], list(optimizer.job.digest())


@unittest.skipUnless(BIN, "SHARDMESH_BIN_DIR is not set to bazel's folder of programs: ./test --lane parity sets it")
class WentBackTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="shardmesh-back-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.cluster = Cluster(workers=3)
        self.addCleanup(self.cluster.close)

    def member(self, job, rank):
        return json.loads(self.cluster.shardctl("jobs", job, "--json"))["members"][rank]["worker"]

    def test_a_rank_alone(self):
        _, weights, digest = run(0, self.cluster.address, "undisturbed", "", None)
        for on_went_back in "raise", "continue":
            with self.subTest(on_went_back):
                cluster = Cluster(workers=3)
                self.addCleanup(cluster.close)
                self.cluster, folder = cluster, os.path.join(self.folder, on_went_back)
                told, *learnt = run(0, cluster.address, "one", folder, lambda: self.cluster.kill(self.member("one", 1)),
                                    on_loss="checkpoint", on_went_back=on_went_back)
                self.assertEqual(learnt, [weights, digest])
                checkpoint = os.path.join(folder, f"step-{SAVED:013d}")
                if on_went_back == "raise":
                    self.assertEqual(told, [("raised", SAVED, KILLED, checkpoint, SAVED)])
                else:
                    self.assertEqual([one[:2] for one in told], [("skipped", SAVED)])
                    self.assertRegex(told[0][2], f"went back to step {SAVED}, of checkpoint {checkpoint}, since worker w. "
                                                 f".*worker w1 .*; steps up to {KILLED} are lost")

    def test_two_ranks(self):
        told = ranks.program(self, os.path.abspath(__file__), self.cluster.address, self.folder, self.cluster.pid("w1"),
                             seconds=200)
        self.assertEqual([rank["told"] for rank in told["disturbed"]], [[SAVED]] * 2)
        self.assertEqual([rank["digest"] for rank in told["disturbed"]], [rank["digest"] for rank in told["undisturbed"]])
        self.assertEqual(connect(self.cluster.address).job("two").mesh, "fsdp=2")

    def test_a_host_is_lost_that_another_one_keeps_copies_of(self):
        _, *learnt = run(0, self.cluster.address, "undisturbed", "", None)
        with Cluster(workers=3, hosts=3) as cluster:
            self.cluster = cluster

            def kill():
                until(lambda: json.loads(cluster.shardctl("jobs", "one", "--json"))["copied"] == KILLED, what="copies")
                self.assertIn(f"copies of step {KILLED}", cluster.shardctl("jobs", "one"))
                cluster.kill(self.member("one", 1))

            told, *again = run(0, cluster.address, "one", "", kill, copies=2)
            self.assertEqual((told, again), ([], learnt))
            self.assertIn(f"went back to copies of step {KILLED}, without a loss", cluster.shardctl("jobs", "one"))

    def disturbed(self, job, folder, **options):
        """An optimizer behind step KILLED, whose job has gone back to a checkpoint of step SAVED."""
        torch.manual_seed(3)
        model = torch.nn.Linear(6, 5)
        optimizer = Optimizer(model, "AdamW", lr=0.1, weights="bf16_sr", states="dyn8", mesh="fsdp=2", job=job,
                              service=self.cluster.address, on_loss="checkpoint", **options)
        self.addCleanup(optimizer.close)
        while optimizer.committed_step < KILLED:
            backward(model, optimizer)
            optimizer.step()
            if optimizer.committed_step == SAVED:
                optimizer.save(folder)
        self.cluster.kill(self.member(job, 1))
        return model, optimizer

    def expect_learns(self, model, optimizer):
        while optimizer.committed_step < LAST:
            backward(model, optimizer)
            optimizer.step()
        with Cluster(workers=2) as undisturbed:
            _, weights, digest = run(0, undisturbed.address, "undisturbed", "", None)
        self.assertEqual([[parameter.tolist() for parameter in model.parameters()], list(optimizer.job.digest())],
                         [weights, digest])

    def await_ready(self, job):
        until(lambda: (json.loads(self.cluster.shardctl("jobs", job, "--json"))["gone_back"] or {}).get("epoch"),
              what="a job that went back")

    def test_what_is_read_by_name(self):
        """Before step() is called again."""
        model, optimizer = self.disturbed("named", self.folder)
        self.await_ready("named")
        with self.assertRaises(errors.WentBack) as raised:
            optimizer.save(os.path.join(self.folder, "later"))
        self.assertEqual((raised.exception.step, raised.exception.lost_step), (SAVED, KILLED))
        self.assertEqual(int(optimizer.state_dict()["state"][0]["step"]), SAVED)
        self.expect_learns(model, optimizer)

    def test_scratch_checkpoints_are_not_gone_back_to(self):
        model, optimizer = self.disturbed("scratch", self.folder)
        with self.assertRaises(errors.WentBack):
            optimizer.step()
        for _ in range(4):
            backward(model, optimizer)
            optimizer.step()
            optimizer.state_dict()
        listed = json.loads(self.cluster.shardctl("jobs", "scratch", "--json"))["checkpoints"]
        self.assertEqual([one["step"] for one in listed], [SAVED])

    def test_calls_that_are_interrupted(self):
        """At each call on the way back; the next step() tells what the interrupted one would have told."""
        for place in ("_open", "close"), ("_place_again",), ("attach",), ("clear",):
            with self.subTest(place):
                model, optimizer = self.disturbed("-".join(("at", *place)), os.path.join(self.folder, *place))
                backward(model, optimizer)
                target = {"_open": optimizer._session, "_place_again": optimizer}.get(place[0], optimizer._slots)
                with mock.patch.object(target, place[0], side_effect=KeyboardInterrupt), \
                        self.assertRaises(KeyboardInterrupt):
                    optimizer.step()
                with self.assertRaises(errors.WentBack) as raised:
                    optimizer.step()
                self.assertEqual(raised.exception.step, SAVED)
                self.expect_learns(model, optimizer)
                optimizer.close()
                self.cluster.close()
                self.cluster = Cluster(workers=3)

    def test_a_timeout_on_the_way(self):
        """Nobody takes the lost worker's place for a while."""
        self.cluster.kill("w2")
        model, optimizer = self.disturbed("slow", self.folder, timeout=1.0)
        backward(model, optimizer)
        with self.assertRaisesRegex(errors.DeadlineExceeded, f"to go back to step {SAVED} of "):
            optimizer.step()
        self.await_ready("slow")
        with self.assertRaises(errors.WentBack):
            optimizer.step()
        self.expect_learns(model, optimizer)

    def test_resume_takes_it_up(self):
        saved = os.path.join(self.folder, "plain")
        model = torch.nn.Linear(6, 5)
        with Optimizer(model, lr=0.1, service=self.cluster.address, job="plain", mesh="fsdp=2") as optimizer:
            backward(model, optimizer)
            optimizer.step()
            optimizer.save(saved)
        with Optimizer(model, lr=0.1, service=self.cluster.address, job="again", resume=saved, on_loss="checkpoint"):
            listed = json.loads(self.cluster.shardctl("jobs", "again", "--json"))
        self.assertEqual((listed["on_loss"], [one["step"] for one in listed["checkpoints"]]), ("checkpoint", [1]))

    def test_pulled_slots_and_buckets(self):
        """Such an optimizer is made again, and takes the job as it is."""
        cluster, folder = self.cluster, os.path.join(self.folder, "pulled")

        def train(job, **options):
            torch.manual_seed(3)
            model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 5))
            with Optimizer(model, "AdamW", lr=0.1, mesh="fsdp=2", slots=2, pulled=True, residency="bucket",
                           service=cluster.address, job=job, **options) as optimizer:
                first = optimizer.committed_step
                while optimizer.committed_step < LAST:
                    for batch in optimizer.slots(batch_of):
                        model(batch).square().mean().backward()
                    optimizer.step()
                    if options and first == 0 and optimizer.committed_step == SAVED:
                        optimizer.save(folder)
                    if options and first == 0 and optimizer.committed_step == KILLED:
                        cluster.kill(self.member(job, 1))
                return first, list(optimizer.job.digest())

        _, digest = train("undisturbed")
        with self.assertRaises(errors.Unavailable):
            train("pulled", on_loss="checkpoint")
        self.assertEqual(train("pulled", on_loss="checkpoint", join=True), (SAVED, digest))

    def test_without_a_checkpoint(self):
        with self.assertRaisesRegex(errors.Unavailable, "it has no checkpoint to go back to"):
            run(0, self.cluster.address, "none", "", lambda: self.cluster.kill(self.member("none", 1)),
                on_loss="checkpoint")

    def test_wrong_arguments(self):
        for options, message in (({"on_loss": "retry"}, "on_loss is 'retry'; it must be fail or checkpoint"),
                                 ({"on_went_back": "ignore"}, "on_went_back is 'ignore'; it must be raise or continue"),
                                 ({"copies": 3, "mesh": "fsdp=2"}, "copies is 3; it is 1, or 2: another host keeps each shard, too")):
            with self.assertRaisesRegex(errors.InvalidArgument, message):
                Optimizer(torch.nn.Linear(2, 2), service=self.cluster.address, **options)


def report(address, folder, pid):
    """Of a job whose second worker is the process `pid`, and of one that nobody disturbs."""
    def train(job, **options):
        kill = (lambda: os.kill(int(pid), signal.SIGKILL)) if options else None
        of_ranks = ranks.fork(2, lambda rank, _: run(rank, address, job, folder if options else "", kill, **options),
                              seconds=100)
        return [{"told": [one[1] for one in told], "digest": digest} for told, _, digest in of_ranks]

    ranks.report({"disturbed": train("two", on_loss="checkpoint"), "undisturbed": train("undisturbed")})


if __name__ == "__main__":
    if len(sys.argv) == 4:
        report(*sys.argv[1:])
    else:
        unittest.main()
