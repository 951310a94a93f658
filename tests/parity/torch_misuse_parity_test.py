#!/usr/bin/env python3
"""What a new user of shardmesh.torch does by mistake, and the error that tells so before any harm."""
import os
import sys
import unittest

import torch
from shardmesh import errors
from shardmesh.torch import Optimizer
from torch import nn
from torch.nn.utils import parametrize

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from service import ServiceTest


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x))


def backward(model, seed=0, **how):
    model(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))).square().mean().backward(**how)


class Misuse(ServiceTest):
    def optimizer(self, model, algorithm="SGD", **options):
        options = {"lr": 0.1, "timeout": 10, "service": self.address, "job": self.id(), **options}
        optimizer = Optimizer(model, algorithm, **options)
        self.addCleanup(optimizer.close)
        return optimizer


class OtherParametersTest(Misuse):
    def assert_told(self, change, said, *, both=False, **options):
        """both: the model has none of its parameters any more."""
        model = Net()
        optimizer = self.optimizer(model, **options)
        change(model)
        if both:
            change(model, "body")
        if not options.get("pulled"):
            backward(model)
        with self.assertRaisesRegex(errors.FailedPrecondition, said):
            optimizer.slots([0]) if options.get("pulled") else optimizer.step()
        self.assertEqual(optimizer.committed_step, 0)
        optimizer.close()

    def test_an_assignment_to_a_parameter(self):
        def change(model, name="head"):
            layer = getattr(model, name)
            layer.weight, layer.bias = nn.Parameter(torch.ones_like(layer.weight)), nn.Parameter(torch.ones_like(layer.bias))

        for both in False, True:
            with self.subTest(both=both):
                said = r"^(body.weight, body.bias, head.weight and 1 more|head.weight, head.bias): the model has other .*assignment"
                self.assert_told(change, said, both=both, job=f"{both}")
        self.assert_told(change, "head.weight, head.bias: the model has other", pulled=True, slots=1, job="pulled")
        self.assert_told(lambda model: setattr(model.head, "bias", nn.Parameter(torch.ones(2))), "^head.bias: the model has other")

    def test_another_module_in_a_place(self):
        self.assert_told(lambda model: setattr(model, "head", nn.Linear(4, 5)), "^head.weight, head.bias: the model has other")

    def test_a_conversion_that_makes_new_parameters(self):
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            self.assert_told(lambda model: model.double().float(), "^body.weight.* has other .*conversion.*close")
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)

    def test_what_leaves_the_parameters_in_the_model_is_no_mistake(self):
        model = Net()
        optimizer = self.optimizer(model)
        for step, change in enumerate((
            lambda: setattr(model, "head", nn.Sequential(model.head)),  # a wrapper
            lambda: setattr(model, "head", model.head[0]),
            lambda: setattr(model.body, "bias", model.body.bias),
            lambda: setattr(model, "more", nn.Linear(2, 2)),  # as torch.optim: not trained
            lambda: setattr(model, "more", None),
            lambda: setattr(model, "head", nn.Identity()),  # zeros for its gradients
        )):
            change()
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
            self.assertEqual(optimizer.committed_step, step + 1)

    def test_an_assignment_that_is_taken_back(self):
        model = Net()
        optimizer = self.optimizer(model)
        before, model.head.weight = model.head.weight, nn.Parameter(torch.ones(2, 4))
        with self.assertRaisesRegex(errors.FailedPrecondition, "^head.weight: the model has other"):
            optimizer.step()
        model.head.weight = before
        backward(model)
        optimizer.step()
        self.assertEqual(optimizer.committed_step, 1)

    def test_a_parametrization(self):
        self.assert_told(lambda model: parametrize.register_parametrization(model.head, "weight", nn.Softplus()), "head.weight")
        self.assert_told(lambda model: nn.utils.parametrizations.weight_norm(model.head), "^head.weight", job="norm")


del Misuse  # has no tests

if __name__ == "__main__":
    unittest.main()
