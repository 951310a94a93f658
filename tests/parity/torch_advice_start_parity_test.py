#!/usr/bin/env python3
"""Errors before anything starts: what each says is right does start."""
import math
import os
import unittest
from unittest import mock

import torch
from shardmesh import errors
from shardmesh.torch import Optimizer, _service
from torch import nn


def of(**parameters):
    """A module with these, beside a trained one."""
    module = nn.Linear(2, 2)
    for name, value in parameters.items():
        module.register_parameter(name, value)
    return module


def meta(fill=True):
    with torch.device("meta"):
        module = nn.Module()
        module.w = nn.Parameter(torch.empty(2))
        module.reset_parameters = (lambda: nn.init.ones_(module.w)) if fill else None
    return module


def with_attribute(register):
    module = nn.Linear(2, 2)
    register(module, torch.empty(2, device="meta"))
    return module


SHARED = torch.zeros(4)
TIE = nn.Parameter(torch.zeros(2))
LINEAR = nn.Linear(2, 2)
NAN = torch.full((2, 2), math.nan)
RANKS = {"RANK": "0", "WORLD_SIZE": "2"}

# What the error says; what is wrong; what is right then.
START = (
    ("give parameters of a module", lambda: Optimizer([("w", torch.zeros(2))]), lambda: Optimizer(LINEAR.named_parameters())),
    ("to_dense()", lambda: Optimizer(of(w=nn.Parameter(torch.eye(2).to_sparse()))), lambda: Optimizer(of(w=nn.Parameter(torch.eye(2).to_sparse().to_dense())))),
    ("model.float()", lambda: Optimizer(nn.Linear(2, 2).double()), lambda: Optimizer(nn.Linear(2, 2).double().float())),
    ("model.to(torch.bfloat16)", lambda: Optimizer(nn.Linear(2, 2).half()), lambda: Optimizer(nn.Linear(2, 2).half().to(torch.bfloat16))),
    ("torch.view_as_real()", lambda: Optimizer(of(w=nn.Parameter(torch.zeros(2, dtype=torch.complex64)))),
     lambda: Optimizer(of(w=nn.Parameter(torch.view_as_real(torch.zeros(2, dtype=torch.complex64)))))),
    ("remove it from the model", lambda: Optimizer(of(w=nn.Parameter(torch.zeros(0)))), lambda: Optimizer(of(w=None))),
    ("contiguous() or clone()", lambda: Optimizer(of(w=nn.Parameter(torch.zeros(1).expand(3)))), lambda: Optimizer(of(w=nn.Parameter(torch.zeros(1).expand(3).contiguous())))),
    ("run one batch through the lazy module", lambda: Optimizer(nn.LazyLinear(2)), lambda: Optimizer(ran(nn.LazyLinear(2)))),
    ("assign the same Parameter object to both", lambda: Optimizer(of(a=nn.Parameter(SHARED), b=nn.Parameter(SHARED))), lambda: Optimizer(of(a=TIE, b=TIE))),
    ("else clone() one", lambda: Optimizer(of(a=nn.Parameter(SHARED), b=nn.Parameter(SHARED))), lambda: Optimizer(of(a=nn.Parameter(SHARED), b=nn.Parameter(SHARED.clone())))),
    ("requires_grad_(False)", lambda: Optimizer(of(w=nn.Parameter(NAN))), lambda: Optimizer(of(w=nn.Parameter(NAN, requires_grad=False)))),
    ("returns None for this one", lambda: Optimizer(of(w=nn.Parameter(NAN, requires_grad=False)), gather="int8_row"),
     lambda: Optimizer(of(w=nn.Parameter(NAN, requires_grad=False)), gather=lambda name: None if name == "w" else "stored")),
    ("give the model, or model=", lambda: Optimizer(meta().named_parameters()), lambda: Optimizer((model := meta()).named_parameters(), model=model)),
    ("make it a buffer", lambda: Optimizer(with_attribute(lambda m, t: setattr(m, "extra", t)), init=lambda m: None),
     lambda: Optimizer(with_attribute(lambda m, t: m.register_buffer("extra", t)), init=lambda m: hasattr(m, "extra") and m.extra.zero_())),
    ("named_parameters()", lambda: Optimizer(LINEAR.parameters()), lambda: Optimizer(LINEAR.named_parameters())),
    ("pass the model (model=)", lambda: Optimizer(LINEAR.parameters()), lambda: Optimizer(LINEAR.parameters(), model=LINEAR)),
    ("give a module, its named_parameters()", lambda: Optimizer("model"), lambda: Optimizer([{"params": LINEAR.named_parameters(), "lr": 0.1}])),
    ("give the one, or parameters of it and model=", lambda: Optimizer(LINEAR, model=nn.Linear(2, 2)), lambda: Optimizer(LINEAR.parameters(), model=LINEAR)),
    ("give each group as one, or none", lambda: Optimizer([{"params": LINEAR.parameters()}, 3], model=LINEAR), lambda: Optimizer([{"params": LINEAR.parameters()}], model=LINEAR)),
    ("give a list of (name, parameter)", lambda: Optimizer([{"params": {}}]), lambda: Optimizer([{"params": list(LINEAR.named_parameters())}])),
    ("it can be in it once", lambda: Optimizer([LINEAR.weight, LINEAR.weight], model=LINEAR), lambda: Optimizer([LINEAR.weight], model=LINEAR)),
    ("it can be in one", lambda: Optimizer([{"params": [LINEAR.weight]}, {"params": [LINEAR.weight]}], model=LINEAR), lambda: Optimizer([{"params": [LINEAR.weight]}], model=LINEAR)),
    ("requires_grad is False", lambda: Optimizer(nn.Linear(2, 2).requires_grad_(False)), lambda: Optimizer(nn.Linear(2, 2).requires_grad_(True))),
    ("pass the module that was scripted", lambda: Optimizer(nn.Sequential(torch.jit.script(LINEAR))), lambda: Optimizer(nn.Sequential(LINEAR))),
    ('take residency="full"', lambda: Optimizer(LINEAR, pulled=True, residency="bucket"), lambda: Optimizer(LINEAR, pulled=True)),
    ("slots that are assigned", lambda: Optimizer(LINEAR, pulled=True, residency="bucket"), lambda: Optimizer(LINEAR, residency="bucket")),
    ("give it, or model=", lambda: Optimizer(LINEAR.named_parameters(), residency="bucket"), lambda: Optimizer(LINEAR.named_parameters(), model=LINEAR, residency="bucket")),
    ("give it, or model=", lambda: Optimizer(LINEAR.named_parameters(), deliver="quantized"), lambda: Optimizer(LINEAR.named_parameters(), model=LINEAR, deliver="quantized")),
    ("say workers=3", lambda: Optimizer(LINEAR, mesh="ddp=3"), lambda: Optimizer(LINEAR, mesh="ddp=3", workers=3)),
    ('write "ddp=2,fsdp=4"', lambda: Optimizer(LINEAR, mesh="2"), lambda: Optimizer(LINEAR, mesh="ddp=2,fsdp=4", workers=8)),
    ("it needs a momentum and no dampening", lambda: Optimizer(LINEAR, "SGD", nesterov=True), lambda: Optimizer(LINEAR, "SGD", nesterov=True, momentum=0.9)),
    ("SGD, Adam, AdamW, Lion and Muon", lambda: Optimizer(LINEAR, "Adagrad"), lambda: [Optimizer(LINEAR, name) for name in ("SGD",)]),
    ("give a multiple of 2", lambda: with_ranks(RANKS, slots=3), lambda: with_ranks(RANKS, slots=4)),
    ("set both, as torchrun does, or none", lambda: with_ranks({"RANK": "0"}), lambda: with_ranks(RANKS)),
    ("like \"10.0.0.1:7000\"", lambda: Optimizer(LINEAR, service=3), lambda: Optimizer(LINEAR, service="10.0.0.1:7000")),
)


def ran(module):
    module(torch.ones(1, 2))
    return module


def with_ranks(environment, **options):
    with mock.patch.dict(os.environ, environment):
        return Optimizer(LINEAR, **options)


class StartTest(unittest.TestCase):
    def test_advice_that_errors_before_the_start_give(self):
        with mock.patch.object(_service, "find", side_effect=AssertionError("started")):
            for number, (said, wrong, right) in enumerate(START):
                with self.subTest(f"{number}: {said}"):
                    with self.assertRaises(errors.Error) as raised:
                        wrong()
                    self.assertIn(said, str(raised.exception))
                    with self.assertRaisesRegex(AssertionError, "started"):
                        right()


if __name__ == "__main__":
    unittest.main()
