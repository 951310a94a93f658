#!/usr/bin/env python3
"""Models of many parameters and many parameter groups: what torch.optim trains and saves, and work that grows with the
number of parameters, not with its square. Needs the programs: SHARDMESH_BIN_DIR."""
import copy
import os
import resource
import subprocess
import sys
import time
import unittest

import shardmesh.torch
import torch
from shardmesh import _dcp, errors
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from service import ServiceTest  # noqa: E402

FEW_DESCRIPTORS = """
import torch, shardmesh
import shardmesh.torch as sm
try:
    sm.Optimizer(torch.nn.Linear(2, 2), lr=1e-2, timeout=30.0)
except shardmesh.errors.Error as error:
    print(error)
"""


class Small(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.full((3,), 0.01 * (i % 97))) for i in range(count)])

    def forward(self):
        return torch.cat(list(self.parts))


def groups_of(model, count):
    """Layer-wise rates and decays: parameter i is in group i % count. The same of both optimizers."""
    groups = [{"params": [], "lr": 1e-2 * 0.9 ** (g % 30), "weight_decay": 0.01 * (g % 3)} for g in range(count)]
    for i, named in enumerate(model.named_parameters()):
        groups[i % count]["params"].append(named)
    return groups


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        values = model()
        (values - torch.linspace(-1, 1, values.numel()) * (step + 1)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9  # as a schedule does


def calls_of(function):
    """How many functions of Python and C a call makes, in this thread."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


class ManyParametersTest(ServiceTest):
    WORKERS = 2

    def optimizer(self, params, job, **options):
        optimizer = shardmesh.torch.Optimizer(params, "AdamW", service=self.address, job=job, **options)
        self.addCleanup(optimizer.close)
        return optimizer

    def check_groups(self, model, count, job, steps=3, **options):
        reference = copy.deepcopy(model)
        given = [{**group, "params": [p for _, p in group["params"]]} for group in groups_of(reference, count)]
        theirs = torch.optim.AdamW(given)
        ours = self.optimizer(groups_of(model, count), job, model=model, **options)
        train(reference, theirs, steps)
        train(model, ours, steps)
        return reference, theirs, ours

    def test_groups_of_layers_and_of_each_parameter_train_as_torchs(self):
        cases = (16, 28, "full"), (17, 28, "full"), (28, 56, "bucket"), (300, 300, "full")
        for count, parameters, residency in cases:
            with self.subTest(groups=count, residency=residency):
                model = Small(parameters)
                reference, theirs, ours = self.check_groups(model, count, f"groups-{count}", residency=residency)
                states = ours.state_dict()
                self.assertEqual([g["params"] for g in states["param_groups"]],
                                 [g["params"] for g in theirs.state_dict()["param_groups"]])
                for index, state in theirs.state_dict()["state"].items():
                    mine = states["state"][index]["exp_avg"]
                    torch.testing.assert_close(mine, state["exp_avg"], rtol=1e-5, atol=1e-7)
                ours.close()
                for mine, its in zip(model.parameters(), reference.parameters()):
                    torch.testing.assert_close(mine, its, rtol=0, atol=1e-6)

    def test_the_most_groups_train_and_one_more_is_refused_at_once(self):
        model = Small(4096)
        reference, _, ours = self.check_groups(model, 4096, "most-groups", steps=2, mesh="fsdp=2")
        ours.close()
        for mine, its in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-6)
        more = Small(4097)
        begin = time.monotonic()
        with self.assertRaisesRegex(errors.ResourceExhausted, "4097 parameter groups; a job has at most 4096"):
            shardmesh.torch.Optimizer(groups_of(more, 4097), "AdamW", model=more)  # no service is started for it
        self.assertLess(time.monotonic() - begin, 2)

    def test_state_dict_and_its_way_back_take_work_in_the_number_of_parameters(self):
        work = {}
        for count in 100, 400:
            model = Small(count)
            ours = self.optimizer(model, f"work-{count}", lr=1e-2)
            train(model, ours, 1)
            ours.state_dict()  # imports what it needs
            states = ours.state_dict()
            work[count] = (calls_of(ours.state_dict), calls_of(lambda: ours.load_state_dict(states)),
                           calls_of(lambda: train(model, ours, 1)))
            ours.close()
        for few, many in zip(work[100], work[400]):
            self.assertLess(many, 4.5 * few, work)

    def test_owner_of_a_state_is_the_longest_name_before_it(self):
        owners = dict.fromkeys(("a", "a.b", "a.b.exp_avg", "c.0"), 0)
        expected = {"a.exp_avg": "a", "a.b.exp_avg": "a.b", "a.b.exp_avg.exp_avg": "a.b.exp_avg", "c.exp_avg": "",
                    "a.b.exp_avg.scales": "a.b.exp_avg", "c.0.exp_avg.scales": "c.0", "exp_avg": "", "ab.x": ""}
        for name, owner in expected.items():
            self.assertEqual(_dcp._owner(name, owners), owner, name)

    def test_few_descriptors_are_named(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

        done = subprocess.run([sys.executable, "-c", FEW_DESCRIPTORS], capture_output=True, text=True, timeout=100,
                              preexec_fn=limit, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.assertRegex(done.stdout, r"RLIMIT_NOFILE is 64; raise it \(ulimit -n 4096\)", done.stderr)


if __name__ == "__main__":
    sys.exit(unittest.main())
