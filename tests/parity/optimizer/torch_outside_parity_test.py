#!/usr/bin/env python3
"""Bucket residency, and weights of blocks that are used by what is no call of their block: the bits of torch, or NaN."""
import copy
import os
import sys
import time
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from shardmesh import errors
from shardmesh.torch import Optimizer
from shardmesh.torch._weights import _buckets
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from service import ServiceTest

WIDTH = 32  # of weights of a page: those of one block share none with another's


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.skip = nn.Parameter(torch.randn(WIDTH))

    def add(self, x):
        return x + self.skip

    def parts(self, x):
        yield torch.tanh(self.inner(x) + self.skip)
        yield torch.tanh(x * self.skip)

    def forward(self, x):
        return torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 2)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.use = [use]  # no attribute that a copy would copy

    def forward(self, x):
        x = self.first(x)
        kept = []
        for layer in self.layers:
            x = x + self.use[0](self, layer, x, kept)
        return self.last(x).square().mean() + sum(each.square().mean() for each in kept)


def mixed(model, layer, x, kept):
    weights = torch.stack([each.skip for each in model.layers]).softmax(0)
    return (torch.stack([each(x) for each in model.layers]) * weights[:, None]).sum(0)


def under_hooks(model, layer, x, kept):
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return functional.linear(layer(x), model.layers[2].inner.weight)


def in_a_hook(model, layer, x, kept):
    handle = layer.register_forward_hook(lambda module, args, output: output + module.skip)
    x = layer(x)
    handle.remove()
    return x


def without_gradients(model, layer, x, kept):
    with torch.no_grad():
        norm = layer.inner.weight.norm()
    return layer(x) / (1 + norm)


def hidden(layer, x):
    """In an object, behind hooks of saved tensors that hide those of the block."""
    with torch.autograd.graph.save_on_cpu():
        return SimpleNamespace(result=SimpleNamespace(x=torch.tanh(layer.inner(x)) * layer.skip))


class Context(torch.autograd.Function):
    """Has a weight in a way that torch does not know of."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.saved = x, weight
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved
        return gradient * weight, (gradient * x).sum(0)


USES = {
    "linear": lambda model, layer, x, kept: functional.linear(layer(x), model.layers[3].inner.weight),
    "part": lambda model, layer, x, kept: layer(x) * model.layers[3].inner.weight[1],
    "detached": lambda model, layer, x, kept: functional.linear(layer(x), model.layers[3].inner.weight.detach()),
    "gate": lambda model, layer, x, kept: layer(x) * layer.skip.tanh(),
    "added": lambda model, layer, x, kept: layer(x) + layer.skip,
    "doubled": lambda model, layer, x, kept: functional.linear(layer(x).double(), layer.inner.weight.double()).float(),
    "transposed": lambda model, layer, x, kept: layer(x) @ layer.inner.weight.T.contiguous(),
    "method": lambda model, layer, x, kept: layer.add(x),
    "closure": lambda model, layer, x, kept: lent(layer)(x),
    "generator": lambda model, layer, x, kept: sum(layer.parts(x)),
    "mixed": mixed,
    "under hooks": under_hooks,
    "in a hook": in_a_hook,
    "without gradients": without_gradients,
    "penalty": lambda model, layer, x, kept: kept.append(layer.inner.weight - model.layers[0].inner.weight) or layer(x),
    "checkpoint": lambda model, layer, x, kept: checkpoint(lambda x: x @ layer.inner.weight, x, use_reentrant=False),
    "reentrant": lambda model, layer, x, kept: checkpoint(lambda x: x @ layer.inner.weight, x, use_reentrant=True),
    "half": lambda model, layer, x, kept: torch.func.functional_call(
        layer, {name: value * 0.5 for name, value in layer.named_parameters()}, (x,)),
}


def lent(layer):
    """What a block returns."""
    layer(torch.zeros(1, WIDTH))
    return lambda x: layer.inner(x) + layer.skip


RETURNS = {
    "its weight": (lambda layer, x: (layer.inner(x), layer.skip[:]), lambda got, x: got[0] * got[1]),
    "an object behind hooks": (hidden, lambda got, x: got.result.x),
    "an object with a context": (lambda layer, x: SimpleNamespace(x=Context.apply(x, layer.skip)), lambda got, x: got.x),
    "a closure": (lambda layer, x: lambda x: layer.inner(x) + layer.skip, lambda got, x: got(x)),
    "a generator": (lambda layer, x: layer.parts(x), lambda got, x: sum(got)),
}


def batch(seed):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


class OutsideTest(ServiceTest):
    def start(self, model, **options):
        optimizer = Optimizer(model, "SGD", **{"service": self.address, "lr": 0.05, "residency": "bucket", "timeout": 20,
                                               "job": self.id()[-80:] + str(id(model)), **options})
        self.addCleanup(optimizer.close)
        return optimizer

    def assert_bits_of_torch(self, use, loss=lambda model, x: model(x), **options):
        ours, theirs = Net(use), Net(use)
        optimizers = self.start(ours, **options), torch.optim.SGD(theirs.parameters(), lr=0.05)
        for step in range(3):
            for model, optimizer in zip((ours, theirs), optimizers):
                loss(model, batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        optimizers[0].close()
        for name, value in theirs.state_dict().items():
            self.assertTrue(torch.equal(ours.state_dict()[name], value), name)

    def test_uses_by_the_model(self):
        for name, use in USES.items():
            with self.subTest(name):
                self.assert_bits_of_torch(use)

    def test_what_blocks_return(self):
        for name, (forward, use) in RETURNS.items():
            with self.subTest(name), mock.patch.object(Block, "forward", forward):
                self.assert_bits_of_torch(lambda model, layer, x, kept, use=use: use(layer(x), x))

    def test_uses_outside_of_the_model(self):
        def plain(model, layer, x, kept):
            return layer(x)

        for name, loss in {
            "penalty behind": lambda model, x: model(x) + 0.01 * sum(each.square().sum() for each in model.parameters()),
            "penalty before": lambda model, x: 0.01 * sum(each.square().sum() for each in model.parameters()) + model(x),
            "temperature": lambda model, x: model.temperature.exp() * model(x),
            "blocks alone": lambda model, x: model.layers[1](x.repeat(1, 4) @ model.layers[0].inner.weight).sum(),
        }.items():
            for gather in "stored", "fp8_tensor":
                if gather == "stored":
                    with self.subTest(name):
                        self.assert_bits_of_torch(plain, loss)
                else:  # the same bits as with full residency
                    with self.subTest(name, gather=gather):
                        ours, theirs = Net(plain), Net(plain)
                        both = self.start(ours, gather=gather), self.start(theirs, gather=gather, residency="full")
                        for step in range(2):
                            for model, optimizer in zip((ours, theirs), both):
                                loss(model, batch(step)).backward()
                                optimizer.step()
                                optimizer.zero_grad()
                        self.assertEqual(both[0].job.digest(), both[1].job.digest())

    def test_an_average_of_models(self):
        ours = Net(lambda model, layer, x, kept: layer(x))
        theirs, optimizer = copy.deepcopy(ours), self.start(ours)
        torchs = torch.optim.SGD(theirs.parameters(), lr=0.05)
        averages = [[each.clone() for each in model.parameters()] for model in (ours, theirs)]
        for step in range(3):
            for model, each, average in (ours, optimizer, averages[0]), (theirs, torchs, averages[1]):
                model(batch(step)).backward()
                each.step()
                each.zero_grad()
                with torch.no_grad():
                    for mean, value in zip(average, model.parameters()):
                        mean.lerp_(value, 0.1)
        for one, other in zip(*averages):
            self.assertTrue(torch.equal(one, other))

    def test_more_blocks_than_a_rank_may_hold(self):
        model = Net(lambda model, layer, x, kept: layer(x))
        model.layers.extend(Block() for _ in range(60))
        optimizer = self.start(model)
        one_by_one = torch.tensor([each.skip.norm().item() for each in model.layers])
        self.assertTrue(torch.isfinite(one_by_one).all())
        with self.assertRaisesRegex(errors.FailedPrecondition, "64 blocks are used at once.*one after the other"):
            torch.stack([each.skip for each in model.layers])
        model(batch(1)).backward()
        optimizer.step()

    def test_facts_of_parameters_gather_nothing(self):
        model = Net(lambda model, layer, x, kept: layer(x))
        optimizer = self.start(model)
        with mock.patch.object(_buckets.Buckets, "lend", side_effect=AssertionError("lent")):
            for each in model.parameters():
                self.assertEqual((each.numel(), each.dtype, each.device.type), (each.numel(), torch.float32, "cpu"))
                self.assertTrue(each.requires_grad and each.is_leaf and each.grad is None and each.dim() == len(each.shape))
            model(batch(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.save(self.path("facts"))

    def test_torch_has_its_modes_as_they_were(self):
        def modes():
            return [type(mode).__name__ for mode in torch.overrides._get_current_function_mode_stack()]

        self.assertEqual(modes(), [])
        with torch.device("cpu"):
            optimizer = self.start(Net(lambda model, layer, x, kept: layer(x)))
        self.assertEqual(modes(), ["Outside"])
        torch.set_default_device("cpu")
        with torch.device("meta"):
            self.assertEqual(torch.ones(1).device.type, "meta")
        self.assertEqual(modes(), ["DeviceContext", "Outside"])
        torch.set_default_device(None)
        optimizer.close()
        self.assertEqual(modes(), [])

    def test_what_nobody_sees_is_nan(self):
        """Other names of weights, kept from when they were there."""
        for gather in "stored", "fp8_tensor":
            with self.subTest(gather):
                model = Net(lambda model, layer, x, kept: layer(x))
                optimizer = self.start(model, gather=gather)
                kept = model.layers[2].inner.weight.detach()
                model(batch(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                deadline = time.monotonic() + 20
                while not kept.sum().isnan():  # the service drops what nobody uses when it comes to it
                    self.assertLess(time.monotonic(), deadline)
                (model(batch(2)) + kept.sum() * model.last.bias.sum()).backward()
                with self.assertLogs("shardmesh", "WARNING") as logged:
                    optimizer.step()
                self.assertTrue(optimizer.last.skipped)
                self.assertIn("is NaN", "".join(logged.output))


if __name__ == "__main__":
    unittest.main()
