#!/usr/bin/env python3
"""torch.amp.GradScaler around pulled slots, wrappers of an optimizer, and compiled programs."""
import os
import sys
import unittest

import torch
from shardmesh import errors
from shardmesh.torch import Optimizer

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from service import ServiceTest


class ScalerTest(ServiceTest):
    WORKERS = 1

    def test_a_scaler_around_pulled_slots(self):
        model = torch.nn.Linear(4, 2)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        options = {"service": self.address, "job": "pulled", "pulled": True, "slots": 1}
        optimizer = Optimizer(model, "SGD", lr=0.1, **options)
        self.addCleanup(optimizer.close)
        for batch in optimizer.slots([torch.ones(1, 4)]):
            scaler.scale(model(batch).sum()).backward()
        model.weight.grad = torch.zeros(2, 4)  # for the scaler to look at
        with self.assertRaisesRegex(errors.Unimplemented, "pulled=False"):
            scaler.step(optimizer)

    def test_a_wrapper_that_hands_everything_on_has_its_gradients_unscaled(self):
        class Wrapper:
            def __init__(self, inner):
                self.inner = inner

            def __getattr__(self, name):
                return getattr(self.inner, name)

        weights = []
        for wrap in Wrapper, lambda optimizer: optimizer:
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 2)
            with Optimizer(model, "SGD", service=self.address, job=f"w{len(weights)}", lr=0.1) as optimizer:
                wrapped, scaler = wrap(optimizer), torch.amp.GradScaler("cpu", init_scale=4.0)
                scaler.scale(model(torch.ones(1, 4)).sum()).backward()
                scaler.step(wrapped)
                scaler.update()
                weights.append(model.weight.detach().clone())
        self.assertTrue(torch.equal(*weights))

    def test_a_compiled_step_of_a_scaler_tells_it_what_was_skipped(self):
        torch.manual_seed(0)
        model, scaler = torch.nn.Linear(4, 2), torch.amp.GradScaler("cpu", init_scale=4.0)
        with Optimizer(model, "SGD", service=self.address, job="compiled", lr=0.1) as optimizer:
            told = []
            optimizer.register_step_post_hook(
                lambda *_: told.append("skipped" in scaler._per_optimizer_states[id(optimizer)]))
            scaler.scale(model(torch.ones(1, 4)).sum()).backward()
            torch.compile(lambda: scaler.step(optimizer), backend="eager")()
            scaler.update()
        self.assertEqual(told, [True])


if __name__ == "__main__":
    unittest.main()
