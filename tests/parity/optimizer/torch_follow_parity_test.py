#!/usr/bin/env python3
"""shardmesh.torch.follow(): a model for inference at the latest version, in place."""
import copy
import os
import sys
import threading
import unittest
import unittest.mock

import shardmesh
import shardmesh.torch
import torch
from shardmesh import errors
from shardmesh.client import JobStatus, LoadMismatch
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cut_line import CutLine  # noqa: E402
from service import ServiceTest  # noqa: E402


def tied():
    """Twelve weights; the last layer is the first one's."""
    embedding, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, nn.Linear(8, 8), head)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


class FollowCase(ServiceTest):
    def optimizer(self, model, **options):
        """Of weights that are all less by 1 after each step()."""
        job = f"{self.id().rpartition('.')[2]}-{options.get('publish_every', 'asked')}"
        optimizer = shardmesh.torch.Optimizer(model, "SGD", lr=1.0, service=self.address, job=job, **options)
        self.addCleanup(optimizer.close)
        return optimizer

    def step(self, model, optimizer, times=1):
        for _ in range(times):
            sum(parameter.sum() for parameter in model.parameters()).backward()
            optimizer.step()
            optimizer.zero_grad()

    def follow(self, model, optimizer, **options):
        following = shardmesh.torch.follow(model, service=self.address, job=optimizer.job.name, **options)
        self.addCleanup(following.close)
        return following

    def assert_at(self, model, step):
        for name, parameter in model.named_parameters():
            self.assertEqual(set(parameter.detach().flatten().tolist()), {-float(step)}, name)


class FollowTest(FollowCase):
    def test_a_model_under_wrappers_follows_without_copies(self):
        for publish_every in None, 1:
            with self.subTest(publish_every=publish_every):
                self.a_model_under_wrappers_follows_without_copies(publish_every)

    def a_model_under_wrappers_follows_without_copies(self, publish_every):
        model = tied()
        optimizer = self.optimizer(model, publish_every=publish_every)
        reader = torch.compile(tied().eval(), backend="eager")
        parameters = list(reader.parameters())
        following = self.follow(reader, optimizer)
        self.assertTrue(following.attached)
        self.assertEqual((following.step, following.views), (0, 3))
        for step in range(1, 6):
            self.step(model, optimizer)
            self.assertEqual(following.update(), step)
            self.assertEqual(following.update(), step)
            self.assert_at(reader, step)
        for one, other in zip(parameters, reader.parameters()):
            self.assertIs(one, other)
        following.close()
        self.assertIs(reader._orig_mod[0].weight, reader._orig_mod[2].weight)
        self.assertEqual(reader(torch.zeros(1, dtype=torch.long)).shape, (1, 16))

    def test_closed_it_keeps_its_version_and_lets_the_memory_go(self):
        model, reader = tied(), tied()
        optimizer = self.optimizer(model)
        self.step(model, optimizer, 2)
        with self.follow(reader, optimizer) as following:
            mapped = [parameter.data_ptr() for parameter in reader.parameters()]
        for parameter, address in zip(reader.parameters(), mapped):
            self.assertNotEqual(parameter.data_ptr(), address)
        self.step(model, optimizer, 5)
        self.assert_at(reader, 2)
        with torch.no_grad():
            reader[1].weight += 1  # memory of its own
        with self.assertRaisesRegex(errors.FailedPrecondition, "was closed"):
            following.update()

    def test_waits(self):
        for publish_every in None, 1:
            with self.subTest(publish_every=publish_every):
                self.waits(publish_every)

    def waits(self, publish_every):
        model, reader = tied(), tied()
        optimizer = self.optimizer(model, publish_every=publish_every)
        following = self.follow(reader, optimizer)
        with self.assertRaises(errors.DeadlineExceeded):
            following.wait(timeout=0.05)
        self.assert_at(reader, 0)
        self.step(model, optimizer, 2)
        self.assertEqual(following.wait(at_least=2, timeout=20), 2)
        self.assertEqual(following.wait(at_least=1, timeout=0), 2)
        with self.assertRaises(errors.DeadlineExceeded):
            self.follow(tied(), optimizer, at_least=9, timeout=0.1)
        with self.assertRaises(errors.NotFound):
            shardmesh.torch.follow(reader, service=self.address, job="nobodys")

    def test_pulled_and_in_another_type(self):
        for publish_every in None, 1:
            with self.subTest(publish_every=publish_every):
                self.pulled_and_in_another_type(publish_every)

    def pulled_and_in_another_type(self, publish_every):
        model, reader = tied(), tied().to(torch.bfloat16)
        optimizer = self.optimizer(model, publish_every=publish_every)
        for way, views in ("pulled", 0), ("attached", 0):
            following = self.follow(reader, optimizer, way=way)
            self.step(model, optimizer)
            self.assertEqual(following.wait(at_least=optimizer.committed_step, timeout=20), optimizer.committed_step)
            self.assertEqual((following.attached, following.views), (way == "attached", views))
            self.assertEqual(reader[1].weight.dtype, torch.bfloat16)
            self.assert_at(reader, optimizer.committed_step)

    def test_codes_are_decoded_and_vectors_are_views(self):
        model, reader = tied(), tied()
        optimizer = self.optimizer(model, gather="fp8_row")
        self.step(model, optimizer, 3)
        following = self.follow(reader, optimizer)
        self.assertEqual(following.views, 1)
        self.assert_at(reader, 3)
        reader = tied().to(torch.bfloat16)
        self.assertEqual(self.follow(reader, optimizer).views, 0)
        self.assertEqual({parameter.dtype for parameter in reader.parameters()}, {torch.bfloat16})
        self.assert_at(reader, 3)

    def test_a_model_without_memory_gets_it(self):
        model = tied()
        optimizer = self.optimizer(model)
        self.step(model, optimizer)
        with torch.device("meta"):
            reader = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False))
        following = self.follow(reader, optimizer)
        self.assert_at(reader, 1)
        self.step(model, optimizer)
        following.update()
        self.assert_at(reader, 2)

    def test_another_model_is_told_all_that_is_wrong_and_nothing_is_loaded(self):
        model = tied()
        optimizer = self.optimizer(model)
        self.step(model, optimizer)
        reader = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 9), nn.Linear(8, 16))
        before = [parameter.detach().clone() for parameter in reader.parameters()]
        with self.assertRaises(LoadMismatch) as caught:
            self.follow(reader, optimizer)
        self.assertEqual(caught.exception.missing, ["2.bias"])
        self.assertEqual([text.split()[0] for text in caught.exception.mismatched], ["1.weight", "1.bias"])
        with self.assertRaises(LoadMismatch) as caught:
            self.follow(nn.Sequential(nn.Embedding(16, 8)), optimizer)
        self.assertEqual(caught.exception.unexpected, ["1.weight", "1.bias"])
        for one, other in zip(before, reader.parameters()):
            torch.testing.assert_close(one, other.detach(), rtol=0, atol=0)

    def test_versions_are_never_mixed_while_a_trainer_goes_on(self):
        for publish_every in None, 1:
            with self.subTest(publish_every=publish_every):
                self.versions_are_never_mixed_while_a_trainer_goes_on(publish_every)

    def versions_are_never_mixed_while_a_trainer_goes_on(self, publish_every):
        model, reader = tied(), tied()
        optimizer = self.optimizer(model, publish_every=publish_every)
        following = self.follow(reader, optimizer)
        trainer = threading.Thread(target=self.step, args=(model, optimizer, 200))
        trainer.start()
        seen = set()
        while trainer.is_alive() or following.step < 200:
            step = following.update()
            self.assert_at(reader, step)
            seen.add(step)
        trainer.join()
        self.assertGreater(len(seen), 3)

    def test_an_interrupted_swap_is_undone(self):
        model, reader = tied(), tied()
        optimizer = self.optimizer(model)
        following = self.follow(reader, optimizer)
        self.step(model, optimizer)
        put, calls = shardmesh.torch._follow._put, []

        def interrupted(tensor, value):
            calls.append(tensor)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return put(tensor, value)

        with unittest.mock.patch.object(shardmesh.torch._follow, "_put", interrupted), self.assertRaises(KeyboardInterrupt):
            following.update()
        self.assertEqual(following.step, 0)
        self.assert_at(reader, 0)
        self.assertEqual(following.update(), 1)
        self.assert_at(reader, 1)


class FollowOverLoadsTest(FollowCase):
    """The trainer loads other weights, or goes back to an older state: versions of before are left behind."""

    def followers(self, optimizer, *ways):
        """(reader, following) each."""
        made = []
        for options in ways:
            reader = tied()
            made.append((reader, self.follow(reader, optimizer, **options)))
        return made

    def assert_all_at(self, step, value, followers):
        for reader, following in followers:
            self.assertEqual(following.update(timeout=20), step)
            self.assert_at(reader, value)

    def test_an_older_state(self):
        ways = {"way": "attached"}, {"way": "pulled"}, {"copy": True}
        for publish_every in None, 1:
            with self.subTest(publish_every=publish_every):
                self.an_older_state(publish_every, ways)

    def an_older_state(self, publish_every, ways):
        model = tied()
        optimizer = self.optimizer(model, publish_every=publish_every)
        self.step(model, optimizer, 3)
        old = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        followers = self.followers(optimizer, *ways)
        self.step(model, optimizer, 5)
        for reader, following in followers:
            following.wait(at_least=8, timeout=20)
            self.assert_at(reader, 8)
        epochs = {following.epoch for _, following in followers}
        model.load_state_dict({name: value - 100 for name, value in model.state_dict().items()})
        self.assert_all_at(8, 108, followers)  # the step is the same, the weights are not
        model.load_state_dict(old[0])
        optimizer.load_state_dict(old[1])
        self.assertEqual(optimizer.committed_step, 3)
        self.assert_all_at(3, 3, followers)
        self.assertTrue(all(following.epoch > max(epochs) for _, following in followers))
        for _, following in followers:
            with self.assertRaises(errors.DeadlineExceeded):
                following.wait(at_least=5, timeout=0.1)
        self.step(model, optimizer, 2)
        for reader, following in followers:
            self.assertEqual(following.wait(at_least=5, timeout=20), 5)
            self.assert_at(reader, 5)

    def test_readers_of_before_are_at_the_new_epoch(self):
        model = tied()
        optimizer = self.optimizer(model, publish_every=1)
        self.step(model, optimizer, 3)
        old = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        self.step(model, optimizer, 5)
        job = shardmesh.connect(self.address).job(optimizer.job.name)
        followers = [job.follow(way=way, timeout=20) for way in ("attached", "pulled")]
        held = [next(follower) for follower in followers]
        lease = job.lease(exact=8, ttl=60)
        self.assertEqual(job.pull(at_least=5).step, 8)
        model.load_state_dict(old[0])
        optimizer.load_state_dict(old[1])
        now = job.versions().epoch
        self.assertEqual(lease.epoch, held[0].epoch)
        self.assertGreater(now, lease.epoch)
        with self.assertRaises(errors.DeadlineExceeded):
            job.pull(at_least=5, timeout=0.2)
        with self.assertRaisesRegex(errors.OutOfRange, "published: 3"):
            job.pull(exact=8)
        for follower, before in zip(followers, held):
            version = next(follower)
            self.assertEqual((version.epoch, version.step), (now, 3))
            self.assertEqual((before.step, set(before["1.bias"])), (8, {-8.0}))  # as it was
        with self.assertRaisesRegex(errors.FailedPrecondition, "left the versions of epoch .* behind"):
            lease.renew()
        listed = [one for one in self.shardctl("leases", job.name)["holders"] if "lease" in one]
        self.assertEqual([(one["version"], one["left_behind"]) for one in listed], [(8, True)])
        lease.release()
        self.step(model, optimizer, 2)
        self.assertEqual(job.pull(at_least=5).epoch, now)
        for follower in followers:
            self.assertEqual(next(follower).step, 5)
            follower.close()

    def test_a_job_that_is_made_again(self):
        model = tied()
        optimizer = self.optimizer(model)
        self.step(model, optimizer, 4)
        followers = self.followers(optimizer, {"way": "attached"}, {"way": "pulled"})
        self.assert_all_at(4, 4, followers)
        name = optimizer.job.name
        optimizer.close()
        self.shardctl("delete", name)
        for reader, following in followers:
            with self.assertRaises(errors.NotFound):
                following.wait(timeout=5)
            self.assert_at(reader, 4)
        model = tied()
        again = shardmesh.torch.Optimizer(model, "SGD", lr=1.0, service=self.address, job=name)
        self.addCleanup(again.close)
        self.step(model, again)
        self.assert_all_at(1, 1, followers)


class AwayTest(FollowCase):
    def followed(self):
        """A trained model, its optimizer, a follower's model, and what follows through a line that can be cut."""
        model, other = tied(), tied()
        optimizer = self.optimizer(model)
        line = CutLine(self.address)
        self.addCleanup(line.close)
        following = shardmesh.torch.follow(other, service=line.address, job=optimizer.job.name)
        self.addCleanup(following.close)
        return model, optimizer, other, following, line

    def test_wait_goes_on_while_the_coordinator_is_away(self):
        model, optimizer, other, following, line = self.followed()
        cuts = []

        def cut():
            cuts.append(None)
            if len(cuts) < 5:
                line.arm(1, cut, False)

        for at_least in None, 2:
            self.step(model, optimizer)
            cuts.clear()
            line.arm(1, cut, False)
            self.assertEqual(following.wait(at_least=at_least, timeout=60), optimizer.committed_step)
            self.assertEqual(len(cuts), 5)
            self.assert_at(other, optimizer.committed_step)

    def test_wait_asks_again_while_nobody_answers(self):
        model, optimizer, other, following, _ = self.followed()
        self.step(model, optimizer)
        ask, answers = following._ask, [errors.Unavailable("a worker is away"), errors.DeadlineExceeded("no answer")]

        def asked(*arguments):
            if answers:
                raise answers.pop()
            return ask(*arguments)

        with unittest.mock.patch.object(following, "_ask", asked):
            self.assertEqual(following.wait(timeout=60), 1)
        self.assert_at(other, 1)

    def test_wait_says_who_is_away_when_the_time_is_up(self):
        _, _, other, following, line = self.followed()

        def cut():
            line.arm(1, cut, False)

        cut()
        with self.assertRaises((errors.Unavailable, errors.DeadlineExceeded)):
            following.wait(timeout=0.3)
        line.disarm()
        self.assert_at(other, 0)

    def test_wait_ends_at_once_when_the_job_has_failed(self):
        _, _, _, following, _ = self.followed()
        failed = [JobStatus(following.job.name, "FAILED", 0, [], "a worker is gone", "")]
        error = errors.Unavailable("worker w0 is gone")
        with unittest.mock.patch.object(following, "_client", unittest.mock.Mock(jobs=lambda: failed)):
            with unittest.mock.patch.object(following, "_ask", side_effect=error):
                with self.assertRaises(errors.Unavailable):
                    following.wait(timeout=600)


if __name__ == "__main__":
    unittest.main()
