#!/usr/bin/env python3
"""Loads that fail: load_state_dict() of a model, or of a module in it, counts as a whole or not at all."""
import math
import os
import sys
import unittest

import shardmesh
import torch
from shardmesh import errors
from shardmesh.torch import Optimizer
from torch import nn

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
import ranks
from service import ServiceTest


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def train(model, optimizer):
    slots = optimizer._started.spec["slots"] // optimizer._started.ranks.world
    for slot in optimizer.slots(range(slots)) if optimizer._started.plan.pulled else range(slots):
        model(torch.randn(6, 8, generator=torch.Generator().manual_seed(slot))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def differing(model, before):
    return [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]


def infinite(state):
    state[next(iter(state))][0, 0] = math.inf


BAD = {
    "Missing key": lambda state: state.pop(next(name for name in state if name.endswith("0.bias"))),
    "Unexpected key": lambda state: state.update(more=torch.zeros(3)),
    "size mismatch": lambda state: state.update({list(state)[1]: torch.zeros(3)}),
    r"are not finite, such as inf at \[0, 0\]; load or write finite": infinite,
}
KINDS = {
    "full": {}, "bucket": {"residency": "bucket"}, "slots": {"slots": 2}, "pulled": {"slots": 2, "pulled": True},
    "quantized": {"gather": "int8_row", "deliver": "quantized"}, "bf16": {"weights": "bf16"},
}


def on_ranks(address, residency):
    """Of two ranks, whose loads fail: what differs afterwards, and the committed step."""
    def run(rank, world):
        model = Net()
        with Optimizer(model, "SGD", lr=0.1, service=address, job=f"ranks-{residency}", residency=residency, timeout=20) as optimizer:
            train(model, optimizer)
            before, changed = values(model), []
            for spoil in BAD.values():
                state = {name: value + 1 for name, value in before.items()}
                spoil(state)
                try:
                    model.load_state_dict(state)
                    changed.append("no error")
                except (RuntimeError, errors.InvalidArgument):
                    changed += differing(model, before)
                train(model, optimizer)
                before = values(model)
            return changed, optimizer.committed_step
    return ranks.fork(2, run, seconds=60)


class LoadsTest(ServiceTest):
    def optimizer(self, model, kind, what=""):
        optimizer = Optimizer(model, "SGD", lr=0.1, timeout=20, service=self.address, job=f"{self.id()}-{kind}-{what}", **KINDS[kind])
        self.addCleanup(optimizer.close)
        train(model, optimizer)
        return optimizer

    def test_nothing_of_a_load_that_fails_stays(self):
        loads = {
            "model": lambda model, state: model.load_state_dict(state),
            "a module": lambda model, state: model.layers[0].load_state_dict(state),
            "by names": lambda model, state: shardmesh.torch.load_state_dict(model, state),
        }
        for kind in KINDS:
            model = Net()
            optimizer = self.optimizer(model, kind)
            for what, load in loads.items():
                for said, spoil in BAD.items():
                    with self.subTest(kind=kind, load=what, said=said):
                        before = values(model)
                        kept = model.layers[0][1].running_mean
                        state = {name: value + 1 for name, value in (model.layers[0] if what == "a module" else model).state_dict().items()}
                        spoil(state)
                        with self.assertRaisesRegex((RuntimeError, errors.InvalidArgument), said if what != "by names" else ""):
                            load(model, state)
                        self.assertEqual(differing(model, before), [])
                        self.assertIs(model.layers[0][1].running_mean, kept)
                        optimizer.job.digest()
                        train(model, optimizer)
            self.assertEqual(optimizer.committed_step, 1 + 3 * len(BAD))
            optimizer.close()
            self.assertNotIn("load_state_dict", model.layers[0].__dict__)

    def test_what_waited_before_a_load_that_fails_still_waits(self):
        for kind in "full", "slots", "quantized", "bf16":
            with self.subTest(kind):
                model = Net()
                optimizer = self.optimizer(model, kind)
                with optimizer.editing():
                    model.layers[1][0].weight.mul_(0.5)
                before, state = values(model), values(model)
                BAD["Unexpected key"](state)
                with self.assertRaises(RuntimeError):
                    model.load_state_dict(state)
                self.assertEqual(differing(model, before), [])
                optimizer.upload()
                if kind != "quantized":
                    self.assertEqual(differing(model, before), [])
                model.layers[1][0].bias.data.fill_(0.25)
                with self.assertRaises(RuntimeError):
                    model.load_state_dict(state)
                with self.assertRaisesRegex(errors.FailedPrecondition, r"^layers\.1\.0\.bias was changed by hand"):
                    optimizer.upload()

    def test_objects_that_a_load_would_replace_come_back(self):
        for kind in "full", "bucket":
            with self.subTest(kind):
                model = Net()
                optimizer = self.optimizer(model, kind)
                before, own = values(model), list(model.parameters())
                with self.assertRaisesRegex(errors.FailedPrecondition, "other Parameter objects"):
                    model.load_state_dict({name: value + 1 for name, value in before.items()}, assign=True)
                self.assertEqual(differing(model, before), [])
                self.assertTrue(all(one is other for one, other in zip(own, model.parameters())))
                train(model, optimizer)

    def test_within_editing(self):
        for kind in "full", "bucket":
            with self.subTest(kind):
                model = Net()
                optimizer = self.optimizer(model, kind)
                before = values(model)
                with optimizer.editing():
                    model.layers[0].load_state_dict({name: value * 2 for name, value in values(model.layers[0]).items()})
                    model.layers[1][0].bias.fill_(0.5)
                    with self.assertRaises(RuntimeError):
                        model.load_state_dict({"more": torch.ones(1)})
                    with self.assertRaises(RuntimeError):
                        model.layers[1].load_state_dict({"0.weight": torch.ones(8, 8)})
                optimizer.upload()
                wanted = {name: value * 2 if name.startswith("layers.0") else value for name, value in before.items()}
                wanted["layers.1.0.bias"] = torch.full((8,), 0.5)
                self.assertEqual(differing(model, wanted), [])

    def test_a_state_dict_by_names_is_loaded_whatever_the_residency(self):
        for kind in "full", "bucket", "quantized":
            with self.subTest(kind):
                model, other = Net(), Net()
                optimizer = self.optimizer(model, kind)
                with torch.no_grad():
                    for parameter in other.parameters():
                        parameter.fill_(0.5)
                shardmesh.torch.load_state_dict(model, other.state_dict())
                self.assertEqual(differing(model, values(other)), [])
                train(model, optimizer)

    def test_on_two_ranks(self):
        for residency in "full", "bucket":
            with self.subTest(residency):
                said = ranks.program(self, __file__, self.address, residency, seconds=90)
                self.assertEqual(said, [[[], 1 + len(BAD)]] * 2)


if __name__ == "__main__":
    if len(sys.argv) == 3 and ":" in sys.argv[1]:
        ranks.report(on_ranks(*sys.argv[1:]))
    else:
        unittest.main()
