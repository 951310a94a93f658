#!/usr/bin/env python3
"""Errors while a model trains, that say what to do: tables of what is followed by advice.py."""
import copy
import math
import os
import pickle
import sys
import unittest

import torch
from shardmesh import errors
from shardmesh.torch import Optimizer, follow
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from advice import Advice, AdviceTest, Blocks, Boom, Net, Run, joined, loss, then  # noqa: E402

STEP, REVERT, AGAIN, ZERO = Run.step, lambda r: r.optimizer.revert(), Run.again, lambda r: r.optimizer.zero_grad()
BACK = Run.backward_and_step


def with_gradients(call):
    """Backward, the call, step."""
    return then(Run.backward, call, STEP)


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
    Advice("load_state_dict() of the model", then(Run.replace, BACK), then(Run.put_back, lambda r: r.model.load_state_dict(Net().state_dict()))),
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
    Advice("take state_dict()", lambda r: pickle.dumps(r.optimizer), lambda r: pickle.dumps(r.optimizer.state_dict()), errors.Unimplemented),
    Advice("make another", then(lambda r: r.optimizer.close(), BACK), AGAIN),
    Advice("zero_grad()", lambda r: (r.test.assertRaises(KeyError, r.backward, between=Boom.apply), STEP(r)), ZERO),
    Advice("a job can change lr alone", with_gradients(lambda r: r.optimizer.param_groups[0].update(momentum=0.5)),
           lambda r: r.optimizer.param_groups[0].update(momentum=0.0, lr=0.05), errors.Unimplemented),
    Advice("close() it and make another", lambda r: r.optimizer.add_param_group({"params": list(Net().parameters())}),
           lambda r: r.again([{"params": r.model.embed.named_parameters("embed")}, {"params": r.model.layers.named_parameters("layers"), "lr": 0.2}]),
           errors.Unimplemented),
    Advice("pulled=True", lambda r: r.optimizer.slots([0]), lambda r: r.again(pulled=True, slots=1)),
    Advice("give it finite weights", then(lambda r: r.edit(math.nan), Run.slots), then(REVERT, ZERO, Run.edit), errors.InvalidArgument),
)
SLOTS = (
    Advice("call step()", then(*[Run.backward] * 3), STEP),
    Advice("no_sync()", then(*[Run.backward] * 3), lambda r: (ZERO(r), joined(r), joined(r), STEP(r))),
    Advice("each needs one", then(Run.backward, STEP), then(Run.backward, STEP)),
    Advice("slots= of the optimizer", then(Run.backward, STEP), lambda r: r.again(slots=1)),
    Advice("slots=None", then(lambda r: r.again(slots=2), lambda r: setattr(r.model.embed.weight, "grad", torch.ones(5, 8)), STEP),
           lambda r: r.again(slots=None)),
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
    Advice("residency=\"full\"", Run.graph, then(ZERO, lambda r: r.again(residency="full")), errors.Unimplemented),
)


class TrainingTest(AdviceTest):
    def test_full_residency(self):
        self.follow_all(FULL)

    def test_several_slots(self):
        self.follow_all(SLOTS, slots=2)

    def test_pulled_slots(self):
        self.follow_all(PULLED, pulled=True, slots=1)

    def test_bucket_residency(self):
        self.follow_all(BUCKET, model=Blocks(), residency="bucket")


if __name__ == "__main__":
    unittest.main()
