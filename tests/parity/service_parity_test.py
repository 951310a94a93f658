#!/usr/bin/env python3
"""The service that a trainer starts for itself: it ends with its trainer, however that ends, and ranks share one."""
import datetime
import os
import socket
import subprocess
import sys
import threading
import time
import unittest
from unittest import mock

import shardmesh
import torch
from shardmesh import errors
from shardmesh.torch import Optimizer
from shardmesh.torch._machine import _service

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "testing")]
from cluster import Cluster
from processes import Leftovers

BIN = os.environ.get("SHARDMESH_BIN_DIR", "")
TRAINER = """
import os, sys
import shardmesh
from shardmesh.torch._machine import _service
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
"""
START = TRAINER + """
service = _service.find(None, 0, 1, 2, 60)
print(service.address, flush=True)
"""
FORKS = START + """
child = os.fork()
if child == 0:
    service.close()
    sys.exit(0)  # as any program that ends: with what atexit has
assert os.waitpid(child, 0)[1] == 0
assert os.path.isdir(service._shared.running.folder)
assert shardmesh.connect(service.address).jobs() == []
"""
RANK = TRAINER + """
services = [_service.find(None, rank, world, 1, 60) for _ in range(2)]
assert [shardmesh.connect(service.address).jobs() for service in services] == [[], []]
with open(os.path.join(sys.argv[1], f"rank{rank}"), "w") as told:
    print(*(service.address for service in services), file=told)
import torch
torch.distributed.init_process_group("gloo")  # which serves its own store there, or uses torchrun's
torch.distributed.barrier()
"""

FAILS = """
import os, sys, time
import torch
from shardmesh import errors
from shardmesh.torch import Optimizer
torch.set_num_threads(1)
rank, model, way, start = os.environ["RANK"], torch.nn.Linear(2, 2), sys.argv[2], time.monotonic()
if rank == "0" and way == "begin":
    Optimizer._begin = lambda self: 1 / 0
try:
    Optimizer(model, resume="/nowhere" if way == "resume" else None, timeout=25)
except (errors.Error, ZeroDivisionError) as error:
    told = f"{type(error).__name__}: {error}"
else:
    told = "begun"
with open(os.path.join(sys.argv[1], f"rank{rank}"), "w") as file:
    print(f"{time.monotonic() - start:.0f}", told, file=file)
time.sleep(1)  # torchrun would end the other
"""


def environment(**variables):
    """Of one rank, for a test in this process: none of the variables of ranks but these."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("MASTER_", "TORCHELASTIC_")) and name != "LOCAL_WORLD_SIZE"}
    return mock.patch.dict(os.environ, {**kept, **variables}, clear=True)


@unittest.skipUnless(BIN, "SHARDMESH_BIN_DIR is not set to bazel's folder of programs: ./test --lane parity sets it")
class Trainers(Leftovers):
    def run_trainer(self, *command):
        done = subprocess.run([sys.executable, *command], env=self.environment, capture_output=True, text=True,
                              timeout=180)
        self.assertEqual(done.returncode, 0, done.stderr)

    def start_trainer(self, script):
        """One that goes on until the end of its input."""
        return subprocess.Popen([sys.executable, "-c", script + "sys.stdin.read()"], env=self.environment, text=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE)


class EmbeddedTest(Trainers):
    def test_of_a_trainer_that_is_killed_nothing_is_left(self):
        with self.start_trainer(START) as trainer:
            self.assertIn(":", trainer.stdout.readline())
            self.assertGreater(len(self.processes()), 4)  # trainer, supervisor, shardctl, coordinator, node, workers
            trainer.kill()
        self.assert_nothing_left()

    def test_of_a_trainer_whose_supervisor_was_killed_too_no_process_is_left(self):
        with self.start_trainer(START + "print(service._shared.running._supervisor.pid, flush=True)\n") as trainer:
            self.assertIn(":", trainer.stdout.readline())
            os.kill(int(trainer.stdout.readline()), 9)
            trainer.communicate()  # the end of its input: it ends by itself
        self.assert_nothing_left()

    def test_a_forked_child_closes_nothing_and_exit_closes_it(self):
        self.run_trainer("-c", FORKS)
        self.assert_nothing_left()

    def test_it_outlives_the_thread_that_started_it(self):
        started = []
        thread = threading.Thread(target=lambda: started.append(_service.find(None, 0, 1, 1, 60)))
        thread.start()
        thread.join(60)
        service, = started
        self.addCleanup(service.close)
        with self.assertRaises(subprocess.TimeoutExpired):
            service._shared.running._supervisor.wait(0.5)
        self.assertEqual(shardmesh.connect(service.address).jobs(), [])
        service.close()
        service.close()
        self.assertFalse(os.path.exists(service._shared.running.folder))
        self.assertIsNotNone(service._shared.running._supervisor.poll())

    def test_a_service_that_does_not_start_is_quoted_and_leaves_nothing(self):
        with mock.patch.dict(os.environ, self.environment):
            with mock.patch.object(_service, "_command", lambda *_: ["/bin/sh", "-c", "echo disk full >&2; exit 1"]):
                with self.assertRaisesRegex(errors.Unavailable, "\n  disk full"):
                    _service.find(None, 0, 1, 1, 60)
            with mock.patch.object(_service, "_command", lambda *_: ["/bin/sh", "-c", "echo waits; exec sleep 600"]):
                with self.assertRaisesRegex(errors.DeadlineExceeded, "not ready in 0.5 s.*\n  waits"):
                    _service.find(None, 0, 1, 1, 0.5)
        self.assert_nothing_left()


class RanksTest(Trainers):
    def told(self):
        said = []
        for rank in "rank0", "rank1":
            with open(os.path.join(self.scratch, rank), encoding="utf-8") as told:
                said.append(told.read().split())
            os.remove(told.name)
        return said

    def script(self, text=RANK):
        path = os.path.join(self.scratch, "trainer.py")
        with open(path, "w", encoding="utf-8") as script:
            script.write(text)
        return path

    def test_an_error_of_rank_0_is_raised_at_once_and_told_to_the_others(self):
        for way, said in ("resume", "NotFound: /nowhere has no checkpoint"), ("begin", "ZeroDivisionError"):
            with self.subTest(way):
                self.run_trainer("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
                                 self.script(FAILS), self.scratch, way)
                first, second = self.told()
                self.assertLess(int(first[0]), 15)
                self.assertRegex(" ".join(first[1:]), "^" + said)
                if way == "resume":
                    self.assertLess(int(second[0]), 15)
                    self.assertRegex(
                        " ".join(second[1:]), "^Unavailable: rank 1: rank 0 ended before the job began: /nowhere has no"
                    )

    def test_ranks_of_torchrun_find_the_same_services(self):
        self.run_trainer("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", self.script(),
                         self.scratch)
        first, second = self.told()
        self.assertEqual(first, second)
        self.assertEqual(len(set(first)), 2)
        os.remove(self.script())
        self.assert_nothing_left()

    def test_ranks_without_torchrun_find_the_same_services(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command, ranks = [sys.executable, self.script(), self.scratch], []
        for rank in "0", "1":
            variables = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            ranks.append(subprocess.Popen(command, env={**self.environment, **variables}, stderr=subprocess.PIPE,
                                          text=True))
        for rank in ranks:
            with rank:
                error = rank.communicate(timeout=180)[1]
                self.assertEqual(rank.returncode, 0, error)
        first, second = self.told()
        self.assertEqual(first, second)
        os.remove(self.script())
        self.assert_nothing_left()


class UnixSocketTest(unittest.TestCase):
    @unittest.skipUnless(BIN, "SHARDMESH_BIN_DIR is not set to bazel's folder of programs: ./test --lane parity sets it")
    def test_an_optimizer_of_a_coordinator_on_a_unix_socket_trains(self):
        with Cluster(workers=1, retained=True, unix=True, coordinator_flags=("--default-mesh", "fsdp=1")) as cluster:
            self.assertRegex(cluster.address, "^unix:/")
            model = torch.nn.Linear(2, 2)
            optimizer = Optimizer(model, "AdamW", lr=0.1, service=cluster.address, job="unix")
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            self.assertEqual(optimizer.committed_step, 1)
            optimizer.close()


class WaitingTest(unittest.TestCase):
    def setUp(self):
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.enterContext(environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.store.port),
                                      TORCHELASTIC_USE_AGENT_STORE="True"))

    def test_a_rank_whose_rank_0_never_comes_is_told_in_time(self):
        start = time.monotonic()
        with self.assertRaisesRegex(errors.DeadlineExceeded, "rank 1: rank 0 did not start the service within 0.5 s"):
            _service.find(None, 1, 2, 1, 0.5)
        self.assertLess(time.monotonic() - start, 20)

    def test_a_rank_without_a_store_that_answers_is_told_in_time(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        start = time.monotonic()
        with self.assertRaisesRegex(errors.DeadlineExceeded, "rank 0 did not start the service within 0.5 s"):
            _service.find(None, 1, 2, 1, 0.5)
        self.assertLess(time.monotonic() - start, 20)

    def test_a_store_that_accepts_and_is_silent_is_given_up_in_time(self):
        met = []

        def find():
            try:
                _service.find(None, 1, 2, 1, 0.5)
            except errors.Error as error:
                met.append(error)

        with socket.create_server(("127.0.0.1", 0)) as silent:
            os.environ["MASTER_PORT"] = str(silent.getsockname()[1])
            finding = threading.Thread(target=find, daemon=True)
            finding.start()
            finding.join(20)
            self.assertFalse(finding.is_alive())
        self.assertIsInstance(met[0], errors.DeadlineExceeded)
        self.assertIn("rank 0 did not start the service within 0.5 s", str(met[0]))

    def test_a_rank_whose_rank_0_comes_late_is_not_held_up_by_the_store(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        opens = []
        with mock.patch.object(torch.distributed, "TCPStore", side_effect=lambda *_, **__: opens.append(1) or time.sleep(60)):
            start = time.monotonic()
            with self.assertRaisesRegex(errors.DeadlineExceeded, "rank 0 did not start the service within 0.5 s"):
                _service.find(None, 1, 2, 1, 0.5)
        self.assertLess(time.monotonic() - start, 20)
        self.assertEqual(opens, [1])

    def test_a_rank_is_told_why_rank_0_could_not_start_it(self):
        with mock.patch.object(_service, "Embedded", side_effect=errors.Unavailable("no memory")):
            with self.assertRaisesRegex(errors.Unavailable, "^no memory"):
                _service.find(None, 0, 2, 1, 20)
        _service._finds -= 1  # the other rank's count
        with self.assertRaisesRegex(errors.Unavailable, "rank 1: rank 0 could not start the service: no memory"):
            _service.find(None, 1, 2, 1, 20)

    def test_a_rank_0_that_cannot_serve_the_others_says_so(self):
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        with socket.create_server(("127.0.0.1", 0)) as taken:
            os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
            with self.assertRaisesRegex(errors.Unavailable, f"127.0.0.1:{os.environ['MASTER_PORT']}"):
                _service.find(None, 0, 2, 1, 0.5)

    def test_the_store_of_an_initialised_process_group_is_used(self):
        os.environ.pop("MASTER_PORT")
        torch.distributed.init_process_group("gloo", store=self.store, rank=0, world_size=1,
                                             timeout=datetime.timedelta(seconds=20))
        self.addCleanup(torch.distributed.destroy_process_group)
        with mock.patch.object(_service, "Embedded") as embedded:
            embedded.return_value.address = "127.0.0.1:7000"
            _service.find(None, 0, 2, 1, 20)
        _service._finds -= 1
        self.assertEqual(_service.find(None, 1, 2, 1, 20).address, "127.0.0.1:7000")

    def test_what_cannot_be_is_refused(self):
        self.assertEqual(_service.find("[::1]:7000", 3, 4, None, 1).address, "[::1]:7000")
        for address in "7000", ":7000", "host:", "host:0", "host:65536", "a b:1", "http://host:1":
            with self.subTest(address), self.assertRaisesRegex(errors.InvalidArgument, "like 10.0.0.1:7000"):
                _service.find(address, 0, 1, 1, 1)
        for rank, world in (1, 1), (-1, 2), (0, 0):
            with self.subTest((rank, world)), self.assertRaises(errors.InvalidArgument):
                _service.find(None, rank, world, 1, 1)
        with self.assertRaisesRegex(errors.InvalidArgument, "workers is 0"):
            _service.find(None, 0, 1, 0, 1)
        with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
            with self.assertRaisesRegex(errors.FailedPrecondition, "2 of 4 ranks are on this machine"):
                _service.find(None, 0, 4, 1, 1)
        os.environ.pop("MASTER_ADDR")
        with self.assertRaisesRegex(errors.FailedPrecondition, "torchrun"):
            _service.find(None, 0, 2, 1, 1)

    def test_programs_that_are_nowhere(self):
        with mock.patch.dict(os.environ, {"SHARDMESH_BIN_DIR": "/nowhere"}):
            with self.assertRaisesRegex(errors.NotFound, "no program shardctl in SHARDMESH_BIN_DIR=/nowhere"):
                _service.find(None, 0, 1, 1, 1)
        with mock.patch.dict(os.environ, {"PATH": "/nowhere"}), mock.patch("shardmesh._programs.PACKAGED", "/nowhere"):
            os.environ.pop("SHARDMESH_BIN_DIR", None)
            with self.assertRaisesRegex(errors.NotFound, "install the package from its wheel"):
                _service.find(None, 0, 1, 1, 1)


if __name__ == "__main__":
    unittest.main()
