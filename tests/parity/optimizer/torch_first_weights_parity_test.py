#!/usr/bin/env python3
"""Weights that are not finite: of trained parameters they are refused by name before anything starts; frozen ones, such as
masks of -inf, stay what they are through training, loads, edits, checkpoints and readers."""
import math
import os
import sys
import tempfile
import unittest
from unittest import mock

import torch
from shardmesh import errors
from shardmesh.torch import Optimizer, follow
from shardmesh.torch._machine import _service
from torch import nn

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from service import ServiceTest


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(32, 32)])
        self.mask = nn.Parameter(torch.zeros(32, 32).masked_fill_(torch.ones(32, 32).triu(1) > 0, -math.inf), requires_grad=False)
        self.unset = nn.Parameter(torch.full((3,), math.nan), requires_grad=False)

    def forward(self, x):
        return torch.softmax(self.layers[0](x) + self.mask, -1)


def backward(model, seed=0):
    model(torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)))[:, 0].square().sum().backward()


class NotFiniteTest(ServiceTest):
    def optimizer(self, model, *, what="", **options):
        optimizer = Optimizer(model, "SGD", **{"lr": 0.1, "timeout": 10, "service": self.address, "job": f"{self.id()}-{what}", **options})
        self.addCleanup(optimizer.close)
        return optimizer

    def train(self, model, optimizer):
        before = model.layers[0].weight.detach().clone() if optimizer._residence is None else None
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        self.assertFalse(optimizer.last.skipped)
        if before is not None:
            self.assertFalse(torch.equal(before, model.layers[0].weight))
        state = model.state_dict()
        self.assertTrue(all(torch.isfinite(state[f"layers.0.{name}"]).all() for name in ("weight", "bias")))
        self.assertTrue(torch.equal(state["mask"], Masked().mask))
        self.assertTrue(state["unset"].isnan().all())

    def test_trained_parameters_are_named_before_anything_starts(self):
        for value, said in (math.nan, "nan"), (-math.inf, "-inf"):
            model = Masked()
            with torch.no_grad():
                model.layers[0].weight[1, 2] = value
            what = rf'parameter "layers.0.weight" has weights that are not finite, such as {said} at \[1, 2\].*requires_grad_\(False\)'
            with mock.patch.object(_service, "find", side_effect=AssertionError("started")):
                with self.assertRaisesRegex(errors.InvalidArgument, what):
                    Optimizer(model, "SGD", lr=0.1)
            with self.assertRaisesRegex(errors.InvalidArgument, what):
                self.optimizer(model)
            model.layers[0].weight.requires_grad_(False)  # as the message says
            model.layers[0].weight.detach()[1, 2] = 0
            self.train_a_bias(model)

    def train_a_bias(self, model):
        optimizer = self.optimizer(model, what="bias")
        backward(model)
        optimizer.step()
        self.assertEqual(optimizer.committed_step, 1)
        optimizer.close()
        self.shardctl("delete", optimizer._started.name)

    def test_a_sum_that_is_too_large_is_no_weight(self):
        model = nn.Linear(4, 4)
        with torch.no_grad():
            model.weight.fill_(3e38)
        self.optimizer(model)

    def test_finite_weights_that_a_format_makes_infinite_are_named(self):
        largest, formats = torch.finfo(torch.float32).max, [{"weights": one} for one in ("bf16", "bf16_sr", "bf16+16", "bf16+8sr")]
        for number, (options, value, said) in enumerate((
            *((options, -largest, f'weights="{options["weights"]}"'.replace("+", r"\+")) for options in formats),
            ({"weights": "bf16_sr"}, 3.4e38, 'weights="bf16_sr"'), ({"weights": "int8_row"}, largest, 'weights="int8_row"'),
            ({"gather": "fp8_row"}, largest, 'gather="fp8_row"'), ({"gather": "mx8"}, largest, 'gather="mx8"'),
            ({"gather": "int8_row", "residency": "bucket"}, largest, 'gather="int8_row"'),
            ({"weights": "bf16", "residency": "bucket"}, 3.4e38, 'weights="bf16"'),
        )):
            with self.subTest(**options):
                said = rf'"layers\.0\.weight" has weights that are infinite with {said}, such as .*e\+38 at \[1, 2\]; '
                model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(32, 32)])})
                with torch.no_grad():
                    model.layers[0].weight[1, 2] = value
                with mock.patch.object(_service, "find", side_effect=AssertionError("started")):
                    with self.assertRaisesRegex(errors.InvalidArgument, said + "give it finite"):
                        Optimizer(model, "SGD", lr=0.1, **options)
                with self.assertRaisesRegex(errors.InvalidArgument, said):
                    self.optimizer(model, what=f"{number}-first", **options)
                bad = {name: one.clone() for name, one in model.state_dict().items()}
                with torch.no_grad():
                    model.layers[0].weight[1, 2] = 1.0
                optimizer = self.optimizer(model, what=number, **options)
                before = {name: one.clone() for name, one in model.state_dict().items()}
                with self.assertRaisesRegex(errors.InvalidArgument, said + "load or write finite weights"):
                    model.load_state_dict(bad)
                self.assertTrue(torch.equal(model.state_dict()["layers.0.weight"], before["layers.0.weight"]))
                with self.assertRaisesRegex(errors.InvalidArgument, said):
                    with optimizer.editing():
                        model.layers[0].weight[1, 2] = value
                    optimizer.upload()
                optimizer.close()

    def test_frozen_finite_weights_become_what_the_format_makes_of_them(self):
        model = Masked()
        model.mask.data.masked_fill_(model.mask == -math.inf, torch.finfo(torch.float32).min)
        optimizer = self.optimizer(model, weights="bf16")
        self.assertTrue(torch.equal(model.mask, model.mask.bfloat16().float()))
        self.train(model, optimizer)

    def test_frozen_parameters_may_have_any(self):
        for number, options in enumerate((
            {}, {"residency": "bucket"}, {"weights": "bf16"}, {"weights": "bf16_sr"}, {"weights": "bf16+16"}, {"weights": "bf16+8sr"},
            {"mesh": "fsdp=2"}, {"gather": lambda name: "int8_row" if name == "layers.0.weight" else None},
        )):
            with self.subTest(**options):
                model = Masked()
                optimizer = self.optimizer(model, what=number, **options)
                self.train(model, optimizer)
                self.train(model, optimizer)
                optimizer.close()

    def test_formats_without_such_values_are_refused_by_name(self):
        for number, (options, said) in enumerate((
            ({"gather": "int8_row"}, 'gather="int8_row"'), ({"gather": "nf4"}, 'gather="nf4"'),
            ({"weights": "int8_row"}, 'weights="int8_row"'),
        )):
            with self.subTest(**options), self.assertRaisesRegex(errors.InvalidArgument, f'"mask" has weights .*{said} cannot hold'):
                self.optimizer(Masked(), what=number, **options)

    def test_loads_edits_checkpoints_and_readers(self):
        model = Masked()
        optimizer = self.optimizer(model)
        model.load_state_dict(Masked().state_dict())  # before the first step
        self.train(model, optimizer)
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        with optimizer.editing():
            model.mask.mul_(1)
        self.train(model, optimizer)
        with follow(Masked(), service=optimizer.service, job=optimizer._started.name, at_least=2, copy=True) as following:
            self.assertEqual(following.step, 2)
        with tempfile.TemporaryDirectory() as folder:
            optimizer.save(folder)
            resumed = Masked()
            with torch.no_grad():
                resumed.mask.zero_()
            other = self.optimizer(resumed, what="resumed", resume=folder)
            self.assertEqual(other.committed_step, 2)
            self.train(resumed, other)

    def test_a_trained_parameter_that_is_edited_is_named_and_reverted(self):
        model = Masked()
        optimizer = self.optimizer(model)
        self.train(model, optimizer)
        with optimizer.editing():
            model.layers[0].bias[3] = math.inf
        backward(model)
        with self.assertRaisesRegex(errors.InvalidArgument, r'"layers.0.bias" has weights that are not finite, such as inf at \[3\]'):
            optimizer.step()
        optimizer.revert()
        optimizer.zero_grad()
        self.train(model, optimizer)


if __name__ == "__main__":
    unittest.main()
