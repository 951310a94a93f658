#!/usr/bin/env python3
"""Bad input of shardmesh.torch: a typed error that says what to do, or it works; nothing hangs, and nothing is half done."""
import copy
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

import torch
from shardmesh import _client, errors
from shardmesh.torch import Optimizer
from torch import nn

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from processes import Leftovers
from service import BIN, ServiceTest

PROGRAM = """
import os, sys, torch
import shardmesh.torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = shardmesh.torch.Optimizer(model, "AdamW", lr=0.1, workers=2, timeout=20)
def backward(seed=0):
    model(torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
backward(); optimizer.step(); optimizer.zero_grad()
"""
GOES_ON = PROGRAM + """
print("ready", flush=True)
sys.stdin.readline()
for step in range(1, 8):
    backward(step); optimizer.step(); optimizer.zero_grad()
print(optimizer.job.digest(), flush=True)
"""
STACK = """
model = torch.nn.Module()
model.layers = torch.nn.ModuleList([torch.nn.Linear(4, 3)])
model.forward = lambda x: model.layers[0](x)
"""
LOSES = """
from shardmesh import errors
backward(1)
print("ready", flush=True)
sys.stdin.readline()
try:
    for step in range(1, 8):
        optimizer.step(); optimizer.zero_grad(); backward(step)
except errors.Error as error:
    print(type(error).__name__, end=" ")
optimizer.close()
print(bool(model.layers[0].weight.isnan().all()), flush=True)
"""
FORKS = PROGRAM + """
from shardmesh import errors
backward(1)
child = os.fork()
if child == 0:
    try:
        optimizer.step()
    except errors.FailedPrecondition as error:
        assert "was forked from" in str(error)
        optimizer.close()
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
optimizer.step()
assert optimizer.last.step == 2
"""


class Raises(torch.autograd.Function):
    """In its backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("half-way")


class Stack(nn.Module):
    """Four blocks; the backward may raise between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x, raises=False):
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if raises and index == 1:
                x = Raises.apply(x)
        return x


class Holds(nn.Module):
    def __init__(self, *tensors):
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def backward(model, seed=0, **how):
    columns = next(model.parameters()).shape[-1]
    model(torch.randn(2, columns, generator=torch.Generator().manual_seed(seed)), **how).square().mean().backward()


class BadInput(ServiceTest):
    def optimizer(self, model, algorithm="SGD", **options):
        options = {"lr": 0.1, "timeout": 10, "service": self.address, "job": self.id(), **options}
        optimizer = Optimizer(model, algorithm, **options)
        self.addCleanup(optimizer.close)
        return optimizer

    def rank(self, rank, world):
        return mock.patch.dict(os.environ, {"RANK": str(rank), "WORLD_SIZE": str(world)})

    def assert_trains(self, model, optimizer):
        """One more step, which the model sees."""
        optimizer.zero_grad()
        before, step = {name: value.clone() for name, value in model.state_dict().items()}, optimizer.committed_step
        backward(model)
        optimizer.step()
        self.assertEqual(optimizer.last[:3], (step + 1, False, False))
        self.assertFalse(any(torch.equal(before[name], value) for name, value in model.state_dict().items()))
        optimizer.zero_grad()


class ModelTest(BadInput):
    def test_parameters_that_were_given_other_memory(self):
        model = linear()
        optimizer = self.optimizer(model)
        model.weight.data = torch.zeros(3, 4)
        backward(model)
        with self.assertRaisesRegex(errors.FailedPrecondition, r"^weight lie elsewhere .*\.data =.*revert"):
            optimizer.step()
        optimizer.revert()
        self.assertTrue(torch.equal(model.weight, linear().weight))
        self.assert_trains(model, optimizer)

    def test_what_is_written_to_data_is_taken_back_with_all_that_lies_beside(self):
        learnt = []
        for written in False, True:
            model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
            nn.utils.vector_to_parameters(torch.linspace(-1, 1, 216), model.parameters())
            optimizer = self.optimizer(model, job=f"data-{written}")
            for step in range(4):
                backward(model, step)
                if written and step == 1:
                    model[1].bias.data.add_(1)
                    with self.assertRaisesRegex(errors.FailedPrecondition, "^1.bias was changed by hand"):
                        optimizer.step()
                    optimizer.revert()
                optimizer.step()
                optimizer.zero_grad()
            learnt.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        self.assertTrue(torch.equal(*learnt))

    def test_editing_is_the_same_with_either_residency(self):
        learnt = []
        for residency in "full", "bucket":
            model = Stack()
            optimizer = self.optimizer(model, job=f"edits-{residency}", residency=residency)
            self.assert_trains(model, optimizer)
            with optimizer.editing():
                model.layers[1].weight[0] = 1
                model.layers[2].weight.mul_(0.5)
            for _ in range(2):
                self.assert_trains(model, optimizer)
            with self.assertRaises(KeyError), optimizer.editing():
                raise KeyError
            self.assert_trains(model, optimizer)
            learnt.append(model.state_dict())
        for name, value in learnt[0].items():
            self.assertTrue(torch.equal(value, learnt[1][name]), name)

    def test_without_a_worker_on_this_host_weights_are_copied_and_the_same(self):
        learnt = []
        for here in True, False:
            model = linear()
            with mock.patch.object(_client.Job, "on_this_host", here):
                optimizer = self.optimizer(model, "AdamW", job=f"copied-{here}")
            self.assertEqual(optimizer._session.core.attached, here)
            for _ in range(3):
                self.assert_trains(model, optimizer)
            learnt.append({name: value.clone() for name, value in model.state_dict().items()})
        self.assertTrue(all(torch.equal(learnt[0][name], learnt[1][name]) for name in learnt[0]))

    def test_a_checkpoint_of_other_settings_is_refused(self):
        model = linear()
        optimizer = self.optimizer(model, "AdamW")
        backward(model)
        optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            optimizer.save(folder)
            others = ({"weight_decay": 0.5}, "weight_decay: 0.01 there, 0.5 here"), ({"clip_norm": 1e-4}, "clip_norm: 0 there"), (
                {"states": "dyn4"}, 'parameter 0 "weight": states: fp32 there, dyn4 here'), ({"slots": 2}, "slots: 1 there, 2 here")
            for options, what in others:
                with self.assertRaisesRegex(errors.InvalidArgument, what):
                    self.optimizer(linear(), "AdamW", resume=folder, job=self.id() + "2", **options)
            self.assertEqual(self.optimizer(linear(), "AdamW", resume=folder, job=self.id() + "3").committed_step, 1)

    def test_a_checkpoint_of_tied_weights_is_none_of_a_model_without_ties(self):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        optimizer = self.optimizer(model)
        apart = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        with tempfile.TemporaryDirectory() as folder:
            optimizer.save(folder)
            with self.assertRaisesRegex(errors.InvalidArgument, '"1.weight": tied to'):
                self.optimizer(apart, resume=folder, job=self.id() + "2")

    def test_a_mesh_of_more_ranks_than_workers(self):
        with self.assertRaisesRegex(errors.InvalidArgument, "say workers=3"):
            Optimizer(linear(), mesh="ddp=3")

    def test_pulled_slots_without_a_backward_or_a_batch(self):
        model = linear()
        optimizer = self.optimizer(model, pulled=True, slots=2)
        with self.assertRaisesRegex(errors.FailedPrecondition, "slot 0 had no backward"):
            for _ in optimizer.slots([0, 1]):
                pass
        for batches in [0], [0, 1, 2], torch.zeros(1, 2):
            with self.assertRaisesRegex(errors.InvalidArgument, f"there are {len(batches)} batches, and the job has 2 slots"):
                optimizer.slots(batches)

    def test_a_copy_of_a_model_is_a_model_of_its_own(self):
        model = Stack()
        optimizer = self.optimizer(model)
        copied = copy.deepcopy(model)
        copied.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(model.parameters(), Stack().parameters())))
        self.assertFalse(any(value.any() for value in copied.state_dict().values()))
        with self.assertRaisesRegex(errors.Unimplemented, "cannot be pickled .* state_dict"):
            pickle.dumps(model)
        self.assert_trains(model, optimizer)
        optimizer.close()
        pickle.dumps(model)

    def test_a_copy_of_a_model_whose_weights_are_not_there(self):
        model = Stack()
        optimizer = self.optimizer(model, residency="bucket")
        with self.assertRaisesRegex(errors.Unimplemented, "not there to be copied"):
            copy.deepcopy(model)
        self.assert_trains(model, optimizer)
        optimizer.close()
        self.assertTrue(torch.equal(copy.deepcopy(model).layers[0].weight, model.layers[0].weight))

    def test_a_parameter_of_another_shape(self):
        model = linear()
        optimizer = self.optimizer(model)
        model.weight.data = torch.zeros(5, 4)
        model.bias.data = torch.zeros(5)
        with self.assertRaisesRegex(errors.FailedPrecondition, r"has the shape \[5.*the job has \[3.*revert"):
            backward(model)
        optimizer.revert()
        self.assertTrue(torch.equal(model.weight, linear().weight))
        self.assert_trains(model, optimizer)

    def test_parameters_changed_by_hand(self):
        model = linear()
        optimizer = self.optimizer(model)
        backward(model)
        with torch.no_grad():
            model.bias.add_(1)
        with self.assertRaisesRegex(errors.FailedPrecondition, "^bias was changed by hand .* has its weights. Change it within"):
            optimizer.step()
        optimizer.revert()
        self.assert_trains(model, optimizer)

    def test_requires_grad_changed(self):
        for before in True, False:
            with self.subTest(before=before):
                model = linear()
                model.weight.requires_grad_(before)
                optimizer = self.optimizer(model, job=f"{self.id()}-{before}")
                model.weight.requires_grad_(not before)
                backward(model)
                with self.assertRaisesRegex(errors.FailedPrecondition, f"requires_grad of weight is {not before} now"):
                    optimizer.step()
                model.weight.requires_grad_(before)
                optimizer.step()
                self.assertEqual(optimizer.last.step, 1)

    def test_two_optimizers_on_one_parameter(self):
        model = linear()
        optimizer = self.optimizer(model)
        with self.assertRaisesRegex(errors.FailedPrecondition, "weight is in another optimizer .* close"):
            self.optimizer(nn.ModuleList([model, linear()]), job="another")
        self.assert_trains(model, optimizer)
        optimizer.close()
        self.assert_trains(model, self.optimizer(model, job="another"))

    def test_parameters_that_no_job_has(self):
        memory = torch.zeros(8)
        for said, kind, *tensors in [
            ("complex", errors.Unimplemented, torch.zeros(3, dtype=torch.complex64)),
            ("float64", errors.Unimplemented, torch.zeros(3, dtype=torch.float64)),
            ("no elements", errors.InvalidArgument, torch.zeros(0, 3)),
            ("share memory", errors.InvalidArgument, torch.zeros(1).expand(4)),
            ("two objects that share memory", errors.InvalidArgument, memory[:6], memory[4:]),
        ]:
            with self.subTest(said), self.assertRaisesRegex(kind, said):
                self.optimizer(Holds(*tensors))

    def test_sparse_gradients(self):
        model = nn.Embedding(5, 3, sparse=True)
        optimizer = self.optimizer(model)
        with self.assertRaisesRegex(errors.Unimplemented, "gradient of weight is sparse.*sparse=False"):
            model(torch.tensor([1, 2])).sum().backward()
        optimizer.zero_grad()

    def test_different_models_on_two_ranks(self):
        first = mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "2"})
        second = mock.patch.dict(os.environ, {"RANK": "1", "WORLD_SIZE": "2"})
        with first:
            self.optimizer(linear())
        with second, self.assertRaisesRegex(errors.AlreadyExists, r'"weight": shape: \[3,4\] there, \[3,5\] here'):
            self.optimizer(nn.Linear(5, 3))
        with second, self.assertRaisesRegex(errors.AlreadyExists, "another specification"):
            self.optimizer(nn.Sequential(linear(), linear()))


class LoadTest(BadInput):
    def test_states_of_another_model_are_listed_and_nothing_is_loaded(self):
        model = linear()
        optimizer = self.optimizer(model, "AdamW")
        backward(model)
        optimizer.step()
        digest, rate = str(optimizer.job.digest()), optimizer.param_groups[0]["lr"]
        other = nn.Linear(5, 2)
        of_other = torch.optim.AdamW(other.parameters(), lr=7.0)
        backward(other)
        of_other.step()
        with self.assertRaises(errors.InvalidArgument) as raised:
            optimizer.load_state_dict(of_other.state_dict())
        for said in ("weight: exp_avg has the shape [2, 5]; it must be [3, 4]", "bias: exp_avg_sq has the shape [2]"):
            self.assertIn(said, str(raised.exception))
        momentum = torch.optim.SGD(linear().parameters(), lr=7.0, momentum=0.9).state_dict()
        momentum["state"] = {index: {"momentum_buffer": torch.zeros(1)} for index in range(2)}
        with self.assertRaisesRegex(errors.InvalidArgument, "weight has no exp_avg"):
            optimizer.load_state_dict(momentum)
        self.assertEqual(str(optimizer.job.digest()), digest)
        self.assertEqual(optimizer.param_groups[0]["lr"], rate)
        self.assert_trains(model, optimizer)

    def test_weights_of_another_model_are_refused_whole(self):
        model = nn.Sequential(linear(), nn.Linear(3, 2))
        optimizer = self.optimizer(model)
        digest = str(optimizer.job.digest())
        states = {**model.state_dict(), "0.weight": torch.ones(3, 4), "1.weight": torch.zeros(9, 9), "stranger": torch.ones(1)}
        del states["1.bias"]
        with self.assertRaises(RuntimeError) as raised:
            model.load_state_dict(states)
        for said in ("1.bias", "stranger", "[9, 9]"):
            self.assertIn(said, str(raised.exception))
        self.assertEqual(str(optimizer.job.digest()), digest)
        self.assertTrue(torch.equal(model[0].weight, linear().weight))  # torch alone would have taken it
        self.assert_trains(model, optimizer)


class TimeTest(BadInput):
    def test_a_rank_that_never_comes(self):
        with self.rank(0, 2):
            model = linear()
            optimizer = self.optimizer(model, timeout=1)
        backward(model)
        start = time.monotonic()
        with self.assertRaisesRegex(errors.DeadlineExceeded, "missing slots: 1"):
            optimizer.step()
        self.assertLess(time.monotonic() - start, 20)

    def test_rank_0_never_comes(self):
        with self.rank(1, 2), self.assertRaises(errors.DeadlineExceeded):
            self.optimizer(linear(), timeout=1)

    def test_an_interrupted_step_is_done_once(self):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
        self.addCleanup(signal.signal, signal.SIGINT, before)
        with self.rank(0, 2):
            model = linear()
            optimizer = self.optimizer(model, timeout=60)
        backward(model)
        timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with self.assertRaises(KeyboardInterrupt):
            optimizer.step()
        timer.join()
        with self.rank(1, 2):
            second = linear()
            other = self.optimizer(second, timeout=60)
        backward(second)
        other.step()  # the first one's slot was handed over
        optimizer.step()  # again: the same step
        self.assertEqual((optimizer.last.step, other.last.step), (1, 1))
        self.assertTrue(optimizer.last.already_applied)
        self.assertTrue(torch.equal(model.weight, second.weight))


class ExceptionsTest(BadInput):
    def test_hooks_of_a_step(self):
        model = linear()
        optimizer = self.optimizer(model)
        for kind, steps in ("pre", 0), ("post", 2):
            def fail(*_):
                raise ArithmeticError(kind)

            with self.subTest(kind):
                hook = getattr(optimizer, f"register_step_{kind}_hook")(fail)
                backward(model)
                with self.assertRaisesRegex(ArithmeticError, kind):
                    optimizer.step()
                self.assertEqual(optimizer.committed_step, steps)
                hook.remove()
                self.assert_trains(model, optimizer)

    def test_a_closure_that_raises_changes_nothing(self):
        model = linear()
        optimizer = self.optimizer(model)
        with self.assertRaises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        self.assertEqual(optimizer.committed_step, 0)
        self.assert_trains(model, optimizer)

    def test_hooks_of_modules(self):
        for residency in "full", "bucket":
            for way in "register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook":
                def fail(*_):
                    raise ArithmeticError("hook")

                with self.subTest(residency, way=way):
                    model = Stack()
                    optimizer = self.optimizer(model, residency=residency, job=f"{self.id()}-{residency}-{way}")
                    hook = getattr(model.layers[2], way)(fail)
                    with self.assertRaisesRegex(ArithmeticError, "hook"):
                        backward(model)
                    hook.remove()
                    self.assert_trains(model, optimizer)

    def test_a_backward_that_raised_is_no_slot(self):
        digests = set()
        for residency in "full", "bucket":
            for fails in -1, 0, 1:
                with self.subTest(residency, fails=fails):
                    model = Stack()
                    optimizer = self.optimizer(model, slots=2, residency=residency, job=f"{self.id()}-{residency}-{fails}")
                    for slot in range(fails):
                        backward(model, slot)
                    if fails >= 0:
                        with self.assertRaisesRegex(ArithmeticError, "half-way"):
                            backward(model, fails, raises=True)
                        with self.assertRaisesRegex(errors.FailedPrecondition, "a backward .* raised.*zero_grad"):
                            optimizer.step()
                        optimizer.zero_grad()
                    for slot in range(2):
                        backward(model, slot)
                    optimizer.step()
                    digests.add(str(optimizer.job.digest()))
        self.assertEqual(len(digests), 1)

    def test_one_slot_and_a_backward_that_raised(self):
        model = Stack()
        optimizer = self.optimizer(model)
        for to_none in True, False:
            with self.assertRaisesRegex(ArithmeticError, "half-way"):
                backward(model, raises=True)
            with self.assertRaisesRegex(errors.FailedPrecondition, "raised"):
                optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            self.assert_trains(model, optimizer)

    def test_parts_of_a_block_without_the_block(self):
        model = Stack()
        optimizer = self.optimizer(nn.ModuleDict({"blocks": nn.ModuleList([model])}), residency="bucket")
        before = model.layers[0].weight.detach().clone()
        nn.functional.linear(torch.ones(1, 32), model.layers[0].weight).sum().backward()
        optimizer.step()
        self.assertTrue(torch.isfinite(before).all())
        self.assertFalse(torch.equal(model.layers[0].weight.detach(), before))

    def test_gradients_by_hand_where_they_would_be_lost(self):
        for options in {"slots": 2}, {"residency": "bucket"}:
            with self.subTest(options):
                model = Stack()
                optimizer = self.optimizer(model, job=f"by-hand-{len(options)}-{next(iter(options))}", **options)
                model.layers[1].weight.grad = torch.ones(32, 32)
                with self.assertRaisesRegex(errors.FailedPrecondition, "layers.1.weight was put into .grad by hand"):
                    optimizer.step()
                self.assertEqual(optimizer.committed_step, 0)

    def test_a_step_that_is_skipped_is_said_once(self):
        model = linear()
        optimizer = self.optimizer(model)
        with self.assertLogs("shardmesh.torch", "WARNING") as logs:
            for _ in range(2):
                (model(torch.ones(1, 4)).sum() * float("nan")).backward()
                optimizer.step()
                optimizer.zero_grad()
        self.assertEqual([line for line in logs.output if "step 1 changed nothing: slot 0: gradient of" in line], logs.output)


@unittest.skipUnless(BIN, "SHARDMESH_BIN_DIR is not set to bazel's folder of programs: ./test --lane parity sets it")
class ProcessTest(Leftovers):
    def run_program(self, program):
        done = subprocess.run([sys.executable, "-c", program], env=self.environment, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_of_a_program_that_ends_without_close_nothing_is_left(self):
        self.run_program(PROGRAM)
        self.assert_nothing_left()

    def test_a_forked_child_is_told_and_the_parent_goes_on(self):
        self.run_program(FORKS)
        self.assert_nothing_left()

    def pid_of(self, name):
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/environ", "rb") as environ, open(f"/proc/{pid}/cmdline", "rb") as command:
                    words = command.read().split(b"\0")
                    if self.mark.encode() in environ.read() and words[0].endswith(name.encode()):
                        return int(pid)
            except OSError:
                continue
        self.fail(f"no {name} runs")

    def goes_on(self, killed=None, residency="full"):
        program = GOES_ON.replace("model = torch.nn.Linear(4, 3)", STACK).replace("timeout=20", f"timeout=20, residency='{residency}'")
        with subprocess.Popen([sys.executable, "-c", program], env=self.environment, text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
            self.assertEqual(program.stdout.readline(), "ready\n")
            if killed is not None:
                os.kill(self.pid_of(killed), signal.SIGKILL)
            said, error = program.communicate("\n", timeout=120)
        self.assert_nothing_left()
        return said, error

    def test_a_worker_that_is_killed_changes_nothing(self):
        for residency in "full", "bucket":
            with self.subTest(residency):
                undisturbed, _ = self.goes_on(residency=residency)
                self.assertIn("step 8 digest", undisturbed)
                self.assertEqual(self.goes_on("shardmesh-worker", residency=residency)[0], undisturbed)

    def test_of_weights_that_are_lost_with_a_worker_the_model_says_so(self):
        program = PROGRAM.replace("model = torch.nn.Linear(4, 3)", STACK).replace("timeout=20", "timeout=20, residency='bucket'")
        with subprocess.Popen([sys.executable, "-c", program + LOSES], env=self.environment, text=True, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) as trainer:
            self.assertEqual(trainer.stdout.readline(), "ready\n")
            worker = self.pid_of("shardmesh-worker")
            os.kill(self.pid_of("shardmesh-node"), signal.SIGKILL)  # which would start the worker again
            os.kill(worker, signal.SIGKILL)
            said, error = trainer.communicate("\n", timeout=120)
        self.assertEqual(said, "Unavailable True\n", error)
        self.assertIn("could not be fetched, and are NaN now", error)
        self.assert_nothing_left()

    def test_a_coordinator_that_is_killed_is_a_typed_error_at_most(self):
        said, error = self.goes_on("shardmesh-coordinator")
        self.assertTrue("step 8 digest" in said or "shardmesh.errors." in error, said + error)


del BadInput  # has no tests

if __name__ == "__main__":
    unittest.main()
