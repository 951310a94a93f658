#!/usr/bin/env python3
"""What is read of a job after its model was loaded, edited or changed by hand, and before the next step: checkpoints,
digests and versions have the model's weights, or an error says what to do."""
import glob
import os
import sys
import unittest

import safetensors.torch
import torch
from shardmesh import errors
from shardmesh.torch import Optimizer, load_state_dict
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import ranks  # noqa: E402
from service import ServiceTest  # noqa: E402


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def train(model, optimizer, slots=1):
    for _ in optimizer.slots([0] * slots) if optimizer._started.plan.pulled else range(slots):
        model(torch.ones(3, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def halved(module):
    return {name: value * 0.5 for name, value in module.state_dict().items()}


def edit(model, optimizer):
    with optimizer.editing():
        model.layers[0].weight.mul_(0.5)


def saved(folder):
    (path,) = glob.glob(folder + "/*/model.safetensors")
    return safetensors.torch.load_file(path)


KNOWN = {
    "edited": edit, "loaded": lambda model, _: model.load_state_dict(halved(model)),
    "by names": lambda model, _: load_state_dict(model, halved(model)),
    "a module": lambda model, _: model.layers[1].load_state_dict(halved(model.layers[1])),
}
CHANGED = {"edited": "layers.0.weight", "a module": "layers.1."}  # of others everything is
BY_HAND = {
    r"^layers.* changed by hand": lambda model, _: model.layers[0].weight.data.fill_(0.01),
    r"^layers.* changed by hand ": lambda model, _: nn.init.zeros_(model.layers[1].bias),
    r"^layers\.1\.weight, layers\.1\.bias: the model has other": lambda model, _: setattr(model.layers, "1", nn.Linear(8, 8)),
    r"^layers\.0\.bias lie elsewhere": lambda model, _: setattr(model.layers[0].bias, "data", torch.zeros(8)),
}
KINDS = {
    "full": {}, "bucket": {"residency": "bucket"}, "slots": {"slots": 2}, "pulled": {"slots": 2, "pulled": True},
    "quantized": {"gather": "int8_row", "deliver": "quantized"}, "two parts": {"weights": "bf16+16"},
}


def on_ranks(address, folder, residency):
    """Rank 0 saves alone after a module was loaded on both; then both upload, as the error says."""
    def run(rank, world):
        model, said = Net(), []
        with Optimizer(model, "SGD", lr=0.1, service=address, job=f"ranks-{residency}", residency=residency, timeout=20) as optimizer:
            train(model, optimizer)
            KNOWN["a module"](model, optimizer)
            for call in (lambda: optimizer.save(folder), lambda: optimizer.job.digest()) if rank == 0 else ():
                try:
                    call()
                except errors.FailedPrecondition as error:
                    said.append(str(error))
            optimizer.state_dict()  # has no weights
            optimizer.upload()
            if rank == 0:
                optimizer.save(folder)
                there = saved(folder)
                said.append(all(torch.equal(there[name], value) for name, value in model.state_dict().items()))
            train(model, optimizer)
            return [*said, optimizer.committed_step]
    return ranks.fork(2, run, seconds=60)


class SaveTest(ServiceTest):
    def optimizer(self, model, kind, what=""):
        optimizer = Optimizer(model, "SGD", lr=0.1, timeout=20, service=self.address,
                              job=f"{self.id()}-{kind}-{what}".replace(" ", "-"), **KINDS[kind])
        self.addCleanup(optimizer.close)
        train(model, optimizer, KINDS[kind].get("slots", 1))
        return optimizer

    def test_a_checkpoint_has_what_was_loaded_or_edited(self):
        for kind in KINDS:
            for number, (what, change) in enumerate(KNOWN.items()):
                with self.subTest(kind=kind, what=what):
                    model, folder = Net(), self.path(f"{kind}-{number}")
                    optimizer = self.optimizer(model, kind, number)
                    wanted = {name: value.clone() for name, value in model.state_dict().items()}
                    for name in (name for name in wanted if name.startswith(CHANGED.get(what, ""))):
                        wanted[name] *= 0.5
                    change(model, optimizer)
                    optimizer.save(folder)
                    there = saved(folder)
                    for name, value in wanted.items():
                        exact = {"rtol": 0, "atol": 0 if KINDS[kind].keys() <= {"residency", "slots", "pulled"} else 1e-2}
                        torch.testing.assert_close(model.state_dict()[name], value, **exact)
                        if kind != "quantized":
                            torch.testing.assert_close(there[name].float(), value, **exact)
                    train(model, optimizer, KINDS[kind].get("slots", 1))
                    self.assertEqual(optimizer.committed_step, 2)
                    optimizer.close()

    def test_changes_by_hand_are_named(self):
        for kind in "full", "bucket", "pulled":
            for number, (said, change) in enumerate(BY_HAND.items()):
                with self.subTest(kind=kind, said=said):
                    model, folder = Net(), self.path(f"hand-{kind}-{number}")
                    optimizer = self.optimizer(model, kind, number)
                    job = optimizer.job
                    change(model, optimizer)
                    for call in lambda: optimizer.save(folder), optimizer.state_dict, job.digest, optimizer.upload:
                        with self.assertRaisesRegex(errors.FailedPrecondition, said):
                            call()
                    self.assertEqual(glob.glob(folder + "/*"), [])
                    optimizer.close()
                    job.digest()  # as the job is

    def test_digests_and_versions_are_of_the_model(self):
        model, other = Net(), Net()
        optimizer, theirs = self.optimizer(model, "full"), self.optimizer(other, "full", "theirs")
        job = optimizer.job
        edit(model, optimizer)
        edit(other, theirs)
        theirs.upload()
        self.assertEqual(job.digest(), theirs.job.digest())
        edit(model, optimizer)
        job.publish()
        self.assertEqual(job.pull()["layers.0.weight"].tolist(), model.layers[0].weight.tolist())

    def test_within_editing_and_within_a_loop_of_slots_an_error_says_when(self):
        model = Net()
        optimizer = self.optimizer(model, "full")
        with optimizer.editing():
            model.layers[0].weight.mul_(0.5)
            with self.assertRaisesRegex(errors.FailedPrecondition, r"^layers\.0\.weight changed within this block .*after it"):
                optimizer.save(self.path("within"))
        optimizer.save(self.path("within"))
        model = Net()
        optimizer = self.optimizer(model, "pulled", "loop")
        optimizer.job.digest()
        for _ in optimizer.slots([0, 0]):
            KNOWN["a module"](model, optimizer)
            with self.assertRaisesRegex(errors.FailedPrecondition, r"^layers\.1.*within a loop over optimizer.slots.*revert"):
                optimizer.save(self.path("loop"))
            optimizer.revert()
            optimizer.save(self.path("loop"))
            model(torch.ones(3, 8)).square().mean().backward()
        optimizer.step()

    def test_one_of_two_ranks_is_told_to_upload_on_both(self):
        for residency in "full", "bucket":
            with self.subTest(residency):
                first, second = ranks.program(self, __file__, self.address, self.path(f"ranks-{residency}"), residency, seconds=90)
                for said, call in zip(first[:-2], ("save", "job.digest")):
                    self.assertRegex(said, rf"^layers\.1\.weight.*call optimizer\.upload\(\) on every rank, then {call}\(\)")
                self.assertEqual(len(first), 4 if residency == "full" else 2)  # with buckets a load counts at once
                self.assertEqual((first[-2:], second), ([True, 2], [2]))


if __name__ == "__main__":
    if len(sys.argv) == 4 and ":" in sys.argv[1]:
        ranks.report(on_ranks(*sys.argv[1:]))
    else:
        unittest.main()
