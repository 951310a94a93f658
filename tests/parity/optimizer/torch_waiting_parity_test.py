#!/usr/bin/env python3
"""A rank that waits for others in step(): on and on while they are alive, not at all for one that has left, and up to
the timeout for one that never came or is stopped."""
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import unittest

import torch
import shardmesh
from shardmesh import errors
from shardmesh.torch import Optimizer, follow
from torch import nn

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
import ranks
from service import SHARDCTL, ServiceTest

TIMEOUT, START = 1.0, 30.0
CONTROL_CALL = 10.0  # seconds of a call that only asks, where nothing else is said
PROGRAM = os.path.abspath(__file__)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def backward(model):
    model(torch.ones(1, 8)).square().mean().backward()


class Heard(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def is_slow(optimizer, model):
    time.sleep(2.5 * TIMEOUT)
    backward(model)
    optimizer.step()


def closes(optimizer, model):
    optimizer.close()


def dies(optimizer, model):
    os.kill(os.getpid(), signal.SIGKILL)


def stops(optimizer, model):
    os.kill(os.getpid(), signal.SIGSTOP)


def pair(address, job, rank_1, **options):
    """Makes a step on two ranks; then rank 1 does rank_1(), and rank 0 another step. What rank 0 met, after how many
    seconds, its warnings, and the process of rank 1."""
    child = os.fork()
    os.environ.update(RANK="1" if child == 0 else "0", WORLD_SIZE="2")
    model = Blocks()
    optimizer = Optimizer(model, "SGD", lr=0.1, service=address, job=job, timeout=TIMEOUT, **options)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    if child == 0:
        rank_1(optimizer, model)
        os._exit(0)
    heard = Heard()
    logging.getLogger("shardmesh.torch").addHandler(heard)
    begin, met = time.monotonic(), None
    try:
        backward(model)
        optimizer.step()
    except errors.Error as error:
        met = type(error).__name__, str(error)
    seconds = time.monotonic() - begin
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return {"met": met, "seconds": seconds, "warnings": heard.lines, "pid": child, "step": optimizer.committed_step}


def host_closes():
    """Rank 0 of a service of its own closes at once, rank 1 later than the timeout. How rank 1 ended, and the warnings of
    rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    child = os.fork()
    os.environ.update(RANK="1" if child == 0 else "0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    heard = Heard()
    logging.getLogger("shardmesh.torch").addHandler(heard)
    optimizer = Optimizer(Blocks(), "SGD", lr=0.1, timeout=START)
    optimizer._started._running._shared.running._timeout = TIMEOUT
    if child == 0:
        time.sleep(2.5 * TIMEOUT)
        optimizer.job.digest()
        optimizer.close()
        os._exit(0)
    optimizer.close()
    return {"ended": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "warnings": heard.lines}


def in_a_child(call):
    """What call() returns, of a process of its own."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        with os.fdopen(writes, "w") as file:
            json.dump(call(), file)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as file:
        said = file.read()
    os.waitpid(child, 0)
    return json.loads(said)


def all_pairs(address):
    cases = [("is_slow", "full"), ("is_slow", "bucket"), ("dies", "full"), ("dies", "bucket"), ("closes", "full"),
             ("closes", "bucket"), ("stops", "full")]
    said = {
        f"{what} {residency}": in_a_child(
            lambda: pair(address, f"{what}-{residency}", globals()[what], residency=residency)
        )
        for what, residency in cases
    }
    return {**said, "host_closes": in_a_child(host_closes)}


class WaitingTest(ServiceTest):
    WORKERS = 1

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.said = ranks.program(cls(), PROGRAM, "pairs", cls.address, seconds=120)

    def each(self, what):
        return [said for name, said in self.said.items() if name.split()[0] == what]

    def test_a_slow_rank_is_waited_for(self):
        for said in self.each("is_slow"):
            self.assertEqual((said["met"], said["step"]), (None, 2))
            self.assertIn(f"for rank 1 (pid {said['pid']}), which is alive", said["warnings"][0])

    def test_a_rank_that_dies_is_named_at_once(self):
        for said in self.each("dies"):
            self.assertEqual(said["met"][0], "FailedPrecondition")
            self.assertIn(f"needs rank 1 (pid {said['pid']}), which left the job", said["met"][1])
            self.assertLess(said["seconds"], TIMEOUT)

    def test_a_rank_with_fewer_batches_is_named_at_once(self):
        for said in self.each("closes"):
            self.assertEqual(said["met"][0], "FailedPrecondition")
            self.assertIn("or give each rank as many batches", said["met"][1])
            self.assertLess(said["seconds"], TIMEOUT)

    def test_rank_0_keeps_its_service_for_ranks_that_are_alive(self):
        (said,) = self.each("host_closes")
        self.assertEqual(said["ended"], 0)
        self.assertIn("lets the service run for ranks that still use it: 1", said["warnings"][0])

    def test_a_stopped_rank_is_waited_for_up_to_the_timeout(self):
        (said,) = self.each("stops")
        self.assertEqual(said["met"][0], "DeadlineExceeded")
        self.assertIn("missing slots: 1: rank 1", said["met"][1])
        self.assertIn("whose process is stopped", said["met"][1])

    def test_a_coordinator_that_is_silent_is_given_up_at_the_timeout(self):
        with Optimizer(Blocks(), "SGD", lr=0.1, service=self.address, job="saved", timeout=START) as optimizer:
            path = optimizer.save(self.path("saved")).path
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            client = shardmesh.connect(address)
            for name, call in {
                "new": lambda: Optimizer(Blocks(), "SGD", lr=0.1, service=address, timeout=TIMEOUT),
                "resume": lambda: Optimizer(Blocks(), "SGD", lr=0.1, service=address, resume=path, timeout=TIMEOUT),
                "follow": lambda: follow(Blocks(), service=address, job="saved", timeout=TIMEOUT),
                "job": lambda: client.job("saved", timeout=TIMEOUT),
                "restore": lambda: client.restore(path, timeout=TIMEOUT),
            }.items():
                with self.subTest(name):
                    begin = time.monotonic()
                    with self.assertRaises((errors.DeadlineExceeded, errors.Unavailable)):
                        call()
                    self.assertLess(time.monotonic() - begin, CONTROL_CALL)
            begin = time.monotonic()
            command = [SHARDCTL, "restore", path, "--coordinator", address, "--timeout", str(TIMEOUT)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            self.assertLess(time.monotonic() - begin, CONTROL_CALL)
            self.assertIn("DEADLINE_EXCEEDED", done.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] == ["pairs"]:
        ranks.report(all_pairs(sys.argv[2]))
    else:
        unittest.main()
