#!/usr/bin/env python3
"""State dicts of models with children that are called like wrappers: each is read as whoever wrote it meant it, whichever wrappers
both models have."""
import itertools
import os
import sys
import unittest

import shardmesh.torch
import torch
from shardmesh._load import LoadMismatch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from service import ServiceTest  # noqa: E402


WRAPPERS = "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"


def compiled(module):
    return torch.compile(module, backend="eager")


def part_compiled(module):
    for key, child in list(module._modules.items()):
        module._modules[key] = compiled(child)
    return module


WRAPS = {
    "bare": lambda module: module, "compiled": compiled, "data parallel": nn.DataParallel,
    "compiled data parallel": lambda module: compiled(nn.DataParallel(module)),
    "data parallel compiled": lambda module: nn.DataParallel(compiled(module)),
    "parts compiled": part_compiled, "all compiled": lambda module: compiled(part_compiled(module)),
    "checkpointed": checkpoint_wrapper,
}


class Net(nn.Module):
    """Calls its children one after the other."""

    def __init__(self, children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x):
        for child in self.children():
            x = torch.tanh(child(x))
        return x


def nets(key):
    """Of a child with this name: beside one with a sub-name equal to one of its own, alone, and twice."""
    def linear():
        return nn.Linear(4, 4)
    yield "twin", Net({key: Net({"head": linear()}), "head": linear(), "norm": nn.BatchNorm1d(4)})
    yield "alone", Net({key: linear()})
    yield "nested", Net({key: Net({key: Net({"head": linear()}), "head": linear()}), "last": linear()})
    yield "below", Net({"a": Net({key: linear()}), "b": Net({key: Net({"c": linear()}), "c": linear()})})


def filled(module, seed):
    for number, tensor in enumerate(module.state_dict(keep_vars=True).values()):
        tensor.data.fill_(seed + number)
    return module


class StateNamesTest(ServiceTest):
    def test_a_state_dict_of_any_wrapping_loads_into_any(self):
        pairs = list(itertools.product(WRAPS.items(), repeat=2))
        for key in WRAPPERS:
            for (what, _), ((one, wrap_one), (two, wrap_two)) in itertools.product(nets(key), pairs):
                def bare(seed):
                    return filled(dict(nets(key))[what], seed)
                with self.subTest(key=key, what=what, of=one, into=two):
                    expected = {name: value.clone() for name, value in bare(1).state_dict().items()}
                    other = bare(50)
                    given, into = wrap_one(bare(1)).state_dict(), wrap_two(other)
                    if key == "_checkpoint_wrapped_module" and what in ("twin", "nested") and "checkpointed" in (one, two):
                        # torch's own hooks take two names for one.
                        self.assertRaises(LoadMismatch, shardmesh.torch.load_state_dict, into, given)
                        continue
                    shardmesh.torch.load_state_dict(into, given)
                    loaded = shardmesh.torch.state_dict(other)
                    self.assertEqual(list(loaded), list(expected))
                    for name, value in expected.items():
                        self.assertTrue(torch.equal(loaded[name], value), name)

    def test_two_names_of_one_tensor_are_not_taken_one_for_the_other(self):
        model, values = nn.Linear(2, 2), nn.Linear(2, 2).state_dict()
        with self.assertRaises(LoadMismatch) as caught:
            shardmesh.torch.load_state_dict(model, {**values, "_orig_mod.weight": torch.zeros(2, 2)})
        self.assertEqual(caught.exception.unexpected, ["_orig_mod.weight"])

    def test_states_by_name_are_those_of_the_parameter_that_has_the_name(self):
        """As torch.distributed.checkpoint names them."""
        wrapped = compiled(Net({"_orig_mod": Net({"head": nn.Linear(4, 4)}), "head": nn.Linear(4, 4)}))
        named = [(name, one) for name, one in wrapped.named_parameters()]
        with shardmesh.torch.Optimizer(wrapped, "SGD", lr=0.5, momentum=0.9, service=self.address, job="by-name", timeout=20) as optimizer:
            wrapped(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            by_index = optimizer.state_dict()
            for state in by_index["state"].values():
                state["momentum_buffer"] = torch.rand(state["momentum_buffer"].shape)
            group = {**by_index["param_groups"][0], "params": [name for name, _ in reversed(named)]}
            optimizer.load_state_dict({
                "state": {name: by_index["state"][index] for index, (name, _) in enumerate(named)}, "param_groups": [group]})
            for index, state in optimizer.state_dict()["state"].items():
                self.assertTrue(torch.equal(state["momentum_buffer"], by_index["state"][index]["momentum_buffer"]), named[index][0])

    def test_a_model_with_bucket_residency_loads_and_shows_its_weights(self):
        model = Net({"layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
        with shardmesh.torch.Optimizer(model, service=self.address, job="bucket", residency="bucket", timeout=20):
            values = {name: torch.rand(value.shape) for name, value in model.state_dict().items()}
            shardmesh.torch.load_state_dict(model, values)
            for shown in model.state_dict(), shardmesh.torch.state_dict(model):
                self.assertEqual({name: value.tolist() for name, value in shown.items()},
                                 {name: value.tolist() for name, value in values.items()})


if __name__ == "__main__":
    sys.exit(unittest.main())
