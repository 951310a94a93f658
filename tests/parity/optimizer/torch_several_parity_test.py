#!/usr/bin/env python3
"""Several optimizers in one process, and a second run on a service that has the job of the first."""
import copy
import logging
import os
import sys
import unittest
from unittest import mock

import accelerate
import torch
from shardmesh import errors
from shardmesh.torch import Optimizer, integrations
from shardmesh.torch._machine import _uses
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from service import ServiceTest  # noqa: E402


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
    def optimizer(self, params, job="", **options):
        options = {"lr": 0.1, "timeout": 10, "service": self.address, "job": self.id() + job, **options}
        optimizer = Optimizer(params, "SGD", **options)
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

    def test_gradients_that_are_another_models_alone(self):
        def play(optimizers, models, **inputs):
            generator, critic = models
            for _ in range(2):
                backward(generator, critic) if not inputs else critic(generator(torch.ones(2, 4))).mean().backward(**inputs)
                optimizers[0].step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
                backward(critic)
                optimizers[1].step()
                optimizers[1].zero_grad()

        models = Blocks(1), Blocks(3)
        theirs = copy.deepcopy(models)
        ours = [self.optimizer(model, name, residency="bucket") for model, name in zip(models, ("generator", "critic"))]
        play(ours, models, inputs=list(models[0].parameters()))
        play([torch.optim.SGD(model.parameters(), lr=0.1) for model in theirs], theirs, inputs=list(theirs[0].parameters()))
        for one, other in zip(models, theirs):
            for name, value in other.state_dict().items():
                self.assertTrue(torch.equal(one.state_dict()[name], value), name)
        with self.assertRaisesRegex(errors.FailedPrecondition, "backward.inputs=list.other.parameters"):
            play(ours, models)

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


class OneModelTest(Optimizers):
    """A block of a model is one optimizer's, the other one another's."""

    def trained(self, make, steps=3, between=lambda step, model, optimizers: None):
        """Weights after steps with the optimizers that make(model) returns."""
        model = Blocks(0)
        optimizers = make(model)
        for step in range(steps):
            backward(model)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            between(step, model, optimizers)
        return {name: value.clone() for name, value in model.state_dict().items()}

    def theirs(self, model):
        return [torch.optim.SGD(layer.parameters(), lr=0.1 + number) for number, layer in enumerate(model.layers)]

    def ours(self, model, job="", **options):
        """options: of each."""
        return [
            self.optimizer(layer.parameters(), f"{job}.{number}", model=model, lr=0.1 + number,
                           **{name: of_each[number] for name, of_each in options.items()})
            for number, layer in enumerate(model.layers)
        ]

    def assert_close(self, ours, theirs):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, msg=name)

    def test_two_optimizers_each_train_their_part(self):
        right = self.trained(self.theirs)
        for number, residency in enumerate((("full", "full"), ("bucket", "full"), ("full", "bucket"))):
            with self.subTest(residency):
                self.assert_close(self.trained(lambda model: self.ours(model, str(number), residency=residency)), right)

    def test_one_with_the_rest_by_torch(self):
        right = self.trained(self.theirs)
        for number, residency in enumerate(("full", "bucket")):
            with self.subTest(residency):
                self.assert_close(self.trained(lambda model: [
                    self.optimizer(model.layers[0].parameters(), str(number), model=model, residency=residency), self.theirs(model)[1]
                ]), right)

    def test_a_change_of_the_rest_is_no_error(self):
        def change(step, model, _):
            rest = model.layers[1]
            with torch.no_grad():
                [rest.weight.mul_, rest.weight.data.mul_, lambda by: setattr(rest, "weight", nn.Parameter(rest.weight * by))][step](0.5)

        right = self.trained(lambda model: self.theirs(model)[:1], between=change)
        self.assert_close(self.trained(
            lambda model: [self.optimizer(model.layers[0].parameters(), model=model)], between=change), right)

    def test_a_load_of_the_model_counts_for_both_whichever_closes_first(self):
        def load(step, model, optimizers):
            if step == 1 and isinstance(optimizers[0], Optimizer):
                with self.assertRaises(RuntimeError):
                    model.load_state_dict({name: value * 3 for name, value in model.state_dict().items()} | {"stranger": torch.ones(1)})
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
            for number, optimizer in enumerate(optimizers):
                if isinstance(optimizer, Optimizer) and step < 2:  # counts at once
                    served = dict(model.layers[number].named_parameters())["weight"]
                    optimizer.revert()
                    torch.testing.assert_close(model.layers[number].weight, served)
            if step == 1 and isinstance(optimizers[0], Optimizer):
                closing = optimizers.pop(self.first)
                closing.close()
                self.assertIn("load_state_dict", vars(model))
                optimizers.insert(self.first, self.theirs(model)[self.first])

        right = self.trained(self.theirs, 4, load)
        for self.first in 0, 1:
            with self.subTest(first=self.first):
                models = []
                ours = self.trained(lambda model: models.append(model) or self.ours(model, str(self.first)), 4, load)
                self.assert_close(ours, right)

    def test_a_job_has_what_was_given_and_what_is_frozen(self):
        model = nn.Sequential(linear(), linear(), linear())
        model[2].requires_grad_(False)
        optimizer = self.optimizer(model[0].parameters(), model=model)
        self.assertEqual([one.name for one in optimizer._started.facts.parameters], ["0.weight", "0.bias", "2.weight", "2.bias"])
        other = self.optimizer(model[1].parameters(), ".other", model=model)
        self.assertEqual([one.name for one in other._started.facts.parameters], ["1.weight", "1.bias"])
        with self.assertRaisesRegex(errors.FailedPrecondition, "0.weight is in another optimizer of this process, of the job"):
            self.optimizer(model.parameters(), ".all", model=model)
        optimizer.close()
        other.close()
        self.optimizer(model.parameters(), ".all", model=model)

    def test_a_model_has_one_optimizer_with_bucket_residency(self):
        with self.assertRaisesRegex(errors.Unimplemented, 'layers.0.weight of this model.*take residency="full" for this one'):
            self.trained(lambda model: self.ours(model, residency=("bucket", "bucket")))


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
