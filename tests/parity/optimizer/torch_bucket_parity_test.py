#!/usr/bin/env python3
"""Bucket residency has the bits of torch, or a typed error, whatever way results and weights take through a model."""
import contextlib
import copy
import os
import sys
import time
import unittest
from unittest import mock

import torch
from shardmesh import errors
from shardmesh.torch import Optimizer
from shardmesh.torch._weights import _buckets
from shardmesh.torch._modules._model import facts
from shardmesh.torch._modules._units import units
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from service import ServiceTest


class Box:
    """An object that no tree of torch's knows."""

    def __init__(self, x):
        self.x = x


class KeepsWeight(torch.autograd.Function):
    """It has its weight without save_for_backward()."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight, gradient.t() @ ctx.saved_tensors[0]


class SavesWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():  # which is no graph of the gradients
            x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.3)
        self.own = nn.Parameter(torch.randn(6, 6) / 4)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.memory = None

    def mlp(self, x):
        return self.b(torch.tanh(self.a(x)))

    def direct(self, x):
        return torch.tanh(functional.linear(torch.tanh(x), self.own)) @ self.own

    def each(self, x):
        yield self.a(x)
        yield self.b(torch.tanh(x))

    def forward(self, x, how="plain"):
        return HOW_BLOCKS.get(how, lambda block, x: x + block.mlp(x))(self, x)


def stash(block, x):
    y = x + block.mlp(x)
    block.memory = torch.softmax(block.a(y), -1)
    return y


def with_hooks_of_its_own(block, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor.detach(),), lambda packed: packed[0]):
        return Box(x + block.mlp(x))


def with_a_gradient_in_it(block, x):
    with torch.enable_grad():
        inside = x.detach().requires_grad_()
        gradient, = torch.autograd.grad(block.mlp(inside).sum(), inside)
    return x + block.mlp(x) + gradient


HOW_BLOCKS = {
    "object": lambda block, x: Box(x + block.mlp(x)),
    "frozen in an object": lambda block, x: Box(torch.tanh(block.frozen(x))),
    "part of a weight": lambda block, x: Box(torch.tanh(functional.linear(x, block.own[:3])).repeat(1, 2)),
    "tuple and object": lambda block, x: (x, [Box(block.mlp(x))]),
    "on the block": stash,
    "generator": Block.each,
    "weight of a context": lambda block, x: KeepsWeight.apply(x, block.own),
    "saved by a function": lambda block, x: Box(SavesWeight.apply(x, block.own)),
    "hooks within": with_hooks_of_its_own,
    "checkpoint within": lambda block, x: Box(x + checkpoint(block.mlp, x, use_reentrant=False)),
    "reentrant within": lambda block, x: Box(x + checkpoint(block.mlp, x, use_reentrant=True)),
    "checkpoint of a weight within": lambda block, x: x + checkpoint(block.direct, x, use_reentrant=False),
    "dropout": lambda block, x: x + block.drop(block.mlp(x)),
    "gradient within": with_a_gradient_in_it,
}


class Net(nn.Module):
    def __init__(self, how="plain"):
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(6, 6), nn.Linear(6, 2)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def each(self, block, x, number, extra):
        """Of one block: its result."""
        how = self.how
        if how == "list":
            extra.append(block(x))
            return extra[-1] + x
        if how == "forward hook":
            handle = block.a.register_forward_hook(lambda module, args, output: extra.append(output.square().mean()))
            x = block(x)
            handle.remove()
            return x
        if how.startswith("checkpoint around"):
            return checkpoint(block, x, "dropout", use_reentrant=False)
        if how.startswith("reentrant around"):
            return checkpoint(block, x, use_reentrant=True)
        if how == "twice":
            return block(block(x))
        if how == "skipped":
            return block(x) if number != 1 else x
        if how == "parts":
            return block.b(torch.tanh(block.a(x)))
        if how == "without gradients first":
            with torch.no_grad():
                x = block(x)
            return block(x)
        if how == "raises":
            with contextlib.suppress(TypeError):
                block(x, how=[])
        y = block(x, how)
        if how == "tuple and object":
            return y[0] + y[1][0].x
        return sum(y) if how == "generator" else getattr(y, "x", y)

    def forward(self, x):
        extra = []
        x = self.first(x)
        for number, block in enumerate(self.layers):
            x = self.each(block, x, number, extra)
            if self.how == "on the block":
                extra.append(block.memory.square().mean())
        if self.how == "another order":
            for number in 1, 0, 2, 1:
                x = self.layers[number](x)
        if self.how == "segments":
            x = checkpoint_sequential(list(self.layers), 2, x, use_reentrant=False)
        return self.last(x).square().mean() + sum(one.mean() for one in extra)


HOW_NETS = [
    "list", "forward hook", "checkpoint around", "reentrant around", "twice", "skipped", "parts",
    "without gradients first", "raises", "another order", "segments",
]


def batch(seed):
    torch.manual_seed(seed)
    return torch.randn(4, 6)


class BucketTest(ServiceTest):
    def start(self, model):
        optimizer = Optimizer(
            model, "SGD", service=self.address, lr=0.1, residency="bucket", timeout=20, job=self.id()[-90:])
        self.addCleanup(optimizer.close)
        return optimizer

    def beside_torch(self, start, prepare=lambda block: None):
        """The model and its optimizer with bucket residency, and torch's. prepare: is done to each block."""
        models = [copy.deepcopy(start), copy.deepcopy(start)]
        for model in models:
            for block in getattr(model, "layers", ()):
                prepare(block)
        return list(zip(models, (self.start(models[0]), torch.optim.SGD(models[1].parameters(), lr=0.1))))

    def assert_same(self, pair):
        theirs = pair[1][0].state_dict()
        for name, value in pair[0][0].state_dict().items():
            self.assertTrue(torch.equal(value, theirs[name]), name)

    def assert_step(self, pair, backward):
        for model, optimizer in pair:
            torch.manual_seed(3)
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        self.assert_same(pair)
        self.assertIsNone(torch._C._autograd._top_saved_tensors_default_hooks(True))


class WaysTest(BucketTest):
    def test_the_bits_of_torch_whatever_way_results_take(self):
        torch.manual_seed(0)
        pair = self.beside_torch(Net())
        for step, how in enumerate([*HOW_BLOCKS, *HOW_NETS]):
            with self.subTest(how):
                for model, _ in pair:
                    model.how = how
                self.assert_step(pair, lambda model: model(batch(step)).backward())

    def test_backwards_of_all_kinds(self):
        def with_hooks_around(model):
            with torch.autograd.graph.save_on_cpu():
                loss = model(batch(1))
            loss.backward()

        def generates_between(model):
            loss = model(batch(2))
            model.eval()
            with torch.no_grad():
                model(batch(3))
            model.train()
            loss.backward()

        def of_some(model):
            loss = model(batch(4))
            torch.autograd.grad(loss, [model.layers[1].a.weight, model.first.weight], retain_graph=True)
            loss.backward()

        def of_two_losses(model):
            (model(batch(5)) + model(batch(6))).backward()

        torch.manual_seed(1)
        pair = self.beside_torch(Net("object"))
        for backward in with_hooks_around, generates_between, of_some, of_two_losses:
            with self.subTest(backward.__name__):
                self.assert_step(pair, backward)
        with self.subTest("one graph twice"):
            for model, optimizer in pair:
                with optimizer.no_sync() if isinstance(optimizer, Optimizer) else contextlib.nullcontext():
                    loss = model(batch(9))
                    loss.backward(retain_graph=True)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            self.assert_same(pair)

    def test_blocks_that_are_compiled(self):
        torch.manual_seed(2)
        pair = self.beside_torch(Net(), lambda block: block.compile(backend="aot_eager"))
        for step, how in enumerate(["plain", "saved by a function", "part of a weight"]):
            with self.subTest(how):
                for model, _ in pair:
                    model.how = how
                self.assert_step(pair, lambda model: model(batch(step)).backward())

class WeightsTest(BucketTest):
    def test_a_backward_has_one_unit_at_a_time(self):
        torch.manual_seed(3)
        model = Net()
        optimizer = self.start(model)
        seen = []

        def released(buckets, unit):
            if buckets.there(unit):
                seen.append((unit, [other for other in range(1, 4) if buckets.there(other)]))
            release(buckets, unit)

        release = _buckets.Buckets.release
        with mock.patch.object(_buckets.Buckets, "release", released):
            for how in "object", "saved by a function", "checkpoint within", "checkpoint around", "reentrant around":
                with self.subTest(how):
                    model.how = how
                    loss = model(batch(1))
                    seen.clear()
                    loss.backward()
                    self.assertTrue(all(there == [unit] for unit, there in seen if unit > 0), seen)
                    self.assertEqual(list(dict.fromkeys(unit for unit, _ in seen if unit > 0)), [3, 2, 1])
                    optimizer.step()
                    optimizer.zero_grad()

    def test_lists_in_lists_and_dicts_have_units_and_ties_are_the_root_s(self):
        class Nested(nn.Module):
            def __init__(self):
                super().__init__()
                self.stages = nn.ModuleList([
                    nn.ModuleList([Block(), Block()]), nn.ModuleDict({"wide": Block(), "out": nn.Linear(6, 6)}),
                ])
                self.more = nn.ModuleDict({"left": Block(), "right": Block()})
                self.frame = nn.ModuleDict({"last": nn.Linear(6, 6), "blocks": nn.ModuleList([Block()])})
                self.frame["last"].weight = self.more["left"].a.weight

            def forward(self, x):
                for block in self.stages[0]:
                    x = block(x)
                x = self.stages[1]["out"](self.stages[1]["wide"](x))
                for block in self.more.values():
                    x = block(x)
                return self.frame["last"](self.frame["blocks"][0](x)).square().mean()

        torch.manual_seed(4)
        start = Nested()
        parameters = facts(start).parameters
        found, root = units(start, parameters)
        self.assertEqual(
            [parameters[unit.parameters[-1]].given.rsplit(".", 2)[0] for unit in found],
            ["stages.0.0", "stages.0.1", "stages.1.wide", "stages.1", "more.left", "more.right", "frame.blocks.0"])
        self.assertEqual([parameters[index].given for index in root], ["more.left.a.weight", "frame.last.bias"])
        pair = self.beside_torch(start)
        for step in range(2):
            self.assert_step(pair, lambda model: model(batch(step)).backward())

    def test_what_is_compiled_with_its_blocks_is_the_root_s(self):
        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.layers = Net(), nn.ModuleList([Block()])

            def forward(self, x):
                return self.inner(self.layers[0](x))

        torch.manual_seed(5)
        model = Outer()
        model.inner.compile(backend="eager")
        self.assertEqual([unit.module for unit in units(model, facts(model).parameters)[0]], [model.layers[0]])
        model.compile(backend="eager")
        self.assertEqual(units(model, facts(model).parameters)[0], [])


class RefusedTest(BucketTest):
    def test_programs_that_would_read_weights_by_themselves(self):
        torch.manual_seed(6)
        pair = self.beside_torch(nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))))
        model, x = pair[0][0], batch(1)
        right = pair[1][0](x)
        for part in model, model[0]:
            for what, call in {
                "torch.jit.trace": lambda: torch.jit.trace(part, x), "torch.jit.script": lambda: torch.jit.script(part),
                "torch.export": lambda: torch.export.export(part, (x,)),
            }.items():
                with self.subTest(what), self.assertRaisesRegex(errors.Unimplemented, f'{what} .*bucket.*state_dict'):
                    call()
            with self.assertRaisesRegex(errors.Unimplemented, "not there to be copied"):
                copy.deepcopy(part)
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), right)
        self.assert_step(pair, lambda model: model(x).square().mean().backward())
        pair[0][1].close()
        torch.testing.assert_close(torch.jit.script(model)(x), pair[1][0](x))

    def test_what_torch_allows_no_hooks_in(self):
        torch.manual_seed(8)
        model = Net()
        optimizer = self.start(model)
        with self.assertRaisesRegex(errors.Unimplemented, "torch.func.grad.*bucket.*full"):
            torch.func.grad(model)(batch(1))
        model(batch(1)).backward()
        optimizer.step()

    def test_saved_tensors_that_changed(self):
        model = Net()
        optimizer = self.start(model)
        x = model.layers[0](batch(1).requires_grad_(), "object").x
        y = model.layers[1](x)
        x.add_(1)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            y.sum().backward()
        optimizer.zero_grad()

    def test_calls_that_are_interrupted(self):
        class Interrupts(nn.Module):
            def forward(self, x):
                raise KeyboardInterrupt

        torch.manual_seed(7)
        pair = self.beside_torch(Net())
        model = pair[0][0]
        drop, model.layers[1].drop = model.layers[1].drop, Interrupts()
        model.how = "dropout"
        with self.assertRaises(KeyboardInterrupt):
            model(batch(1))
        model.layers[1].drop, model.how = drop, "object"
        for step in range(2):
            self.assert_step(pair, lambda model: model(batch(step)).backward())


if __name__ == "__main__":
    unittest.main()
