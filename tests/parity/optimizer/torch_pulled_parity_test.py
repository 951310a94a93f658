#!/usr/bin/env python3
"""Pulled slots of ranks that share memory with the workers and of ranks that do not, with all weights and with buckets
of them: one program, the same bits."""
import os
import sys
import unittest
from unittest import mock

import torch
from shardmesh import _client, connect, errors
from shardmesh.torch import Optimizer
from shardmesh.torch._job._session import TrainerSession

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
import ranks
from service import ServiceTest

SLOTS, STEPS = 3, 4


def batch_of(step, slot):
    return torch.randn(slot + 1, 6, generator=torch.Generator().manual_seed(10 * step + slot))


class Blocks(torch.nn.Module):
    """A block is what bucket residency gathers at once."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(3))
        self.head = torch.nn.Linear(6, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def on_ranks(address, folder):
    """Of two ranks, the second of which makes its optimizer when the first one waits for it, or is through: the job's last
    step, and the batches that each rank was given. Then the same with a run that resumes."""
    reads, writes = os.pipe()
    meet = TrainerSession.meet

    def run(rank, world):
        said = []
        for job, options in ("apart", {}), ("apart-again", {"resume": folder}):
            told = []

            def tell(told=told):
                if rank == 0 and not told:
                    told.append(os.write(writes, b"1"))

            torch.manual_seed(3)
            model, loader, taken = torch.nn.Linear(6, 5), iter(range(100)), []
            if rank == 1:
                os.read(reads, 1)
            with mock.patch.object(TrainerSession, "meet", lambda *given, tell=tell: (tell(), meet(*given))), \
                    Optimizer(model, "AdamW", lr=0.1, slots=4, pulled=True, service=address, job=job, **options) as optimizer:
                for _ in range(3):
                    for batch in optimizer.slots([next(loader) for _ in range(4)]):
                        taken.append(batch)
                        model(batch_of(7, batch % 4)).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                tell()
                said.append((optimizer.committed_step, taken))
                if rank == 0 and not options:
                    optimizer.save(folder)
        return said
    return ranks.fork(2, run, seconds=90)


class PulledTest(ServiceTest):
    WORKERS = 2

    def test_ranks_that_come_at_other_times_give_the_same_steps(self):
        """Each batch is computed once, whoever takes it."""
        one, other = ranks.program(self, __file__, self.address, self.path("apart"), seconds=120)
        for (step, taken), (same, rest), last in zip(one, other, (3, 6)):
            self.assertEqual((step, same), (last, last))
            self.assertEqual(sorted(taken + rest), list(range(12)))

    def test_a_rank_that_does_not_come_is_named_in_time(self):
        with mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "2"}):
            optimizer = Optimizer(torch.nn.Linear(6, 5), "AdamW", slots=2, pulled=True, service=self.address, job="alone", timeout=1)
        self.addCleanup(optimizer.close)
        with self.assertRaisesRegex(errors.DeadlineExceeded, "1 of 2 ranks have come to job alone within 1 s"):
            next(iter(optimizer.slots([0, 1])))

    def trained(self, here, make=lambda: torch.nn.Linear(6, 5), **options):
        """What a model has learnt by one rank: on a host of the workers, or elsewhere."""
        torch.manual_seed(3)
        model = make()
        job = "-".join([self.id().rsplit(".")[-1], str(here), *options])
        with mock.patch.object(_client.Job, "on_this_host", here):
            optimizer = Optimizer(model, "AdamW", lr=0.1, slots=SLOTS, pulled=True, service=self.address, job=job, **options)
        self.addCleanup(optimizer.close)
        for _ in range(STEPS):
            for batch in optimizer.slots(batch_of):
                if options.get("token_weights"):
                    optimizer.tokens(len(batch))
                model(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def test_the_bits_are_those_of_a_rank_that_shares_memory(self):
        for options in {}, {"token_weights": True, "clip_norm": 0.5}, {"weights": "bf16", "gradients": "bf16", "gather": "fp8_row"}:
            with self.subTest(options=options):
                (model, optimizer), (other, connected) = self.trained(True, **options), self.trained(False, **options)
                self.assertFalse(connected._session._shares); self.assertEqual(connected.committed_step, STEPS)
                self.assertEqual(optimizer.job.digest(), connected.job.digest())
                for name, value in model.state_dict().items():
                    self.assertTrue(torch.equal(value, other.state_dict()[name]), name)

    def test_with_buckets_the_bits_are_those_of_full_residency(self):
        for options in {}, {"token_weights": True, "clip_norm": 0.5}, {"weights": "bf16", "gradients": "bf16", "gather": "fp8_row"}:
            with self.subTest(options=options):
                model, optimizer = self.trained(True, Blocks, **options)
                for here in True, False:
                    other, bucketed = self.trained(here, Blocks, residency="bucket", **options)
                    with torch._C.DisableTorchFunction():  # no use of it, for which it would be gathered
                        self.assertTrue(other.blocks[0][0].weight.detach().isnan().any())
                    self.assertEqual(optimizer.job.digest(), bucketed.job.digest())
                    for name, value in model.state_dict().items():
                        self.assertTrue(torch.equal(value, other.state_dict()[name]), name)
                    bucketed.close()
                    self.assertTrue(torch.equal(model.blocks[0][0].weight, other.blocks[0][0].weight))

    def test_with_buckets_a_body_that_raised_can_be_repeated(self):
        expected, reference = self.trained(True, Blocks)
        model, optimizer = self.trained(True, Blocks, residency="bucket")
        with self.assertRaisesRegex(RuntimeError, "the body"):
            for batch in optimizer.slots(batch_of):
                loss = model(batch).square().sum()
                raise RuntimeError("the body")
        with self.assertRaisesRegex(errors.FailedPrecondition, "within a loop over optimizer.slots"):
            for batch in optimizer.slots(batch_of):
                with optimizer.editing():
                    model.head.weight.add_(1)
        del loss
        for one, of in (expected, reference), (model, optimizer):
            for batch in of.slots(batch_of):
                one(batch).square().sum().backward()
            of.step()
        self.assertEqual(optimizer.job.digest(), reference.job.digest())

    def test_weights_that_were_changed_by_hand_are_told_and_can_be_taken_back(self):
        model, optimizer = self.trained(False)
        before = model.weight.detach().clone()
        model.weight.data.add_(1)
        with self.assertRaisesRegex(errors.FailedPrecondition, "changed by hand"):
            for batch in optimizer.slots(batch_of):
                model(batch).square().sum().backward()
            optimizer.step()
        optimizer.revert()
        self.assertTrue(torch.equal(model.weight, before))

    # As other programs would: a slot of the one that leaves is the next one's.
    def test_a_slot_goes_from_a_session_of_one_kind_to_one_of_the_other(self):
        _, optimizer = self.trained(True)
        name = optimizer._started.name
        optimizer.close()
        job = connect(self.address).job(name, timeout=10)._core
        with self.assertRaisesRegex(errors.InvalidArgument, "give attached or connected"):
            _client.PullingSession(job, way="near", timeout=10)
        connected = _client.PullingSession(job, way="connected", timeout=10)
        with self.assertRaisesRegex(errors.ResourceExhausted, "has its 1 trainers"):
            _client.PullingSession(job, way="attached", timeout=10)
        connected.await_weights(10)
        self.assertEqual(connected.committed, STEPS)
        slot, step, _ = connected.take(10)
        self.assertEqual((slot, step), (0, STEPS + 1))
        connected.close()
        attached = _client.PullingSession(job, way="attached", timeout=10)
        attached.await_weights(10)
        self.assertEqual(attached.take(10)[:2], (0, STEPS + 1))
        attached.close()


if __name__ == "__main__":
    if len(sys.argv) == 3 and ":" in sys.argv[1]:
        ranks.report(on_ranks(*sys.argv[1:]))
    else:
        unittest.main()
