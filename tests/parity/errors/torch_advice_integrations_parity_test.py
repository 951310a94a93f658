#!/usr/bin/env python3
"""Errors of the integrations, and of models without first weights: each is provoked, its advice followed, and the model
trains."""
import os
import sys
import unittest
from types import SimpleNamespace
from unittest import mock

import accelerate
import torch
from shardmesh import errors
from shardmesh.torch import Optimizer, integrations
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from advice import Advice, AdviceTest, Net, Run  # noqa: E402


def accelerator(r, *models, optimizers=()):
    """That leaves the optimizers, or the one of the run, to the service, and has prepared the models, or that of the run."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    made = accelerate.Accelerator(cpu=True)
    for optimizer in optimizers or [r.optimizer]:
        integrations.attach(made, optimizer)
    for model in models or [r.model]:
        made.prepare(model)
    return made


def of_fsdp(r):
    integrations.attach(SimpleNamespace(distributed_type=SimpleNamespace(name="FSDP")), r.optimizer)


def elsewhere(r):
    with mock.patch.object(accelerate.Accelerator, "device", torch.device("meta")):
        accelerator(r)


def moved(r):
    r.model.to(accelerator(r).device)
    r.again()
    accelerator(r)


def clip(r, norm=1.0, made=None):
    (made or accelerator(r)).clip_grad_norm_(r.model.parameters(), norm)


def of_two_processes(r, *models, optimizers=()):
    with mock.patch.object(accelerate.Accelerator, "num_processes", 2):
        accelerator(r, *models, optimizers=optimizers)


def part(r):
    """A layer that the optimizer does not have."""
    return nn.Sequential(r.model, nn.Linear(8, 8))


def another(r, model):
    """An optimizer of it."""
    optimizer = Optimizer(model, "SGD", lr=0.1, service=r.test.address, job=f"{r.test.id()}-{id(model)}")
    r.test.addCleanup(optimizer.close)
    return optimizer


def both_trained(r):
    whole = part(r)
    of_two_processes(r, whole, optimizers=[r.optimizer, another(r, whole[1])])


def clip_two(r, together):
    other = Net()
    made = accelerator(r, optimizers=[r.optimizer, another(r, other)])
    parameters = list(r.model.parameters()), list(other.parameters())
    for some in [parameters[0] + parameters[1]] if together else parameters:
        made.clip_grad_norm_(some, float("inf"))


TABLE = (
    Advice("launch without it", of_fsdp, accelerator, errors.InvalidArgument),
    Advice("model.to(accelerator.device)", elsewhere, moved),
    Advice("and attach() it", lambda r: of_two_processes(r, part(r)), both_trained, errors.InvalidArgument),
    Advice("prepare them as a model of their own", lambda r: of_two_processes(r, part(r)),
           lambda r: of_two_processes(r, r.model, nn.Linear(8, 8)),
           errors.InvalidArgument),
    Advice("for the parameters of each", lambda r: clip_two(r, True), lambda r: clip_two(r, False), errors.InvalidArgument),
    Advice("make the optimizer with clip_norm=1", clip, lambda r: (r.again(clip_norm=1.0), clip(r)), errors.InvalidArgument),
    Advice("make the optimizer with clip_norm=0", lambda r: clip(r, float("inf")), lambda r: (r.again(clip_norm=0), clip(r, float("inf"))),
           errors.InvalidArgument),
)


class Given(nn.Module):
    """A parameter that nothing gives values, on the meta device."""

    def __init__(self, fill=None):
        super().__init__()
        self.layers = nn.ModuleList()
        self.w = nn.Parameter(torch.empty(5, 8, device="meta"))
        if fill is not None:
            self.reset_parameters = lambda: fill(self)

    def forward(self, ids):
        return self.w[ids].tanh()


def fill(module):
    nn.init.ones_(module.w)


def nothing(module):
    pass


class IntegrationsTest(AdviceTest):
    def test_accelerate(self):
        self.follow_all(TABLE)

    def test_first_weights(self):
        for said, wrong, right in (
            ("give it reset_parameters()", lambda: Run(self, Given(), {}), lambda: Run(self, Given(fill), {})),
            ("or the optimizer init=", lambda: Run(self, Given(), {}), lambda: Run(self, Given(), {"init": fill})),
            ("give it reset_parameters()", lambda: Run(self, Given(), {"init": nothing}), lambda: Run(self, Given(fill), {})),
            ("or the optimizer init=", lambda: Run(self, Given(nothing), {}), lambda: Run(self, Given(nothing), {"init": fill})),
        ):
            with self.subTest(said):
                with self.assertRaises(errors.InvalidArgument) as raised:
                    wrong()
                self.assertIn(said, str(raised.exception))
                right().train()


if __name__ == "__main__":
    unittest.main()
