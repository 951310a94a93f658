#!/usr/bin/env python3
"""Errors while a model trains, that say what to do: tables of what is followed by advice.py."""
import copy
import math
import os
import pickle
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
from shardmesh import errors
from shardmesh.torch import Optimizer, follow
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from advice import Advice, AdviceTest, Blocks, Boom, Net, Run, joined, loss, then  # noqa: E402

STEP, REVERT, AGAIN, ZERO = Run.step, lambda r: r.optimizer.revert(), Run.again, lambda r: r.optimizer.zero_grad()
BACK = Run.backward_and_step


def with_gradients(call):
    """Backward, the call, step."""
    return then(Run.backward, call, STEP)


def regrouped(r):
    r.optimizer.param_groups[0]["params"].reverse()


def second_run(r):
    """Of a job that has weights."""
    r.again(job=r.test.id(), join=None)
    BACK(r)
    r.again(join=False)


def one_cycle(r, **options):
    torch.optim.lr_scheduler.OneCycleLR(r.optimizer, 0.1, total_steps=10, **options)


def load(r, change):
    """The optimizer's own states, changed."""
    saved = r.optimizer.state_dict()
    for states in saved["state"].values():
        states["momentum_buffer"] = change(states["momentum_buffer"])
    r.optimizer.load_state_dict(saved)


def scaled(r, unscale=False):
    """A step by a scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for _ in range(r.options.get("slots") or 1):
        scaler.scale(loss(r.model)).backward()
    if unscale:
        scaler.unscale_(r.optimizer)
    scaler.step(r.optimizer)
    scaler.update()
    ZERO(r)


def scaled_slots(r):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for _ in r.optimizer.slots([0, 0]):
        scaler.scale(loss(r.model)).backward()
    scaler.step(r.optimizer)


def of_another_thread(r):
    """The scaler calls a step() that has another thread do it."""
    def step():
        with ThreadPoolExecutor(1) as threads:
            threads.submit(Optimizer.step, r.optimizer).result()

    with mock.patch.object(r.optimizer, "step", step):
        scaled(r)


def followed(r, model=None):
    """What follows the job; of no model, and closed."""
    found = follow(model or Net(), service=r.optimizer.service, job=r.optimizer._started.name, copy=True)
    found.close()
    return found


def clip(r):
    torch.nn.utils.clip_grad_norm_(r.model.parameters(), 1.0)


def ones(r):
    r.model.embed.weight.grad = torch.ones(5, 8)


def gradients_of(r, **options):
    return torch.autograd.grad(loss(r.model), list(r.model.parameters()), **options)


def outside(r):
    """A weight is used without a call of what it is in, and nobody sees it, as by an extension in C++."""
    def product(x):
        with torch._C.DisableTorchFunction():
            return x @ r.model.layers[1].inner.weight

    BACK(r)  # state_dict() has held all weights since the last one
    r.backward(between=product)


def alone(r):
    """The same, and nothing is called."""
    BACK(r)
    with torch._C.DisableTorchFunction():
        r.model.layers[1].inner.weight.sum().backward()


def func(r):
    torch.func.grad(lambda x: r.model.layers[1](x).sum())(torch.ones(1, 8))


def tidy(r):
    """Of gradients, which bucket residency may have handed over."""
    try:
        ZERO(r)
    except errors.FailedPrecondition:
        STEP(r)


def compiled(r):
    torch.compile(lambda: loss(r.model), backend="eager")().backward()
    STEP(r)


def trace(r):
    torch.jit.trace(r.model.layers[1], torch.ones(1, 8))


def script(r):
    torch.jit.script(r.model.layers[1])


def export(r):
    torch.export.export(r.model.layers[1], (torch.ones(1, 8),))


def program_of(block):
    torch.jit.trace(block, torch.ones(1, 8))
    torch.jit.script(block)


def other(r):
    """Another model of the same weights, its second block."""
    model = Blocks()
    model.load_state_dict(r.model.state_dict())
    return model.layers[1]


FULL = (
    Advice("optimizer.revert()", with_gradients(lambda r: r.model.share_memory()), REVERT),
    Advice("optimizer.revert()", with_gradients(lambda r: setattr(r.model.layers[0].bias, "data", torch.zeros(8))), REVERT),
    Advice("close() this optimizer", then(lambda r: r.model.bfloat16(), BACK), then(lambda r: r.model.float(), AGAIN)),
    Advice("optimizer.revert()", lambda r: (setattr(r.model.layers[1].weight, "data", torch.zeros(3, 8)),
                                            setattr(r.model.layers[1].bias, "data", torch.zeros(3)), BACK(r)), REVERT),
    Advice("requires_grad_(True)", then(lambda r: r.model.embed.requires_grad_(False), BACK), lambda r: r.model.embed.requires_grad_(True)),
    Advice("close() this optimizer", then(lambda r: r.model.embed.requires_grad_(False), BACK),
           then(lambda r: r.model.embed.requires_grad_(True), AGAIN)),
    Advice("optimizer.editing()", then(Run.write, BACK), Run.edit),
    Advice("load_state_dict()", then(Run.write, BACK), lambda r: r.model.layers[0].load_state_dict(r.model.layers[1].state_dict())),
    Advice("optimizer.revert()", then(Run.write, BACK), REVERT),
    Advice("Put the old ones back", then(Run.replace, BACK), Run.put_back),
    Advice("make another", then(Run.replace, BACK), AGAIN),
    Advice("editing()", then(Run.replace, BACK), then(Run.put_back, Run.edit)),
    Advice("load_state_dict() of the model", then(Run.replace, BACK), then(Run.put_back,
           lambda r: r.model.load_state_dict(Net().state_dict()))),
    Advice("requires_grad_(False)", then(Run.add, BACK), lambda r: r.model.more.requires_grad_(False)),
    Advice("make another", then(lambda r: delattr(r.model, "more"), BACK, Run.add, BACK), AGAIN),
    Advice("autograd.grad(", lambda r: loss(r.model).backward(create_graph=True), then(ZERO, Run.graph), errors.Unimplemented),
    Advice("sparse=False", then(lambda r: setattr(r.model.embed, "sparse", True), BACK),
           then(lambda r: setattr(r.model.embed, "sparse", False), ZERO), errors.Unimplemented),
    Advice("close() that one first", lambda r: Optimizer(r.model), AGAIN),
    Advice("a model of its own", lambda r: follow(r.model, service=r.optimizer.service, job=r.optimizer._started.name),
           lambda r: follow(Net(), service=r.optimizer.service, job=r.optimizer._started.name, copy=True).close()
           if not hasattr(r.model, "more") else None),
    Advice("close() the optimizer first", lambda r: follow(r.model, service=r.optimizer.service, job=r.optimizer._started.name), AGAIN),
    Advice("save its state_dict()", lambda r: pickle.dumps(r.model), lambda r: pickle.dumps(r.model.state_dict()), errors.Unimplemented),
    Advice("close()", lambda r: pickle.dumps(r.model), then(lambda r: r.optimizer.close(), lambda r: pickle.dumps(r.model), AGAIN),
           errors.Unimplemented),
    Advice("take state_dict()", lambda r: pickle.dumps(r.optimizer),
           lambda r: pickle.dumps(r.optimizer.state_dict()), errors.Unimplemented),
    Advice("make another", then(lambda r: r.optimizer.close(), BACK), AGAIN),
    Advice("zero_grad()", lambda r: (r.test.assertRaises(KeyError, r.backward, between=Boom.apply), STEP(r)), ZERO),
    Advice("a job can change lr alone", with_gradients(lambda r: r.optimizer.param_groups[0].update(momentum=0.5)),
           lambda r: r.optimizer.param_groups[0].update(momentum=0.0, lr=0.05), errors.Unimplemented),
    Advice("close() it and make another", lambda r: r.optimizer.add_param_group({"params": list(Net().parameters())}),
           lambda r: r.again([{"params": r.model.embed.named_parameters("embed")},
                                {"params": r.model.layers.named_parameters("layers"), "lr": 0.2}]),
           errors.Unimplemented),
    Advice("pulled=True", lambda r: r.optimizer.slots([0]), lambda r: r.again(pulled=True, slots=1)),
    Advice("load or write finite weights", then(lambda r: r.edit(math.nan), Run.slots), then(REVERT, ZERO, Run.edit), errors.InvalidArgument),
)
JOB = (
    Advice("put them back", with_gradients(lambda r: regrouped(r)), lambda r: regrouped(r)),
    Advice("make another", with_gradients(lambda r: regrouped(r)), AGAIN),
    Advice("put those back", with_gradients(lambda r: r.optimizer.param_groups.append({"params": [], "lr": 0.1})),
           lambda r: r.optimizer.param_groups.pop()),
    Advice("call scaler.step(optimizer) itself", lambda r: of_another_thread(r), lambda r: scaled(r), errors.FailedPrecondition),
    Advice("it must be a tensor", lambda r: (r.again(momentum=0.5), BACK(r), load(r, lambda state: "codes")),
           lambda r: load(r, lambda state: state.clone()), errors.InvalidArgument),
    Advice("a job of its own with job=", lambda r: Optimizer(Net(), service=r.optimizer.service, job=r.optimizer._started.name),
           lambda r: Optimizer(Net(), service=r.optimizer.service, job=r.optimizer._started.name + "-own").close()),
    Advice("close() the other one first", lambda r: Optimizer(Net(), service=r.optimizer.service, job=r.optimizer._started.name),
           lambda r: r.again(momentum=0.0)),
    Advice("cycle_momentum=False", lambda r: (r.again(momentum=0.5), one_cycle(r), BACK(r)),
           lambda r: (AGAIN(r), one_cycle(r, cycle_momentum=False)),
           errors.Unimplemented),
    Advice("follow() the job again", lambda r: followed(r).update(), lambda r: r.test.assertGreaterEqual(followed(r, Net()).step, 0)),
    Advice("say join=True", second_run, lambda r: r.again(join=True), errors.AlreadyExists),
    Advice("give this run another job=", second_run, lambda r: r.again(job=r.test.id() + "-other"), errors.AlreadyExists),
)
SLOTS = (
    Advice("call optimizer.zero_grad()", then(Run.backward, lambda r: r.model.zero_grad(), Run.backward), ZERO),
    Advice("again after zero_grad()", lambda r: (r.test.assertRaises(KeyError, r.backward, between=Boom.apply), STEP(r)), ZERO),
    Advice("clip_norm= to clip them", with_gradients(lambda r: clip(r)), lambda r: r.again(clip_norm=1.0)),
    Advice("leave GradScaler.unscale_() to the job", lambda r: scaled(r, unscale=True), lambda r: (r.again(), scaled(r))),
    Advice("call step()", then(*[Run.backward] * 3), STEP),
    Advice("no_sync()", then(*[Run.backward] * 3), lambda r: (ZERO(r), joined(r), joined(r), STEP(r))),
    Advice("each needs one", then(Run.backward, STEP), then(Run.backward, STEP)),
    Advice("slots= of the optimizer", then(Run.backward, STEP), lambda r: r.again(slots=1)),
    Advice("slots=None", then(lambda r: r.again(slots=2), lambda r: setattr(r.model.embed.weight, "grad", torch.ones(5, 8)), STEP),
           lambda r: r.again(slots=None)),
    Advice("one slot for each rank (slots=None", lambda r: (r.again(slots=2), r.backward(), clip(r)),
           lambda r: (r.again(slots=None), r.backward(), clip(r))),
)
PULLED = (
    Advice("backwards of it belong together", lambda r: joined(r), lambda r: r.slots([0])),
    Advice("loader = iter(loader)", lambda r: r.slots(torch.utils.data.DataLoader([0])),
           lambda r: r.slots([next(iter(torch.utils.data.DataLoader([0])))]), errors.InvalidArgument),
    Advice("one for each slot", lambda r: r.slots([0, 1]), lambda r: r.slots([0]), errors.InvalidArgument),
    Advice("loop over optimizer.slots(batches) again", lambda r: r.slots([0], leave=True), lambda r: r.slots([0])),
    Advice("for batch in optimizer.slots(batches)", then(AGAIN, Run.backward), lambda r: r.slots([0])),
    Advice("each needs one", lambda r: r.slots([0], within=False), lambda r: r.slots([0])),
    Advice("optimizer.editing()", then(Run.write, lambda r: r.slots([0])), Run.edit),
)
SEVERAL_PULLED = (
    Advice("call optimizer.zero_grad()", lambda r: [(r.backward(), r.model.zero_grad()) for _ in r.optimizer.slots([0, 0])],
           then(ZERO, lambda r: r.slots([0, 0]))),
    Advice("without a scaler", lambda r: scaled_slots(r), lambda r: r.slots([0, 0]), errors.Unimplemented),
    Advice("make the optimizer with pulled=False", lambda r: scaled_slots(r),
           lambda r: (r.again(pulled=False), scaled(r)), errors.Unimplemented),
    Advice("(slots=None, pulled=False)", lambda r: (r.again(pulled=True), [(r.backward(), clip(r)) for _ in r.optimizer.slots([0, 0])]),
           lambda r: (r.again(pulled=False, slots=None), r.backward(), clip(r))),
)
BUCKET = (
    Advice("call step()", then(Run.backward, ZERO), then(STEP, ZERO)),
    Advice("slots=", then(Run.backward, Run.backward), then(STEP, lambda r: r.again(slots=2), Run.backward, BACK)),
    Advice("within no_sync()", then(lambda r: r.again(slots=1), Run.backward, Run.backward), then(STEP, lambda r: joined(r), STEP)),
    Advice("make another model and load", lambda r: copy.deepcopy(r.model), lambda r: Blocks().load_state_dict(r.model.state_dict()),
           errors.Unimplemented),
    Advice("close() the optimizer first", lambda r: copy.deepcopy(r.model),
           then(lambda r: r.optimizer.close(), lambda r: copy.deepcopy(r.model), AGAIN), errors.Unimplemented),
    Advice("optimizer.revert()", then(lambda r: r.model.share_memory(), BACK), REVERT),
    Advice("optimizer.editing()", then(Run.write, BACK), Run.edit),
    Advice("make another", then(Run.replace, BACK), AGAIN),
    Advice("call step() again", then(Run.backward, lambda r: r.model.zero_grad(), STEP), STEP),
    Advice("call step(), then zero_grad()", then(Run.backward, ones, ZERO), STEP),
    Advice("clip_norm= to clip them", with_gradients(lambda r: clip(r)), lambda r: (STEP(r), r.again(clip_norm=1.0))),
    Advice("leave GradScaler.unscale_() to the job", lambda r: scaled(r, unscale=True), lambda r: (r.again(clip_norm=0.0), scaled(r))),
    Advice("Call the module", outside, lambda r: (r.backward(between=r.model.layers[1].inner), STEP(r))),
    Advice("call the module", alone, lambda r: (r.model.layers[1].inner(torch.ones(1, 8)).sum().backward(), STEP(r))),
    Advice("compile functions that call the model after", alone, lambda r: compiled(r)),
    Advice("take torch.autograd.grad", func,
           lambda r: torch.autograd.grad(r.model.layers[1](x := torch.ones(1, 8, requires_grad=True)).sum(), x), errors.Unimplemented),
    Advice("Load state_dict() into another model", trace, lambda r: program_of(other(r)), errors.Unimplemented),
    Advice("close() the optimizer first", script,
           lambda r: (r.optimizer.close(), program_of(r.model.layers[1]), AGAIN(r)), errors.Unimplemented),
    *(Advice("residency=\"full\"", then(call, *end),
    lambda r, call=call, end=end: (then(call, *end)(r.full), r.full.train(), tidy(r)), error) for call, end, error in (
        (Run.graph, (), errors.Unimplemented),
        (then(ZERO, lambda r: gradients_of(r, create_graph=True)), (), errors.Unimplemented),
        (func, (), errors.Unimplemented),
        (trace, (), errors.Unimplemented),
        (script, (), errors.Unimplemented),
        (export, (), errors.Unimplemented),
        (outside, (ZERO,), errors.FailedPrecondition),
        (then(Run.backward, lambda r: clip(r)), (STEP,), errors.FailedPrecondition),
        (then(STEP, Run.backward, ones), (STEP,), errors.FailedPrecondition),
        (Run.backward, (ZERO,), errors.FailedPrecondition)))
)


class TrainingTest(AdviceTest):
    def test_full_residency(self):
        self.follow_all(FULL)

    def test_one_job(self):
        self.follow_all(JOB)

    def test_several_slots(self):
        self.follow_all(SLOTS, slots=2)

    def test_pulled_slots(self):
        self.follow_all(PULLED, pulled=True, slots=1)

    def test_several_pulled_slots(self):
        self.follow_all(SEVERAL_PULLED, pulled=True, slots=2)

    def test_bucket_residency(self):
        full = Run(self, Blocks(), {"residency": "full"})
        self.follow_all(BUCKET, model=Blocks(), full=full, residency="bucket")


if __name__ == "__main__":
    unittest.main()
