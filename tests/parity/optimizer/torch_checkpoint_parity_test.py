#!/usr/bin/env python3
"""What people do with Optimizer.save() and resume=: models with buffers, fewer and more workers, modules that are called
like wrappers, folders, twice at one step."""
import json
import os
import sys
import time
import unittest
from unittest import mock

import safetensors.torch
import shardmesh.torch
import torch
from shardmesh import _dcp, checkpoint, errors
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import ranks  # noqa: E402
from service import ServiceTest  # noqa: E402


class Statistics(nn.Module):
    """Buffers of many kinds."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        for name, value in {
            "mask": torch.tensor([True, False, True]), "doubles": torch.rand(3, 2, dtype=torch.float64),
            "wave": torch.randn(2, dtype=torch.complex64), "long_wave": torch.randn(2, dtype=torch.complex128),
            "scalar": torch.tensor(1.5), "empty": torch.empty(0, 3), "halves": torch.randn(3).bfloat16(),
            "columns": torch.randn(2, 3).t(), "nothing": None,
        }.items():
            self.register_buffer(name, value)
        self.register_buffer("again", self.doubles)
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x):
        self.doubles += 1
        self.scalar += 1
        return self.layers(x)


class Blocks(nn.Module):
    """A block is what bucket residency gathers at once."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(model, optimizer, steps, columns=6):
    for step in steps:
        model(torch.randn(8, columns, generator=torch.Generator().manual_seed(step)) * 3 + 2).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def on_ranks(address, folder):
    """Of two ranks, each of which sees other batches: what both have after the run is resumed, and what rank 0 saved."""
    def run(rank, world):
        model = Statistics()
        with shardmesh.torch.Optimizer(model, lr=1e-2, service=address, job="ranks") as optimizer:
            train(model, optimizer, [rank])
            means = model.layers[1].running_mean.tolist()
            if rank == 0:
                optimizer.save(folder)
            train(model, optimizer, [rank])
        again = Statistics()
        with shardmesh.torch.Optimizer(again, lr=1e-2, service=address, job="ranks-again", resume=folder):
            return means, again.layers[1].running_mean.tolist()
    return ranks.fork(2, run, seconds=60)


class CheckpointTest(ServiceTest):
    def optimizer(self, model, job=None, **options):
        optimizer = shardmesh.torch.Optimizer(
            model, lr=1e-2, service=self.address, job=job or self.id().rpartition(".")[2], **{"timeout": 20, **options})
        self.addCleanup(optimizer.close)
        return optimizer

    def saved(self, model, name=None, steps=2, columns=6, **options):
        optimizer = self.optimizer(model, **options)
        train(model, optimizer, range(steps), columns)
        return optimizer, optimizer.save(self.path(name or self.id().rpartition(".")[2])).path

    def assert_equal_states(self, one, other):
        one, other = one.state_dict(), other.state_dict()
        self.assertEqual(list(one), list(other))
        for name in one:
            self.assertEqual(one[name].dtype, other[name].dtype, name)
            self.assertTrue(torch.equal(one[name], other[name]), name)

    # -- buffers ----------------------------------------------------------------------------------------------------

    def test_buffers_come_back(self):
        for residency in "full", "bucket":
            with self.subTest(residency):
                model = Statistics()
                optimizer, path = self.saved(model, residency, job=residency, residency=residency)
                again = torch.compile(Statistics(), backend="eager")
                inside = again.doubles
                resumed = self.optimizer(again, f"{residency}-again", residency=residency, resume=path)
                self.assertIs(again.doubles, inside)
                self.assertIs(again.again, inside)
                for one in (model, optimizer), (again, resumed):
                    train(*one, range(2, 4))
                    one[1].close()
                self.assert_equal_states(model, again._orig_mod)
                x = torch.randn(4, 6)
                self.assertTrue(torch.equal(model.eval()(x), again.eval()(x)))

    def test_torch_loads_the_file_strictly(self):
        model = torch.compile(Statistics(), backend="eager")
        _, path = self.saved(model)
        tensors = safetensors.torch.load_file(path + "/model.safetensors")
        bare = Statistics()
        self.assertEqual(sorted(tensors), sorted(bare.state_dict()))
        self.assertEqual(list(tensors["long_wave"].shape), [2, 2])  # which files have no dtype for
        tensors["long_wave"] = torch.view_as_complex(tensors["long_wave"])
        bare.load_state_dict(tensors, strict=True)
        self.assert_equal_states(model._orig_mod, bare)
        os.makedirs(self.path("dcp"))
        checkpoint.to_dcp(path, self.path("dcp"), states="none")
        checkpoint.from_dcp(self.path("dcp"), self.path("from-dcp"))
        there = safetensors.torch.load_file(self.path("from-dcp") + "/model.safetensors")
        self.assertTrue(torch.equal(there["layers.1.running_var"], tensors["layers.1.running_var"]))
        checkpoint.upload(path, "file://" + self.path("remote"))
        copied = checkpoint.download("file://" + self.path("remote"), self.path("copied"))
        again = Statistics()
        self.optimizer(again, "copied", resume=copied)
        self.assert_equal_states(model._orig_mod, again)

    def test_another_model_s_buffers_are_refused(self):
        _, path = self.saved(Statistics())
        other = Statistics()
        other.register_buffer("more", torch.ones(1))
        other.mask = torch.ones(4, dtype=torch.bool)
        del other.scalar
        with self.assertRaises(errors.InvalidArgument) as caught:
            self.optimizer(other, "other", resume=path)
        for words in "not in the checkpoint: more", "not in the model: scalar", "mask BOOL [3] there, BOOL [4] here":
            self.assertIn(words, str(caught.exception))
        with self.assertRaisesRegex(errors.InvalidArgument, "parameters and no model; make it with the model"):
            self.optimizer(Statistics().named_parameters(), "other", resume=path)
        with open(path + "/model.safetensors", "r+b") as file:
            file.seek(-1, 2)
            file.write(b"\xa5")
        with self.assertRaisesRegex(errors.DataLoss, "buffer .* is not what was saved"):
            self.optimizer(Statistics(), "other", resume=path)
        self.assertNotIn("other", [job.name for job in shardmesh.connect(self.address).jobs()])

    def test_what_a_checkpoint_does_not_have_is_said(self):
        model = Statistics()
        optimizer, _ = self.saved(model)
        of_shardctl = self.shardctl("checkpoint", optimizer.job.name, self.path("of-shardctl"))["path"]
        with self.assertLogs("shardmesh.torch", "WARNING") as log:
            self.optimizer(Statistics(), "of-shardctl", resume=of_shardctl)
        self.assertRegex(log.output[0], "has no buffers: .*: mask, doubles, .* and 7 more")
        with self.assertLogs("shardmesh.torch", "WARNING") as log:
            shardmesh.torch.follow(Statistics(), service=self.address, job=optimizer.job.name).close()
        self.assertIn("mask, doubles", log.output[0])
        model = Statistics()
        with self.assertLogs("shardmesh.torch", "WARNING") as log:
            self.saved(model.named_parameters(), "no-model", steps=0, job="no-model")
        self.assertIn("the optimizer was given parameters and no model", log.output[0])
        model = Statistics()
        type(model).get_extra_state = lambda self: "more"
        self.addCleanup(delattr, type(model), "get_extra_state")
        model.register_buffer("sparse", torch.ones(2, 2).to_sparse())
        with self.assertLogs("shardmesh.torch", "WARNING") as log:
            with self.assertRaisesRegex(errors.InvalidArgument, r"cannot hold the buffers sparse \(torch.float32"):
                self.saved(model, "sparse", job="sparse", steps=0)
        self.assertIn("get_extra_state()", log.output[0])

    def test_a_job_with_other_weights_keeps_its_buffers(self):
        model = Statistics()
        optimizer, _ = self.saved(model)
        means = model.layers[1].running_mean.clone()
        with optimizer.editing():
            model.layers[0].weight.mul_(2)
        optimizer.upload()
        optimizer.load_state_dict(optimizer.state_dict())
        self.assertTrue(torch.equal(model.layers[1].running_mean, means))

    def test_ranks_get_those_of_the_rank_that_saved(self):
        said = ranks.program(self, __file__, self.address, self.path("ranks"), seconds=90)
        (first, resumed), (second, other) = said
        self.assertNotEqual(first, second)
        self.assertEqual(resumed, first)
        self.assertEqual(other, first)

    # -- meshes -----------------------------------------------------------------------------------------------------

    def test_a_run_resumes_on_the_workers_that_there_are(self):
        model = nn.Linear(6, 4)
        start = {name: value.clone() for name, value in model.state_dict().items()}
        with shardmesh.torch.Optimizer(model, lr=1e-2, workers=3) as optimizer:
            train(model, optimizer, range(2))
            optimizer.save(self.path("three"))
            train(model, optimizer, range(2, 4))
        for options, mesh in (({"service": self.address}, "fsdp=2"), ({}, "fsdp=1"), ({"workers": 4}, "fsdp=4")):
            again = nn.Linear(6, 4)
            again.load_state_dict(start)
            began = time.monotonic()
            with shardmesh.torch.Optimizer(again, lr=1e-2, job="fewer", timeout=20, resume=self.path("three"),
                                           **options) as optimizer:
                self.assertEqual(optimizer.job.mesh, mesh)
                train(again, optimizer, range(2, 4))
            self.assertLess(time.monotonic() - began, 20)
            self.assertTrue(torch.equal(again.weight, model.weight))

    def test_a_run_resumes_with_the_other_residency(self):
        """Each way, with buckets of the blocks of the model that resumes; and it can be joined like one that began so."""
        whole = Blocks()
        start = {name: value.clone() for name, value in whole.state_dict().items()}
        for before, after in (("full", "bucket"), ("bucket", "full"), ("bucket", "bucket")):
            with self.subTest(before=before, after=after):
                whole.load_state_dict(start)
                name = f"{before}-{after}"
                optimizer = self.optimizer(whole, name, residency=before)
                train(whole, optimizer, range(2))
                optimizer.save(self.path(name))
                train(whole, optimizer, range(2, 4))
                optimizer.close()
                again = Blocks()
                resumed = self.optimizer(again, f"{name}-again", resume=self.path(name), residency=after)
                train(again, resumed, range(2, 3))
                with torch._C.DisableTorchFunction():  # no use of it, for which it would be gathered
                    absent = again.blocks[0][0].weight.detach().isnan().any()
                self.assertEqual(bool(absent), after == "bucket")
                resumed.close()
                joined = self.optimizer(again, f"{name}-again", residency=after, join=True)
                train(again, joined, range(3, 4))
                joined.close()
                self.assert_equal_states(whole, again)

    def test_ranks_that_resume_with_other_residencies_are_told(self):
        optimizer, path = self.saved(Blocks())
        optimizer.close()
        other = self.optimizer(Blocks(), "mixed", resume=path, residency="bucket")
        with mock.patch.dict(os.environ, {"RANK": "1", "WORLD_SIZE": "2"}):
            with self.assertRaisesRegex(errors.InvalidArgument, "rank 1 says residency='full', and rank 0 resumed job "
                                                                "'mixed' with residency='bucket'"):
                self.optimizer(Blocks(), "mixed", resume=path, residency="full", slots=2)
        other.close()

    def test_a_mesh_that_needs_more_workers_ends_at_the_timeout(self):
        _, path = self.saved(Statistics())
        began = time.monotonic()
        with self.assertRaisesRegex(errors.DeadlineExceeded, "it waits for 5 live workers on one host"):
            self.optimizer(Statistics(), "more", resume=path, mesh="fsdp=5", timeout=0.5)
        self.assertLess(time.monotonic() - began, 10)
        with self.assertRaisesRegex(errors.InvalidArgument, "needs 2 workers, and the service .* has 1"):
            shardmesh.torch.Optimizer(Statistics(), lr=1e-2, resume=path, mesh="fsdp=2")

    # -- names ------------------------------------------------------------------------------------------------------

    def test_modules_that_are_called_like_wrappers(self):
        for key in "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module":
            with self.subTest(key):
                models = [nn.ModuleDict({key: nn.BatchNorm1d(3), "_": nn.ModuleDict({key: nn.Linear(3, 3)})})
                          for _ in range(3)]
                for model in models:
                    model.forward = lambda x, model=model: model["_"][key](model[key](x))
                optimizer, path = self.saved(models[0], key, job=key, columns=3)
                state, weights = optimizer.state_dict(), models[0].state_dict()
                resumed = self.optimizer(models[1], f"{key}-again", resume=path)
                loaded = self.optimizer(models[2], f"{key}-loaded")
                models[2].load_state_dict(weights)
                loaded.load_state_dict(state)
                for model, one in zip(models, (optimizer, resumed, loaded)):
                    train(model, one, range(2, 4), columns=3)
                self.assert_equal_states(*models[:2])
                self.assert_equal_states(models[0], models[2])
                resumed.job.publish()
                self.assertEqual(len(resumed.job.pull()["_." + key + ".weight"]), 3)
                self.shardctl("export", f"{key}-again", self.path(f"export-{key}"))

    # -- folders ----------------------------------------------------------------------------------------------------

    def test_folders_are_made_and_a_step_is_saved_once(self):
        model = nn.Linear(6, 4)
        optimizer = self.optimizer(model)
        folder = self.path("runs", "one", "ckpt")
        first = optimizer.save(folder)
        self.assertFalse(first.already_there)
        again = optimizer.save(folder)
        self.assertTrue(again.already_there)
        self.assertEqual(again[:4], first[:4])
        self.assertEqual(os.listdir(folder), [os.path.basename(first.path)])
        other = self.optimizer(nn.Linear(6, 4), "other-run")
        with self.assertRaisesRegex(errors.AlreadyExists, "step 0 is saved already.*with other weights or states"):
            other.save(folder)
        with open(first.path + "/manifest.json", encoding="utf-8") as file:
            self.assertNotIn("buffers", json.load(file))
        self.assertEqual(set(_dcp._load(first.path, "model")), {"weight", "bias"})

    def test_after_going_back_the_checkpoint_that_was_saved_last_is_the_newest(self):
        model, folder = nn.Linear(6, 4), self.path("gone-back")
        optimizer = self.optimizer(model)
        train(model, optimizer, range(3))
        third = optimizer.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
        train(model, optimizer, range(3, 8))
        optimizer.save(folder)
        model.load_state_dict(third[1])
        optimizer.load_state_dict(third[0])
        train(model, optimizer, range(20, 22))
        fifth = optimizer.save(folder, keep_last=1)
        self.assertEqual([os.path.join(folder, name) for name in os.listdir(folder)], [fifth.path])
        train(model, optimizer, range(22, 26))
        ninth = optimizer.save(folder)
        self.assertEqual((fifth.step, ninth.step), (5, 9))
        model.load_state_dict(third[1])
        optimizer.load_state_dict(third[0])
        train(model, optimizer, range(20, 22))
        self.assertTrue(optimizer.save(folder).already_there)  # and the newest again, since that is what training has
        again = nn.Linear(6, 4)
        with self.optimizer(again, "gone-on", resume=folder):
            self.assert_equal_states(again, model)


if __name__ == "__main__":
    if len(sys.argv) == 3 and ":" in sys.argv[1]:
        ranks.report(on_ranks(*sys.argv[1:]))
    else:
        unittest.main()
