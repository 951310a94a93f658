#!/usr/bin/env python3
"""torch's modes around an optimizer's own calls change no number: default types and devices, autocast, inference mode."""
import contextlib
import os
import sys
import tempfile
import unittest

import torch
from shardmesh.torch import Optimizer, follow
from torch import nn

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from service import ServiceTest


@contextlib.contextmanager
def default_type(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES = {
    "none": contextlib.nullcontext, "float64": lambda: default_type(torch.float64), "bfloat16": lambda: default_type(torch.bfloat16),
    "meta": lambda: default_device("meta"), "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference_mode": torch.inference_mode,
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), nn.Linear(8, 4))


def backward(model, step):
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    for block in model[0]:
        hidden = block(hidden).tanh()
    model[1](hidden).square().mean().backward()


class ModesTest(ServiceTest):
    def trained(self, mode, job, folder, **options):
        """Of all that an optimizer does within the mode: weights, states, those that go on from a checkpoint and follow."""
        def steps(model, optimizer, numbers):
            for step in numbers:
                backward(model, step)
                with mode():
                    optimizer.step()
                    optimizer.zero_grad()

        model, again, other = net(), net(), net()
        options = {"lr": 1e-2, "service": self.address, "timeout": 10, **options}
        with mode():
            optimizer = Optimizer(model, job=job, **options)
        steps(model, optimizer, range(300 if not options.get("weights") else 3))  # bf16 has no 257
        with mode():
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)
            optimizer.save(folder)
            with follow(other, service=self.address, job=job) as following:
                following.update()
            with optimizer.editing():
                model[1].bias.mul_(0.5)
        steps(model, optimizer, [7])
        with mode():
            resumed = Optimizer(again, job=f"{job}-2", resume=folder, **options)
        steps(again, resumed, [8])
        with mode():
            optimizer.close()
            resumed.close()
        for each in model, again:
            self.assertFalse(any(one.is_inference() or one.is_meta for one in each.parameters()))
            backward(each, 1)
        return [one.state_dict() for one in (model, again, other)], state["state"]

    def test_no_mode_changes_a_number(self):
        for formats in {}, {"weights": "bf16", "states": "dyn8", "gather": "int8_row"}:
            right = None
            for name, mode in MODES.items():
                if formats and name in ("bfloat16", "autocast"):
                    continue
                with self.subTest(name, **formats), tempfile.TemporaryDirectory() as folder:
                    got = self.trained(mode, f"{name.replace('_', '-')}-{len(formats)}", folder, **formats)
                    right = right or got
                    torch.testing.assert_close(got, right, rtol=0, atol=0, equal_nan=True)


if __name__ == "__main__":
    unittest.main()
