#!/usr/bin/env python3
"""States that are reset, or read and written where torch.optim has them: as torch, or an error that says what to do instead."""
import collections
import copy
import os
import sys
import unittest

import torch
from shardmesh import errors
from shardmesh.torch import Optimizer
from torch import nn

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
import ranks
from service import ServiceTest

ALGORITHMS = {
    "AdamW": {}, "Adam": {"amsgrad": True}, "SGD": {"momentum": 0.9, "dampening": 0.5},
}


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 2, bias=False))


def train(model, optimizer, steps):
    for step in steps:
        model(torch.randn(6, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def reset(model, optimizer, state, weights=None):
    if weights is not None:
        model.load_state_dict(weights)
    optimizer.load_state_dict(state)


def emptied(model, optimizer, first):
    reset(model, optimizer, {**optimizer.state_dict(), "state": {}})


RESETS = {
    "its first state": lambda model, optimizer, first: reset(model, optimizer, first[0]),
    "its first state and weights": lambda model, optimizer, first: reset(model, optimizer, *first),
    "its own without states": emptied,
}


def on_ranks(address):
    def run(rank, world):
        model = model_of()
        with Optimizer(model, lr=1e-2, service=address, job="ranks", slots=2, timeout=20) as optimizer:
            first = copy.deepcopy(optimizer.state_dict())
            for steps in (0, 1), (2, 3):
                train(model, optimizer, steps)
                optimizer.load_state_dict(first)
            train(model, optimizer, [4])
            return optimizer.committed_step, [one.tolist() for one in model.parameters()]
    return ranks.fork(2, run, seconds=60)


class StatesTest(ServiceTest):
    def optimizer(self, model, algorithm="AdamW", job="", **options):
        optimizer = Optimizer(model, algorithm, service=self.address, job=f"{self.id().rpartition('.')[2]}{job}".replace(" ", "-"),
                              **{"lr": 0.01, "timeout": 20, **options})
        self.addCleanup(optimizer.close)
        return optimizer

    def assert_close(self, one, other):
        for ours, theirs in zip(one.state_dict().values(), other.state_dict().values()):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)

    def test_a_state_without_states_resets_them(self):
        for algorithm, options in ALGORITHMS.items():
            for what, change in RESETS.items():
                with self.subTest(algorithm, what=what):
                    ours, theirs = model_of(), model_of()
                    for model, optimizer in (
                        (ours, self.optimizer(ours, algorithm, algorithm + what, **options)),
                        (theirs, getattr(torch.optim, algorithm)(theirs.parameters(), lr=0.01, **options)),
                    ):
                        first = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
                        train(model, optimizer, range(3))
                        change(model, optimizer, first)
                        train(model, optimizer, range(3, 6))
                        if model is ours:
                            self.assertEqual(optimizer.committed_step, 3)
                    self.assert_close(ours, theirs)

    def test_of_torch_s_own_and_with_formats_and_residency(self):
        for number, options in enumerate(({}, {"states": "dyn8"}, {"weights": "bf16+16"}, {"residency": "bucket"})):
            with self.subTest(**options):
                model, theirs = model_of(), model_of()
                optimizer = self.optimizer(model, job=str(number), **options)
                train(model, optimizer, range(3))
                optimizer.load_state_dict(torch.optim.AdamW(theirs.parameters(), lr=0.01).state_dict())
                self.assertEqual((optimizer.committed_step, optimizer.state_dict()["state"]), (0, {}))
                train(model, optimizer, range(1))
                self.assertEqual(optimizer.state_dict()["state"][0]["step"], 1)

    def test_other_hyperparameters_without_states_before_a_step(self):
        ours, theirs = model_of(), model_of()
        for model, optimizer in (ours, self.optimizer(ours)), (theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01)):
            others = torch.optim.AdamW(model_of().parameters(), lr=0.02, betas=(0.5, 0.6), weight_decay=0.3)
            optimizer.load_state_dict(others.state_dict())
            train(model, optimizer, range(3))
        self.assert_close(ours, theirs)

    def test_an_algorithm_without_states_stays_at_its_step(self):
        ours, theirs = model_of(), model_of()
        for model, optimizer in (ours, self.optimizer(ours, "SGD")), (theirs, torch.optim.SGD(theirs.parameters(), lr=0.01)):
            first = copy.deepcopy(optimizer.state_dict())
            train(model, optimizer, range(2))
            optimizer.load_state_dict(first)
            train(model, optimizer, range(2, 3))
            first["param_groups"][0]["weight_decay"] = 0.5
            optimizer.load_state_dict(first)
            train(model, optimizer, range(3, 4))
            if model is ours:
                self.assertEqual(optimizer.committed_step, 4)
        self.assert_close(ours, theirs)

    def test_every_rank_resets(self):
        both = ranks.program(self, __file__, self.address, seconds=90)
        self.assertEqual(both[0], both[1])
        self.assertEqual(both[0][0], 1)

    def test_states_where_torch_has_them_are_an_error(self):
        model = model_of()
        optimizer = self.optimizer(model)
        weight = model[0].weight
        uses = {
            "read": lambda: optimizer.state[weight]["exp_avg"],
            "write": lambda: optimizer.state.__setitem__(weight, {}),
            "assign": lambda: setattr(optimizer, "state", collections.defaultdict(dict)),
            "assign what it is, emptied": lambda: setattr(optimizer, "state", type(optimizer.state)()),
            "clear": lambda: optimizer.state.clear(),
            "pop": lambda: optimizer.state.pop(weight, None),
            "update": lambda: optimizer.state.update({weight: {}}),
            "setdefault": lambda: optimizer.state.setdefault(weight, {}),
            "delete": lambda: optimizer.state.__delitem__(weight),
            "or": lambda: optimizer.state.__ior__({}),
            "popitem": lambda: optimizer.state.popitem(),
        }
        for steps in range(2):
            for what, use in uses.items():
                with self.subTest(what, steps=steps), self.assertRaisesRegex(
                    errors.FailedPrecondition, r"in the service.*state_dict\(\).*load_state_dict\(\{\*\*state"
                ):
                    use()
            train(model, optimizer, [steps])
        state = optimizer.state_dict()
        optimizer.load_state_dict({**state, "state": {}})  # as the error says
        self.assertEqual(optimizer.committed_step, 0)

    def test_what_looks_for_states_finds_none(self):
        model = model_of()
        optimizer = self.optimizer(model)
        for steps in range(2):
            state = optimizer.state
            self.assertIsInstance(state, collections.defaultdict)
            self.assertEqual((len(state), bool(state), model[0].weight in state, state.get(model[0].weight)), (0, False, False, None))
            self.assertEqual((state, copy.deepcopy(state), copy.copy(state), state.copy()), ({},) * 4)
            copy.deepcopy(state)[model[0].weight]["mine"] = 1
            with self.assertLogs("shardmesh.torch", "WARNING") if steps else self.assertNoLogs("shardmesh.torch", "WARNING") as log:
                for _ in range(2):
                    self.assertEqual((list(state), list(state.keys()), list(state.values()), list(state.items())), ([], [], [], []))
            if steps:
                self.assertEqual(len(log.output), 1)
                self.assertRegex(log.output[0], "loop over optimizer.state finds nothing.*load_state_dict")
            train(model, optimizer, [steps])
        self.assertEqual(len(optimizer.state_dict()["state"]), 2)
        self.assertEqual(len(optimizer.state), 0)
        optimizer.close()
        self.assertEqual(len(optimizer.state), 0)


if __name__ == "__main__":
    if len(sys.argv) > 1 and ":" in sys.argv[1]:
        ranks.report(on_ranks(sys.argv[1]))
    else:
        unittest.main()
