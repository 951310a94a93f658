#!/usr/bin/env python3
"""shardmesh.checkpoint beside the real fsspec and torch.distributed.checkpoint: places that fail at every operation, and
round trips of weights and optimizer states."""
import json
import os
import shutil
import tempfile
import unittest

import fsspec
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from shardmesh import checkpoint, errors


def model_of(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3, bias=False))


def trained(seed=1):
    model = model_of(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, betas=(0.8, 0.9))
    for _ in range(3):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class Failing(MemoryFileSystem):
    """Memory that fails at one operation: the `left`-th change from now."""

    protocol = "failing"
    store, pseudo_dirs, left = {}, [""], None
    cachable = False

    def _count(self):
        if Failing.left is not None:
            Failing.left -= 1
            if Failing.left < 0:
                raise OSError("the place is gone")

    def put_file(self, *args, **kwargs):
        self._count()
        super().put_file(*args, **kwargs)

    def pipe_file(self, path, value, **kwargs):
        if Failing.left == 0:  # half of it is there
            super().pipe_file(path, value[: len(value) // 2], **kwargs)
        self._count()
        super().pipe_file(path, value, **kwargs)

    def rm_file(self, path):
        self._count()
        super().rm_file(path)

    def makedirs(self, path, exist_ok=False):
        self._count()
        super().makedirs(path, exist_ok=exist_ok)


fsspec.register_implementation("failing", Failing, clobber=True)


class Folders(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        Failing.store.clear()
        Failing.left = None

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def save(self, step, states="float32", seed=1, saved=None):
        """A checkpoint's folder, of a model and AdamW after 3 steps."""
        model, optimizer = trained(seed)
        folder = self.path("local", f"step-{step:013d}")
        os.makedirs(folder)
        weights = {name: value.detach() for name, value in model.named_parameters()}
        state = {f"{name}.{key}": optimizer.state[value][key] for name, value in model.named_parameters()
                 for key in ("exp_avg", "exp_avg_sq")}
        if states == "quantized":
            state = {name: torch.zeros_like(value, dtype=torch.uint8) for name, value in state.items()}
        safetensors.torch.save_file(weights, folder + "/model.safetensors", metadata={"format": "pt"})
        safetensors.torch.save_file(state, folder + "/states.safetensors", metadata={"format": "pt"})
        files = [{"name": name, "bytes": os.path.getsize(f"{folder}/{name}")} for name in sorted(os.listdir(folder))]
        job = {"name": "j", "optimizer": {"kind": "OPTIMIZER_KIND_ADAMW", "learning_rate": 0.25, "beta1": 0.8, "beta2": 0.9,
                                             "epsilon": 1e-8, "weight_decay": 0.5}}
        with open(folder + "/manifest.json", "w", encoding="utf-8") as file:
            json.dump({"format": "shardmesh checkpoint", "version": 1, "step": step, "job": job, "files": files,
                       **({"saved": saved} if saved else {})}, file)
        return folder, model, optimizer


class Remote(Folders):
    def steps(self, url):
        return [found.step for found in checkpoint.checkpoints(url)]

    def assert_same_folder(self, ours, theirs):
        self.assertEqual(sorted(os.listdir(ours)), sorted(os.listdir(theirs)))
        for name in os.listdir(theirs):
            with open(os.path.join(ours, name), "rb") as a, open(os.path.join(theirs, name), "rb") as b:
                self.assertEqual(a.read(), b.read(), name)

    def test_there_and_back(self):
        for url in ("failing://run", "file://" + self.path("remote")):
            with self.subTest(url):
                shutil.rmtree(self.path("local"), ignore_errors=True)
                shutil.rmtree(self.path("back"), ignore_errors=True)
                told = []
                for step in (10, 20):
                    checkpoint.upload(self.save(step, seed=step)[0], url, progress=lambda *told_now: told.append(told_now))
                self.assertEqual(told[-1][0], told[-1][1])
                self.assertEqual(self.steps(url), [10, 20])
                self.assert_same_folder(checkpoint.download(url, self.path("back")), self.path("local", f"step-{20:013d}"))
                self.assert_same_folder(checkpoint.download(url, self.path("back"), step=10),
                                        self.path("local", f"step-{10:013d}"))
                self.assertEqual(len(os.listdir(self.path("back"))), 2)
                with self.assertRaisesRegex(errors.AlreadyExists, "is there already"):
                    checkpoint.upload(self.path("local", f"step-{20:013d}"), url)
                with self.assertRaisesRegex(errors.NotFound, "of step 15"):
                    checkpoint.download(url, self.path("back"), step=15)

    def test_kept_by_a_rule(self):
        for step in (100, 150, 200, 250, 300):
            checkpoint.upload(self.save(step)[0], "failing://run", keep_last=2, keep_every=100)
        self.assertEqual(self.steps("failing://run"), [100, 200, 250, 300])

    def test_the_order_is_that_of_saving(self):
        for saved, step in enumerate((100, 300, 200), 1):
            checkpoint.upload(self.save(step, saved=saved)[0], "failing://run", keep_last=2)
        self.assertEqual(self.steps("failing://run"), [300, 200])
        self.assertEqual(os.path.basename(checkpoint.download("failing://run", self.path("back"))), f"step-{200:013d}")

    def test_a_place_that_fails_at_every_operation(self):
        first, second = self.save(1)[0], self.save(2)[0]
        for failing_at in range(100):
            Failing.store.clear()
            Failing.left = None
            checkpoint.upload(first, "failing://run")
            Failing.left = failing_at
            try:
                checkpoint.upload(second, "failing://run", keep_last=1)
            except (OSError, errors.Unavailable):
                Failing.left = None
                self.assertIn(self.steps("failing://run"), ([1], [1, 2], [2]), failing_at)
                self.assert_same_folder(checkpoint.download("failing://run", self.path("back", str(failing_at))),
                                        self.path("local", f"step-{self.steps('failing://run')[-1]:013d}"))
                if self.steps("failing://run")[-1] == 1:
                    checkpoint.upload(second, "failing://run", keep_last=1)
                    self.assertEqual(self.steps("failing://run"), [2])
                continue
            self.assertGreater(failing_at, 3)
            Failing.left = None
            self.assertEqual(self.steps("failing://run"), [2])
            return
        self.fail("an upload of two files takes more than 100 operations")

    def test_no_checkpoint(self):
        folder = self.save(1)[0]
        with self.assertRaisesRegex(errors.InvalidArgument, "is no checkpoint"):
            checkpoint.upload(shutil.copytree(folder, self.path("other")), "failing://run")
        with open(folder + "/states.safetensors", "ab") as file:
            file.write(b"x")
        with self.assertRaisesRegex(errors.InvalidArgument, "another size"):
            checkpoint.upload(folder, "failing://run")
        self.assertEqual(self.steps("failing://run"), [])
        with self.assertRaisesRegex(errors.NotFound, "no whole checkpoint"):
            checkpoint.download("failing://run", self.path("back"))


class Dcp(Folders):
    def test_torch_loads_what_is_written(self):
        folder, model, optimizer = self.save(3)
        checkpoint.to_dcp(folder, self.path("dcp"))
        other = model_of(99)
        other_optimizer = torch.optim.AdamW(other.parameters(), lr=1.0)
        weights, states = get_state_dict(other, other_optimizer)
        everything = {"model": weights, "optim": states}
        dcp.load(everything, checkpoint_id=self.path("dcp"), no_dist=True)
        set_state_dict(other, other_optimizer, model_state_dict=everything["model"], optim_state_dict=everything["optim"])
        for ours, theirs in zip(other.parameters(), model.parameters()):
            self.assertTrue(torch.equal(ours, theirs))
            for key in ("exp_avg", "exp_avg_sq", "step"):
                self.assertTrue(torch.equal(other_optimizer.state[ours][key], optimizer.state[theirs][key]), key)
        self.assertEqual(other_optimizer.param_groups[0]["lr"], 0.25)
        self.assertEqual(tuple(other_optimizer.param_groups[0]["betas"]), (0.8, 0.9))
        self.assertEqual(other_optimizer.param_groups[0]["weight_decay"], 0.5)
        with self.assertRaisesRegex(errors.AlreadyExists, "has files"):
            checkpoint.to_dcp(folder, self.path("dcp"))

    def test_quantized_states(self):
        folder = self.save(3, states="quantized")[0]
        with self.assertRaisesRegex(errors.InvalidArgument, "does not say what they stand for"):
            checkpoint.to_dcp(folder, self.path("no"))
        checkpoint.to_dcp(folder, self.path("none"), states="none")
        checkpoint.to_dcp(folder, self.path("stored"), states="stored")
        names = dcp.FileSystemReader(self.path("stored")).read_metadata().state_dict_metadata
        self.assertIn("optim.state.0.weight.exp_avg", names)
        self.assertNotIn("optim.state.0.weight.exp_avg",
                         dcp.FileSystemReader(self.path("none")).read_metadata().state_dict_metadata)

    def test_what_torch_saved_is_read(self):
        model, optimizer = trained()
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=self.path("dcp"), no_dist=True)
        names = checkpoint.from_dcp(self.path("dcp"), self.path("model"))
        read = safetensors.torch.load_file(self.path("model", "model.safetensors"))
        self.assertEqual(sorted(names), sorted(read))
        self.assertEqual(set(read), set(model.state_dict()))
        for name, value in model.state_dict().items():
            self.assertTrue(torch.equal(read[name], value), name)
        with self.assertRaisesRegex(errors.InvalidArgument, "begin with: model, optim"):
            checkpoint.from_dcp(self.path("dcp"), self.path("no"), prefix="net.")
        with self.assertRaisesRegex(errors.AlreadyExists, "is there already"):
            checkpoint.from_dcp(self.path("dcp"), self.path("model"))


if __name__ == "__main__":
    unittest.main()
