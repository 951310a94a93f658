#!/usr/bin/env python3
"""The end of an optimizer: close(), `with`, garbage, the program's exit. A plain model stays, nothing else, and soon."""
import gc
import os
import subprocess
import sys
import time
import unittest
import weakref
from unittest import mock

import torch
from shardmesh import errors
from shardmesh.torch import Optimizer
from shardmesh.torch._machine import _service
from shardmesh.torch import optimizer as optimizers
from torch import nn

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from processes import Leftovers
from service import BIN, ServiceTest

GRACE = 12.0  # of services here: whoever waits for it is noticed
SOON = 5.0
PROGRAM = f"""
import torch, shardmesh.torch
from shardmesh.torch._machine import _service
_service._GRACE_SECONDS = {GRACE}
model = torch.nn.Linear(4, 3)
optimizer = shardmesh.torch.Optimizer(model, workers=2)
for step in range(2):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
print("done", flush=True)
"""
# Rank 0 of two fails in its `with`, while the other waits for its slot.
FAILS = """
import os, sys, time, torch, shardmesh.torch
model = torch.nn.Linear(4, 3)
start = time.monotonic()
try:
    with shardmesh.torch.Optimizer(model, timeout=40) as optimizer:
        start = time.monotonic()
        if os.environ["RANK"] == "0":
            raise ArithmeticError
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
except ArithmeticError:
    assert time.monotonic() - start < 20
except shardmesh.errors.Error:
    pass
"""


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def train(model, optimizer):
    if isinstance(optimizer, Optimizer) and optimizer._started.plan.pulled:
        for seed in optimizer.slots([0]):
            model(torch.randn(2, 32)).square().mean().backward()
    else:
        model(torch.randn(2, 32)).square().mean().backward()
    optimizer.step()


def hooks_of(model):
    of_modules = [
        getattr(module, name) for module in model.modules() for name in vars(module) if name.endswith("_hooks")
    ]
    return [hooks for hooks in (*of_modules, *(p._post_accumulate_grad_hooks for p in model.parameters())) if hooks]


def mapped(name):
    """Of the memory of a job."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return [line for line in maps if name in line]


class CloseTest(ServiceTest):
    def optimizer(self, model, **options):
        options = {"lr": 0.1, "timeout": 20, "service": self.address, "job": self.id(), **options}
        return Optimizer(model, "SGD", **options)

    def assert_plain(self, model):
        self.assertEqual(hooks_of(model), [])
        self.assertNotIn("load_state_dict", vars(model))
        self.assertTrue(all(parameter.grad is None for parameter in model.parameters()))
        model(torch.ones(2, 32)).sum().backward()
        self.assertTrue(all(parameter.grad.any() for parameter in model.parameters()))
        torch.optim.SGD(model.parameters()).step()

    def test_a_model_is_plain_again_and_goes_to_another_optimizer(self):
        for how in {}, {"residency": "bucket"}, {"pulled": True}, {"gather": "int8_row", "deliver": "quantized"}, {"gradients": "bf16"}:
            with self.subTest(**how):
                name = f"close-{'-'.join(map(str, how.values()))}"
                model = Stack()
                optimizer = self.optimizer(model, job=name, **how)
                train(model, optimizer)
                self.assertGreater(len(mapped(name)), 0)
                before = {key: value.clone() for key, value in model.state_dict().items()}
                optimizer.close()
                optimizer.close()
                self.assertEqual(mapped(name), [])
                self.assertTrue(all(torch.equal(value, before[key]) for key, value in model.state_dict().items()))
                self.assert_plain(model)
                with self.optimizer(model, job=name + "2") as another:
                    train(model, another)
                    self.assertEqual(another.committed_step, 1)
                self.assert_plain(model)

    def test_whatever_is_done_with_a_closed_one_says_so(self):
        model = Stack()
        with self.optimizer(model) as optimizer:
            states = optimizer.state_dict()
        for use in (
            optimizer.step, optimizer.zero_grad, optimizer.state_dict, lambda: optimizer.load_state_dict(states),
            lambda: optimizer.editing().__enter__(), optimizer.revert, optimizer.upload, lambda: optimizer.no_sync().__enter__(),
            lambda: optimizer.job, lambda: optimizer.client, lambda: optimizer.committed_step, lambda: optimizer.save("/tmp"),
            lambda: optimizer.step(lambda: self.fail("called")), optimizer.__enter__, lambda: optimizer.tokens(3),
        ):
            with self.assertRaisesRegex(errors.FailedPrecondition, r"this optimizer is closed: close\(\)"):
                use()

    def test_an_optimizer_that_nothing_refers_to_is_closed(self):
        for how in {}, {"residency": "bucket"}:
            with self.subTest(**how):
                model = Stack()
                optimizer = self.optimizer(model, job=f"garbage{len(how)}", **how)
                schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
                train(model, optimizer)
                before = {key: value.clone() for key, value in model.state_dict().items()}
                there = weakref.ref(optimizer)
                del optimizer, schedule
                gc.collect()
                self.assertIsNone(there())
                self.assertTrue(all(torch.equal(value, before[key]) for key, value in model.state_dict().items()))
                self.assert_plain(model)


@unittest.skipUnless(BIN, "SHARDMESH_BIN_DIR is not set to bazel's folder of programs: ./test --lane parity sets it")
class ServiceOfItsOwnTest(Leftovers):
    def setUp(self):
        super().setUp()
        for patch in mock.patch.object(_service, "_GRACE_SECONDS", GRACE), mock.patch.dict(os.environ, self.environment):
            patch.start()
            self.addCleanup(patch.stop)

    def test_it_ends_soon_and_whole(self):
        for end in Optimizer.close, None:
            with self.subTest(end):
                model = Stack()
                optimizer = Optimizer(model, workers=2)
                train(model, optimizer)
                start = time.monotonic()
                if end is not None:
                    end(optimizer)
                del optimizer
                gc.collect()
                self.assertLess(time.monotonic() - start, SOON)
                self.assertEqual([line for line in self.processes() if "shardmesh-" in line or "shardctl" in line], [])

    def test_a_start_that_fails_leaves_nothing(self):
        model = Stack()
        with mock.patch.object(optimizers, "Guard", side_effect=ArithmeticError), self.assertRaises(ArithmeticError):
            Optimizer(model)
        self.assertEqual([line for line in self.processes() if "shardmesh-" in line or "shardctl" in line], [])

    def test_a_program_ends_soon(self):
        with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as program:
            self.assertEqual(program.stdout.readline(), "done\n")
            start = time.monotonic()
            self.assertEqual(program.wait(60), 0)
        self.assertLess(time.monotonic() - start, SOON)
        self.assert_nothing_left(SOON)

    def test_a_rank_that_fails_does_not_wait_for_the_others(self):
        with open(os.path.join(self.scratch, "program.py"), "w", encoding="utf-8") as file:
            file.write(FAILS)
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
             "localhost:0", file.name], capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        os.remove(file.name)
        self.assert_nothing_left()


if __name__ == "__main__":
    unittest.main()
