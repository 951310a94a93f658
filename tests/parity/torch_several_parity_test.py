#!/usr/bin/env python3
"""Several optimizers in one process, and a second run on a service that has the job of the first."""
import copy
import logging
import os
import unittest
from unittest import mock

import accelerate
import torch
from shardmesh import errors
from shardmesh.torch import Optimizer, _uses, integrations
from torch import nn

from service import ServiceTest


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(4, 4)


class Blocks(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.layers = nn.ModuleList([linear(seed), linear(seed + 1)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def backward(*models):
    x = torch.ones(2, 4)
    for model in models:
        x = model(x)
    x.square().mean().backward()


class Optimizers(ServiceTest):
    def optimizer(self, model, job="", **options):
        options = {"lr": 0.1, "timeout": 10, "service": self.address, "job": self.id() + job, **options}
        optimizer = Optimizer(model, "SGD", **options)
        self.addCleanup(optimizer.close)
        return optimizer


class SeveralTest(Optimizers):
    def test_a_second_run_is_told_that_it_continues(self):
        def run(**options):
            model = linear(options.pop("seed"))
            first = model.weight.detach().clone()
            with self.optimizer(model, **options) as optimizer:
                own = torch.equal(model.weight, first)
                backward(model)
                optimizer.step()
                return own, optimizer.committed_step

        with self.assertNoLogs("shardmesh.torch", logging.WARNING):
            self.assertEqual(run(seed=1), (True, 1))
        with self.assertLogs("shardmesh.torch", logging.WARNING) as logs:
            self.assertEqual(run(seed=2), (False, 2))
        self.assertIn("has weights of step 1 already; this run takes them and continues there", logs.output[0])
        with self.assertRaisesRegex(errors.AlreadyExists, "has weights of step 2 already, and join=False"):
            run(seed=3, join=False)
        with self.assertNoLogs("shardmesh.torch", logging.WARNING):
            self.assertEqual(run(seed=4, join=True), (False, 3))
            self.assertEqual(run(seed=5, join=False, job="other"), (True, 1))
        with self.assertRaisesRegex(errors.InvalidArgument, "join is 'yes'"):
            run(seed=6, join="yes")

    def test_ranks_of_one_run_are_not_told(self):
        with self.assertNoLogs("shardmesh.torch", logging.WARNING):
            for rank in "0", "1":
                with mock.patch.dict(os.environ, RANK=rank, WORLD_SIZE="2"):
                    self.optimizer(linear(), join=False)

    def test_a_job_has_one_optimizer_of_a_process(self):
        self.optimizer(linear())
        with self.assertRaisesRegex(errors.FailedPrecondition, "give this one a job of its own with job="):
            self.optimizer(linear())

    def test_two_on_one_service_are_closed_in_any_order(self):
        for order in (0, 1), (1, 0):
            for residency in "full", "bucket":
                models = [Blocks(0), Blocks(2)]
                first = self.optimizer(models[0], "first", service=None, residency=residency)
                second = self.optimizer(models[1], "second", service=first.service, residency=residency)
                optimizers = [first, second]
                for index in order:
                    backward(models[index])
                    optimizers[index].step()
                    optimizers[index].close()
                    self.assertFalse(models[index].layers[0].weight.isnan().any())
                self.assertNotIn(first.service, _uses._shared)

    def test_each_step_of_a_scaler_is_that_optimizers(self):
        models = [linear(0), linear(1)]
        optimizers = [self.optimizer(model, f".{index}") for index, model in enumerate(models)]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = copy.deepcopy(models[1].state_dict())
        for model, factor in zip(models, (1.0, float("inf"))):
            (scaler.scale(model(torch.ones(2, 4)).square().mean()) * factor).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        self.assertEqual([optimizer.last.skipped for optimizer in optimizers], [False, True])
        self.assertTrue(torch.equal(models[1].weight, before["weight"]))
        self.assertEqual(scaler.get_scale(), 2.0)

    def test_a_scalers_step_that_calls_another_optimizer(self):
        models = [linear(0), linear(1)]
        first, second = (self.optimizer(model, f".{index}") for index, model in enumerate(models))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        backward(models[1])
        first.register_step_pre_hook(lambda *_: second.step())
        scaler.scale(models[0](torch.ones(2, 4)).sum()).backward()
        scaler.step(first)
        self.assertNotIn(id(second), scaler._per_optimizer_states)


class AcceleratorTest(Optimizers):
    def setUp(self):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        self.accelerator = accelerate.Accelerator(cpu=True)
        self.models = [linear(0), linear(1), linear(2)]  # the last is torch's
        self.optimizers = [
            self.optimizer(self.models[0], ".0", clip_norm=1.0), self.optimizer(self.models[1], ".1", clip_norm=2.0)
        ]
        for optimizer in self.optimizers:
            integrations.attach(self.accelerator, optimizer)

    def test_clipping_is_of_whose_the_parameters_are(self):
        backward(*self.models)
        for optimizer, model, norm in zip(self.optimizers, self.models, (1.0, 2.0)):
            optimizer.step()
            said = self.accelerator.clip_grad_norm_(model.parameters(), norm)
            self.assertAlmostEqual(float(said), optimizer.last.gradient_norm, places=6)
            with self.assertRaises(errors.InvalidArgument):
                self.accelerator.clip_grad_norm_(model.parameters(), 3.0)
        theirs = [one.grad.clone() for one in self.models[2].parameters()]
        norm = self.accelerator.clip_grad_norm_(self.models[2].parameters(), 1e-3)
        self.assertAlmostEqual(float(norm), float(torch.nn.utils.get_total_norm(theirs)), places=5)
        self.assertLess(float(self.models[2].weight.grad.norm()), 1.1e-3)
        with self.assertRaisesRegex(errors.InvalidArgument, "of 2 optimizers"):
            self.accelerator.clip_grad_norm_([*self.models[0].parameters(), *self.models[1].parameters()], 1.0)

    def test_no_sync_is_of_whose_the_model_is(self):
        for index in 0, 1:
            with self.accelerator.no_sync(self.models[index]):
                joined = [optimizer._slots._joining for optimizer in self.optimizers]
                self.assertEqual(joined, [index == 0, index == 1])

    def test_a_model_of_another_optimizer_is_prepared_as_ever(self):
        seen = []
        attached = self.accelerator._shardmesh_attached
        attached._prepare_model = lambda model, **how: seen.append(how["evaluation_mode"]) or model
        self.accelerator.prepare(*self.models)
        self.assertEqual(seen, [True, True, False])


del Optimizers  # has no tests

if __name__ == "__main__":
    unittest.main()
