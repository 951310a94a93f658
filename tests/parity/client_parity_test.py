#!/usr/bin/env python3
"""shardmesh.client beside the real PyTorch: tensors over a version's memory, modules that take whole versions, and both
in one process, imported in any order. Needs the programs:
SHARDMESH_BIN_DIR is bazel's folder of them (`bazel info bazel-bin`)."""
import itertools
import os
import subprocess
import sys
import unittest
import warnings

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "testing"))
BIN = os.environ.get("SHARDMESH_BIN_DIR", "")

if BIN:
    import shardmesh
    from counting import Reading, assert_whole
    from shardmesh.client import LoadMismatch
else:
    Reading = unittest.TestCase


class Holder(torch.nn.Module):
    def __init__(self, *shape, dtype=torch.float32):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full(shape, -1.0, dtype=dtype))


class Model(torch.nn.Module):
    """Has the parameters of the job that counts."""

    def __init__(self, tied=True, dtype=torch.float32):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((500, 400), -1.0, dtype=dtype))
        self.embed, self.head = Holder(64, 48, dtype=torch.bfloat16), Holder(64, 48, dtype=torch.bfloat16)
        self.rows, self.four = Holder(128, 128), Holder(100, 70)
        if tied:
            self.head.w = self.embed.w

    def forward(self, x):
        return x @ self.w


def values(model):
    return {name: float(value.detach().double().mean()) for name, value in model.named_parameters()}


@unittest.skipUnless(BIN, "SHARDMESH_BIN_DIR is not set to bazel's folder of programs: ./test --lane parity sets it")
class Tensors(Reading):
    def test_tensors_lie_in_the_version_memory(self):
        job, trainer = self.counting(to=3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with job.hold(exact=3) as version:
                assert_whole(self, version)
                weights, half, rows = version.torch("_orig_mod.w"), version.torch("embed.w"), version.torch("rows.w")
                copied = version.torch("embed.w", copy=True)
                self.assertEqual(weights.data_ptr(), version["w"].ctypes.data)
                self.assertEqual(half.data_ptr(), version["embed.w"].ctypes.data)
                self.assertNotEqual(copied.data_ptr(), half.data_ptr())
        trainer.to(30)
        self.assertEqual((weights.dtype, weights.shape), (torch.float32, (500, 400)))
        self.assertEqual((half.dtype, half.shape), (torch.bfloat16, (64, 48)))
        self.assertTrue((weights == 3).all() and (half == 3).all() and (copied == 3).all())
        self.assertEqual(rows.dtype, torch.float32)
        torch.testing.assert_close(rows, torch.full((128, 128), 3.0), rtol=1 / 16, atol=0)

    def test_module_takes_versions_in_place(self):
        job, trainer = self.counting()
        for tied, dtype in ((True, torch.float32), (False, torch.float64), (True, torch.bfloat16)):
            model = Model(tied, dtype)
            places = [value.data_ptr() for value in model.parameters()]
            wrapped = torch.compile(model)
            for version in job.follow():
                version.load_into(wrapped)
                for name, value in values(model).items():
                    self.assertAlmostEqual(value, version.step, delta=version.step / 16 if name == "rows.w" else 0)
                trainer.to(version.step + 1)
                if version.step % 3 == 2:
                    break
            self.assertEqual([value.data_ptr() for value in model.parameters()], places)
            self.assertTrue(all(value.requires_grad and value.grad is None for value in model.parameters()))

    def test_what_does_not_fit_is_said_before_anything_is_written(self):
        job, _ = self.counting(to=3)
        version = job.pull()
        model = Model()
        model.w = torch.nn.Parameter(torch.full((400, 500), -1.0))
        model.more, model.number = Holder(2), torch.nn.Parameter(torch.tensor([1]), requires_grad=False)
        del model.four
        model.rows.w = torch.nn.Parameter(torch.empty(128, 128, device="meta"))
        with self.assertRaises(LoadMismatch) as caught:
            version.load_into(torch.compile(model))
        self.assertIsInstance(caught.exception, shardmesh.errors.InvalidArgument)
        self.assertEqual(caught.exception.missing, ["_orig_mod.number", "_orig_mod.more.w"])
        self.assertEqual(caught.exception.unexpected, ["four.w"])
        self.assertEqual([text.split()[0] for text in caught.exception.mismatched], ["w", "rows.w"])
        self.assertIn("of (400, 500) in the module, of (500, 400) in the version", str(caught.exception))
        self.assertTrue((model.embed.w == -1).all())

    def test_buffers_are_written_where_the_version_has_them(self):
        job, _ = self.counting(to=3)
        model = Model()
        del model.w
        model.register_buffer("w", torch.zeros(500, 400))
        model.register_buffer("mask", torch.zeros(3))
        job.pull().load_into(model)
        self.assertTrue((model.w == 3).all())
        self.assertTrue((model.mask == 0).all())

    def test_imports_in_any_order(self):
        self.counting(to=1)
        uses = {
            "torch": "import torch; assert float(torch.ones(3) @ torch.ones(3)) == 3",
            "client": f"import shardmesh; assert shardmesh.connect({self.cluster.address!r}).jobs()",
            "transformers": "import transformers",
        }
        for order in itertools.permutations(uses, 2):
            if "client" in order:
                with self.subTest(order):
                    self.run_python([uses[name] for name in order] + [uses[name] for name in order])

    def run_python(self, lines):
        command = [sys.executable, "-c", "\n".join(lines)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        self.assertEqual((done.returncode, done.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
