#!/usr/bin/env python3
"""Errors that say what to do: each is provoked, its own advice is followed, and the model then trains as one to which
nothing happened."""
import copy
import math
import os
import pickle
import sys
import unittest
from typing import Any, Callable, NamedTuple
from unittest import mock

import torch
from shardmesh import errors
from shardmesh.torch import Optimizer, _service, follow
from torch import nn

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from service import ServiceTest


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("boom")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids, between=lambda x: x):
        x = self.layers[1](between(self.layers[0](self.embed(ids)))).tanh()
        return self.more(x) if hasattr(self, "more") else x


IDS = torch.tensor([0, 1, 2, 3, 4])


def loss(model, **how):
    return model(IDS, **how).square().mean()


class Run:
    """A model, its optimizer, and what entries of the table do to them."""

    def __init__(self, test, options):
        self.test, self.options, self.count = test, dict(options), 0
        self.model = Net()
        self.again()

    def again(self, params=None, **options):
        """Closes the optimizer and makes another of the model."""
        if self.count:
            self.optimizer.close()
        self.count += 1
        self.options = {**self.options, **options}
        name = f"{'-'.join(map(str, self.options))}-{self.test.id()}-{id(self)}-{self.count}"[-120:]
        self.optimizer = Optimizer(
            self.model if params is None else params, "SGD", **{"lr": 0.1, "timeout": 10, "service": self.test.address, "job": name, **self.options}
        )
        self.test.addCleanup(self.optimizer.close)

    def backward(self, **how):
        loss(self.model, **how).backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward_and_step(self):
        self.backward()
        self.step()

    def train(self):
        """A step, which changes every parameter."""
        step = self.optimizer.committed_step
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        slots = self.options.get("slots") or 1
        for _ in self.optimizer.slots([0] * slots) if self.options.get("pulled") else range(slots):
            self.backward()
        self.step()
        self.test.assertEqual(self.optimizer.committed_step, step + 1)
        for name, value in self.model.state_dict().items():
            if "more" not in name:
                self.test.assertTrue(torch.isfinite(value).all(), name)
                self.test.assertFalse(torch.equal(before[name], value), name)

    def write(self, value=0.5):
        self.model.layers[0].bias.data.fill_(value)

    def edit(self, value=0.5):
        with self.optimizer.editing():
            self.write(value)

    def replace(self):
        self.before, self.model.layers[0].bias = self.model.layers[0].bias, nn.Parameter(torch.full((8,), 0.1))

    def put_back(self):
        self.model.layers[0].bias = self.before

    def add(self):
        self.model.more = nn.Linear(8, 8)

    def graph(self):
        gradients = torch.autograd.grad(loss(self.model), list(self.model.parameters()), create_graph=True)
        (loss(self.model) + sum(gradient.square().sum() for gradient in gradients)).backward()
        self.step()

    def slots(self, batches=(0,), leave=False, within=True):
        for _ in self.optimizer.slots(batches):
            if leave:
                break
            if within:
                self.backward()
        self.step()


class Advice(NamedTuple):
    said: str  # the advice, in the message
    provoke: Callable[[Run], Any]
    follow: Callable[[Run], Any]
    error: type = errors.FailedPrecondition


def then(*calls):
    def run(of):
        for call in calls:
            call(of)

    return run


STEP, REVERT, AGAIN, ZERO = Run.step, lambda r: r.optimizer.revert(), Run.again, lambda r: r.optimizer.zero_grad()
BACK = Run.backward_and_step


def with_gradients(call):
    """Backward, the call, step."""
    return then(Run.backward, call, STEP)


FULL = (
    Advice("optimizer.revert()", with_gradients(lambda r: r.model.share_memory()), REVERT),
    Advice("optimizer.revert()", with_gradients(lambda r: setattr(r.model.layers[0].bias, "data", torch.zeros(8))), REVERT),
    Advice("close() this optimizer", then(lambda r: r.model.bfloat16(), BACK), then(lambda r: r.model.float(), AGAIN)),
    Advice("optimizer.revert()", lambda r: (setattr(r.model.layers[1].weight, "data", torch.zeros(3, 8)),
                                            setattr(r.model.layers[1].bias, "data", torch.zeros(3)), BACK(r)), REVERT),
    Advice("requires_grad_(True)", then(lambda r: r.model.embed.requires_grad_(False), BACK), lambda r: r.model.embed.requires_grad_(True)),
    Advice("close() this optimizer", then(lambda r: r.model.embed.requires_grad_(False), BACK),
           then(lambda r: r.model.embed.requires_grad_(True), AGAIN)),
    Advice("optimizer.editing()", then(Run.write, BACK), Run.edit),
    Advice("load_state_dict()", then(Run.write, BACK), lambda r: r.model.layers[0].load_state_dict(r.model.layers[1].state_dict())),
    Advice("optimizer.revert()", then(Run.write, BACK), REVERT),
    Advice("Put the old ones back", then(Run.replace, BACK), Run.put_back),
    Advice("make another", then(Run.replace, BACK), AGAIN),
    Advice("editing()", then(Run.replace, BACK), then(Run.put_back, Run.edit)),
    Advice("load_state_dict() of the model", then(Run.replace, BACK), then(Run.put_back, lambda r: r.model.load_state_dict(Net().state_dict()))),
    Advice("requires_grad_(False)", then(Run.add, BACK), lambda r: r.model.more.requires_grad_(False)),
    Advice("make another", then(lambda r: delattr(r.model, "more"), BACK, Run.add, BACK), AGAIN),
    Advice("autograd.grad(", lambda r: loss(r.model).backward(create_graph=True), then(ZERO, Run.graph), errors.Unimplemented),
    Advice("sparse=False", then(lambda r: setattr(r.model.embed, "sparse", True), BACK),
           then(lambda r: setattr(r.model.embed, "sparse", False), ZERO), errors.Unimplemented),
    Advice("close() that one first", lambda r: Optimizer(r.model), AGAIN),
    Advice("a model of its own", lambda r: follow(r.model, service=r.optimizer.service, job=r.optimizer._started.name),
           lambda r: follow(Net(), service=r.optimizer.service, job=r.optimizer._started.name, copy=True).close()
           if not hasattr(r.model, "more") else None),
    Advice("close() the optimizer first", lambda r: follow(r.model, service=r.optimizer.service, job=r.optimizer._started.name), AGAIN),
    Advice("save its state_dict()", lambda r: pickle.dumps(r.model), lambda r: pickle.dumps(r.model.state_dict()), errors.Unimplemented),
    Advice("close()", lambda r: pickle.dumps(r.model), then(lambda r: r.optimizer.close(), lambda r: pickle.dumps(r.model), AGAIN),
           errors.Unimplemented),
    Advice("take state_dict()", lambda r: pickle.dumps(r.optimizer), lambda r: pickle.dumps(r.optimizer.state_dict()), errors.Unimplemented),
    Advice("make another", then(lambda r: r.optimizer.close(), BACK), AGAIN),
    Advice("zero_grad()", lambda r: (r.test.assertRaises(KeyError, r.backward, between=Boom.apply), STEP(r)), ZERO),
    Advice("a job can change lr alone", with_gradients(lambda r: r.optimizer.param_groups[0].update(momentum=0.5)),
           lambda r: r.optimizer.param_groups[0].update(momentum=0.0, lr=0.05), errors.Unimplemented),
    Advice("close() it and make another", lambda r: r.optimizer.add_param_group({"params": list(Net().parameters())}),
           lambda r: r.again([{"params": r.model.embed.named_parameters("embed")}, {"params": r.model.layers.named_parameters("layers"), "lr": 0.2}]),
           errors.Unimplemented),
    Advice("pulled=True", lambda r: r.optimizer.slots([0]), lambda r: r.again(pulled=True, slots=1)),
    Advice("give it finite weights", then(lambda r: r.edit(math.nan), Run.slots), then(REVERT, ZERO, Run.edit), errors.InvalidArgument),
)
SLOTS = (
    Advice("call step()", then(*[Run.backward] * 3), STEP),
    Advice("no_sync()", then(*[Run.backward] * 3), lambda r: (ZERO(r), joined(r), joined(r), STEP(r))),
    Advice("each needs one", then(Run.backward, STEP), then(Run.backward, STEP)),
    Advice("slots= of the optimizer", then(Run.backward, STEP), lambda r: r.again(slots=1)),
    Advice("slots=None", then(lambda r: r.again(slots=2), lambda r: setattr(r.model.embed.weight, "grad", torch.ones(5, 8)), STEP),
           lambda r: r.again(slots=None)),
)
PULLED = (
    Advice("backwards of it belong together", lambda r: joined(r), lambda r: r.slots([0])),
    Advice("loader = iter(loader)", lambda r: r.slots(torch.utils.data.DataLoader([0])),
           lambda r: r.slots([next(iter(torch.utils.data.DataLoader([0])))]), errors.InvalidArgument),
    Advice("one for each slot", lambda r: r.slots([0, 1]), lambda r: r.slots([0]), errors.InvalidArgument),
    Advice("loop over optimizer.slots(batches) again", lambda r: r.slots([0], leave=True), lambda r: r.slots([0])),
    Advice("for batch in optimizer.slots(batches)", then(AGAIN, Run.backward), lambda r: r.slots([0])),
    Advice("each needs one", lambda r: r.slots([0], within=False), lambda r: r.slots([0])),
    Advice("optimizer.editing()", then(Run.write, lambda r: r.slots([0])), Run.edit),
)
BUCKET = (
    Advice("call step()", then(Run.backward, ZERO), then(STEP, ZERO)),
    Advice("slots=", then(Run.backward, Run.backward), then(STEP, lambda r: r.again(slots=2), Run.backward, BACK)),
    Advice("within no_sync()", then(lambda r: r.again(slots=1), Run.backward, Run.backward), then(STEP, lambda r: joined(r), STEP)),
    Advice("make another model and load", lambda r: copy.deepcopy(r.model), lambda r: Blocks().load_state_dict(r.model.state_dict()),
           errors.Unimplemented),
    Advice("close() the optimizer first", lambda r: copy.deepcopy(r.model),
           then(lambda r: r.optimizer.close(), lambda r: copy.deepcopy(r.model), AGAIN), errors.Unimplemented),
    Advice("optimizer.revert()", then(lambda r: r.model.share_memory(), BACK), REVERT),
    Advice("optimizer.editing()", then(Run.write, BACK), Run.edit),
    Advice("make another", then(Run.replace, BACK), AGAIN),
    Advice("residency=\"full\"", Run.graph, then(ZERO, lambda r: r.again(residency="full")), errors.Unimplemented),
)


def joined(r):
    with r.optimizer.no_sync():
        r.backward()
    r.backward()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return self.inner(x) + self.bias


class Blocks(Net):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))


class AdviceTest(ServiceTest):
    def follow_all(self, table, model=None, **options):
        run = Run(self, options) if model is None else None
        for number, advice in enumerate(table):
            with self.subTest(f"{number}: {advice.said}"):
                if run is None:
                    run = Run.__new__(Run)
                    run.test, run.options, run.count, run.model = self, dict(options), 0, model
                    run.again()
                with self.assertRaises(advice.error) as raised:
                    advice.provoke(run)
                self.assertIn(advice.said, str(raised.exception))
                advice.follow(run)
                run.train()

    def test_full_residency(self):
        self.follow_all(FULL)

    def test_several_slots(self):
        self.follow_all(SLOTS, slots=2)

    def test_pulled_slots(self):
        self.follow_all(PULLED, pulled=True, slots=1)

    def test_bucket_residency(self):
        self.follow_all(BUCKET, model=Blocks(), residency="bucket")


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
