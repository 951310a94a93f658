"""Errors that say what to do, in tables of a test: each is provoked, its own advice is followed, and the model then trains
as one to which nothing happened."""
import itertools
import os
import sys
from typing import Any, Callable, NamedTuple

import torch
from shardmesh import errors
from shardmesh.torch import Optimizer
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from service import ServiceTest  # noqa: E402


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


NUMBERS = itertools.count()  # of jobs


class Run:
    """A model, its optimizer, and what entries of the table do to them."""

    def __init__(self, test, model, options, params=None):
        self.test, self.model, self.options, self.count = test, model, dict(options), 0
        self.again(params)

    def again(self, params=None, **options):
        """Closes the optimizer and makes another of the model."""
        if self.count:
            self.optimizer.close()
        self.count += 1
        self.options = {**self.options, **options}
        name = f"{self.test.id()}-{next(NUMBERS)}"
        given = {"lr": 0.1, "timeout": 10, "service": self.test.address, "job": name, **self.options}
        self.optimizer = Optimizer(self.model if params is None else params, "SGD", **given)
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
            if "more" not in name and name not in dict(self.model.named_buffers()):
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


def joined(r):
    """Two backwards of one slot."""
    with r.optimizer.no_sync():
        r.backward()
    r.backward()


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
    OPTIONS = ("--heartbeat-interval-ms", "50")  # a job is ready after one

    def follow_all(self, table, model=None, full=None, **options):
        """full: another run, for entries that need one of full residency."""
        run = Run(self, model or Net(), options)
        run.full = full
        for number, advice in enumerate(table):
            with self.subTest(f"{number}: {advice.said}"):
                with self.assertRaises(advice.error) as raised:
                    advice.provoke(run)
                self.assertIn(advice.said, str(raised.exception))
                advice.follow(run)
                run.train()
