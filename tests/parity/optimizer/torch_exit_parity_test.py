#!/usr/bin/env python3
"""Ranks that share a service of their own, and one of them ends, dies, stops or refuses at another time than in a step:
the others are told who it was, at once."""
import atexit
import json
import os
import selectors
import signal
import socket
import sys
import time
import unittest

import torch
from shardmesh import errors
from shardmesh.torch import Optimizer
from shardmesh.torch._machine import _service
from torch import nn

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
import ranks
from processes import Leftovers
from service import BIN

START, AT_ONCE = 60.0, 25.0  # seconds: of timeouts, and what is far below them on a machine that is busy, too
SOON = 0.5  # a timeout that is to pass
GRACE = 40.0  # of a service that waits for a trainer that is stopped
PROGRAM = os.path.abspath(__file__)
KEPT = []  # what nothing refers to is closed


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def step(optimizer, model):
    model(torch.ones(1, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def made(**options):
    model = Blocks()
    KEPT.append(Optimizer(model, "SGD", lr=0.1, timeout=START, **options))
    return KEPT[-1], model


def begun(**options):
    """An optimizer that has made a step."""
    optimizer, model = made(**options)
    step(optimizer, model)
    return optimizer, model


def load(model, factor):
    model.load_state_dict({name: value * factor for name, value in model.state_dict().items()})


def met(call):
    """The error that it ends with."""
    begin = time.monotonic()
    try:
        call()
    except errors.Error as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return None


def ended():
    """As a program whose script is over."""
    atexit._run_exitfuncs()


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


# What each rank does: {scenario: (rank 0, rank 1)}. Each is called with options of the optimizer.


def ends_without_close(**options):
    begun(**options)
    ended()


def ends_while_a_view_is_left(**options):
    optimizer, model = begun(**options)
    view = model.layers[0].weight.detach()
    optimizer.close()
    ended()
    return float(view.sum())


def steps(**options):
    optimizer, model = begun(**options)
    return met(lambda: step(optimizer, model))


def comes(**options):
    optimizer, model = made(**options)
    return met(lambda: step(optimizer, model))


def dies_in_its_constructor(**options):
    Optimizer._begin = lambda self: killed()
    made(**options)


def dies_before_a_change(**options):
    begun(**options)
    killed()


def edits(**options):
    optimizer, model = begun(**options)

    def call():
        with optimizer.editing():
            model.layers[0].weight.mul_(0.5)
        step(optimizer, model)

    return met(call)


def loads_later(**options):
    optimizer, model = begun(**options)
    time.sleep(SOON)

    def call():
        load(model, 0.5)
        step(optimizer, model)

    return met(call)


def closes(**options):
    optimizer, _ = begun(**options)
    optimizer.close()
    time.sleep(START)


def refuses(**options):
    """And goes on."""
    optimizer, model = begun(**options)
    said = met(lambda: load(model, float("nan")))
    time.sleep(AT_ONCE)
    return said


def loads(**options):
    optimizer, model = begun(**options)
    return met(lambda: load(model, 0.5))


def refuses_and_ends(**options):
    _, model = begun(**options)
    said = met(lambda: load(model, float("nan")))
    ended()
    return said


def closes_beside_a_stopped_one(**options):
    _service._GRACE_SECONDS = GRACE
    optimizer, _ = begun(**options)
    time.sleep(SOON)
    optimizer._started._running._shared.running._timeout = SOON
    begin = time.monotonic()
    optimizer.close()
    return time.monotonic() - begin


def stops(**options):
    begun(**options)
    os.kill(os.getpid(), signal.SIGSTOP)


SCENARIOS = {
    "ends": (ends_without_close, steps),
    "view": (ends_while_a_view_is_left, steps),
    "construction": (comes, dies_in_its_constructor),
    "edit_1": (edits, dies_before_a_change),
    "edit_0": (dies_before_a_change, edits),
    "dies_0": (dies_before_a_change, steps),
    "load_closed": (loads_later, closes),
    "refused_0": (refuses, loads),
    "refused_1": (loads_later, refuses_and_ends),
    "stopped": (closes_beside_a_stopped_one, stops),
}
BOTH = "ends", "construction", "edit_1", "edit_0"  # with bucket residency, too


def run(scenario, awaited, **options):
    """What rank `awaited` returned, which ends within AT_ONCE; "hangs". And the processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    reads, writes = os.pipe()
    children = []
    for rank, act in enumerate(SCENARIOS[scenario]):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank))
            said = act(**options)
            if rank == awaited:
                os.write(writes, json.dumps(said).encode())
            os._exit(0)
        children.append(child)
    os.close(writes)
    with selectors.DefaultSelector() as selector:
        selector.register(reads, selectors.EVENT_READ)
        said = os.read(reads, 1 << 16).decode() if selector.select(AT_ONCE + START) else '"hangs"'
    os.close(reads)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return {"said": json.loads(said or '"died"'), "pids": children}


def all_runs():
    waits = {name: 0 for name in ("construction", "edit_1", "load_closed", "refused_1", "stopped")}
    said = {name: run(name, waits.get(name, 1)) for name in SCENARIOS}
    return {**said, **{f"{name} bucket": run(name, waits.get(name, 1), residency="bucket") for name in BOTH}}


@unittest.skipUnless(BIN, "SHARDMESH_BIN_DIR is not set to bazel's folder of programs: ./test --lane parity sets it")
class ExitTest(Leftovers):
    said = None

    def setUp(self):
        super().setUp()
        if ExitTest.said is None:
            ExitTest.said = ranks.program(self, PROGRAM, "runs", seconds=600, environment=self.environment)
            self.assert_nothing_left()

    def assert_named(self, what, rank, how="left the job"):
        for name, run_of in self.said.items():
            if name.split()[0] != what:
                continue
            with self.subTest(name):
                kind, message, seconds = run_of["said"]
                self.assertEqual(kind, "FailedPrecondition")
                self.assertIn(f"rank {rank} (pid {run_of['pids'][rank]}), which {how}", message)
                self.assertLess(seconds, AT_ONCE)

    def test_rank_0_leaves_when_its_program_ends(self):
        self.assert_named("ends", 0)

    def test_a_rank_that_closed_has_left_though_a_view_of_its_weights_is_kept(self):
        self.assert_named("view", 0)

    def test_a_rank_that_dies_in_its_constructor_is_named_at_once(self):
        self.assert_named("construction", 1)

    def test_a_rank_that_dies_before_weights_change_is_named_at_once(self):
        self.assert_named("edit_1", 1)
        self.assert_named("edit_0", 0)

    def test_a_rank_0_that_dies_is_named(self):
        self.assert_named("dies_0", 0)

    def test_a_rank_that_left_before_weights_changed_is_named_at_once(self):
        self.assert_named("load_closed", 1)
        self.assert_named("refused_1", 1)

    def test_a_change_that_rank_0_refuses_ends_on_the_others_with_its_reason(self):
        kind, message, seconds = self.said["refused_0"]["said"]
        self.assertEqual(kind, "FailedPrecondition")
        self.assertRegex(message, 'rank 0 could not change the weights of job model, .*: parameter "layers.0.weight" has')
        self.assertLess(seconds, AT_ONCE)

    def test_rank_0_does_not_wait_for_connections_of_a_stopped_rank(self):
        self.assertLess(self.said["stopped"]["said"], GRACE / 2)


if __name__ == "__main__":
    if sys.argv[1:2] == ["runs"]:
        ranks.report(all_runs())
    else:
        unittest.main()
