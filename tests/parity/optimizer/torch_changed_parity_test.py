#!/usr/bin/env python3
"""What is done to a model behind its optimizer's back: writes that no version counter sees, parameters that are replaced,
added, moved, frozen or not given. Each is right, or a typed error that names the parameters."""
import os
import sys
import unittest
from unittest import mock

import torch
from shardmesh import _client, errors
from shardmesh.torch import Optimizer
from shardmesh.torch._weights import _placed, _writes
from torch import nn

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from service import ServiceTest


class Net(nn.Module):
    def __init__(self, tied=False, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        if tied:
            self.layers[2].weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x + self.more(x) if hasattr(self, "more") else x


def backward(model, seed=0):
    x = torch.randn(3, model.layers[0].in_features, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()


class Changed(ServiceTest):
    def optimizer(self, model, *, what="", **options):
        options = {"lr": 0.1, "timeout": 10, "service": self.address, "job": f"{self.id()}-{what}", **options}
        params = options.pop("params", model)
        optimizer = Optimizer(params, "SGD", model=None if params is model else model, **options)
        self.addCleanup(optimizer.close)
        return optimizer

    def train(self, model, optimizer, seed=0):
        step = optimizer.committed_step
        optimizer.zero_grad()
        for _ in optimizer.slots([0]) if optimizer._started.plan.pulled else [0]:
            backward(model, seed)
        optimizer.step()
        self.assertEqual(optimizer.committed_step, step + 1)
        optimizer.zero_grad()

    def values(self, model):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    def assert_same(self, one, other):
        for name, value in one.items():
            self.assertTrue(torch.equal(value, other[name]), name)


KINDS = {
    "on a device": {"weights": "bf16"},
    "views": {}, "bf16": {"weights": "bf16"}, "decoded": {"gather": "int8_row"}, "bucket": {"residency": "bucket"},
    "bucket decoded": {"residency": "bucket", "gather": "int8_row"}, "pulled": {"pulled": True, "slots": 1}, "connected": {},
}


class WritesTest(Changed):
    def of_kind(self, kind):
        model = Net()
        if kind == "views":
            model.layers[0].weight.data = model.layers[0].weight.data.t().contiguous().t()  # a copy among the views
        mapped = () if kind == "on a device" else _placed._MAPPED
        with mock.patch.object(_client.Job, "on_this_host", kind != "connected"), mock.patch.object(_placed, "_MAPPED", mapped):
            optimizer = self.optimizer(model, what=kind.replace(" ", "-"), **KINDS[kind])
        self.train(model, optimizer)
        return model, optimizer

    def test_writes_that_no_version_counter_sees_are_told_and_can_be_taken_back(self):
        for kind in KINDS:
            with self.subTest(kind):
                model, optimizer = self.of_kind(kind)
                before = self.values(model)
                for index, write in enumerate((lambda p: p.data.clamp_(-0.01, 0.01), lambda p: p.detach().numpy().fill(1))):
                    parameter = model.layers[index].weight
                    write(parameter)
                    there = "layers.*" if kind.startswith("bucket") else rf"layers\.{index}\.weight was"
                    with self.assertRaisesRegex(errors.FailedPrecondition, f"^{there}.* changed by hand since .*editing"):
                        self.train(model, optimizer)
                    optimizer.revert()
                    optimizer.zero_grad()
                self.assert_same(before, self.values(model))
                self.train(model, optimizer, 1)
                optimizer.close()

    def test_writes_through_data_within_editing_are_the_jobs(self):
        for kind in "on a device", "views", "decoded", "bucket", "connected", "delivered", "bucket delivered":
            with self.subTest(kind):
                if "delivered" in kind:
                    residency = "bucket" if "bucket" in kind else "full"
                    model = Net()
                    optimizer = self.optimizer(
                        model, what=kind.replace(" ", "-"), gather="int8_row", deliver="quantized", residency=residency
                    )
                    self.train(model, optimizer)
                else:
                    model, optimizer = self.of_kind(kind)
                with optimizer.editing():
                    model.layers[1].weight.data.fill_(0.5)
                    model.layers[2].bias.data.clamp_(-0.01, 0.01)
                self.train(model, optimizer)
                now = self.values(model)
                self.assertLess((now["layers.1.weight"] - 0.5).abs().max().item(), 0.1)
                self.assertLess(now["layers.2.bias"].abs().max().item(), 0.05)
                self.assertEqual(optimizer.committed_step, 2)
                optimizer.close()

    def test_what_is_written_back_or_read_is_no_change(self):
        for kind in "views", "decoded", "connected":
            with self.subTest(kind):
                model, optimizer = self.of_kind(kind)
                reference, theirs = self.of_kind("pulled") if kind == "connected" else (None, None)
                for parameter in model.parameters():
                    parameter.data.copy_(parameter.detach().clone())
                for one, other in (model, optimizer), (reference, theirs):
                    if other is not None:
                        self.train(one, other, 1)
                if reference is not None:  # pages that were written to show the new weights
                    self.assert_same(self.values(model), self.values(reference))


    def test_without_a_page_map_the_log_says_so_once_and_the_jobs_weights_count(self):
        model, reference = Net(), Net()
        optimizer, theirs = self.optimizer(model), self.optimizer(reference, what="reference")
        with mock.patch.object(_writes, "_PAGE_MAP", "/none"), self.assertLogs("shardmesh.torch", "WARNING") as logs:
            for step in range(2):
                model.layers[1].bias.data.add_(1) if step else None
                self.train(model, optimizer, step)
        self.assertEqual(len([line for line in logs.output if "no page map" in line]), 1)
        for step in range(2):
            self.train(reference, theirs, step)
        difference = self.values(model)["layers.1.bias"] - self.values(reference)["layers.1.bias"]
        self.assertLess(difference.abs().max().item(), 0.1)  # of gradients at other weights; what was written is gone


class LocationsTest(Changed):
    def assert_told(self, change, said, **options):
        model = Net(tied=True, width=4)
        optimizer = self.optimizer(model, what=len(said), **options)
        change(model)
        with self.assertRaisesRegex(errors.FailedPrecondition, said):
            self.train(model, optimizer)
        self.assertEqual(optimizer.committed_step, 0)
        optimizer.close()
        self.train(model, self.optimizer(model, what="again", job=f"again-{len(said)}", **options))  # as the message says
        return model

    def test_one_name_of_a_tie_that_is_given_another_parameter(self):
        def untie(model):
            model.layers[2].weight = nn.Parameter(torch.ones(4, 4))

        self.assert_told(untie, r"^layers\.2\.weight: the model has other Parameter objects")
        self.assert_told(untie, r"^layers\.2\.weight: the model has other Paramete", residency="bucket")
        self.assert_told(untie, r"^layers\.2\.weight: the model has other Paramet", pulled=True, slots=1)

    def test_a_module_that_takes_the_place_of_another(self):
        def replace(model):
            model.layers[2] = nn.Linear(4, 4)

        self.assert_told(replace, r"^layers\.2\.weight, layers\.2\.bias: the model has other")

    def test_a_parameter_of_the_model_in_the_place_of_another(self):
        def tie(model):
            model.layers[1].bias = model.layers[0].bias

        self.assert_told(tie, r"^layers\.1\.bias: the model has other")

    def test_a_module_that_is_inserted_before_others(self):
        self.assert_told(lambda model: model.layers.insert(1, nn.Linear(4, 4)), r"^layers\.1\.weight, layers\.1\.bias, .*other")

    def test_a_frozen_parameter_that_is_replaced(self):
        model = Net(width=4)
        model.layers[0].requires_grad_(False)
        optimizer = self.optimizer(model)
        model.layers[0].weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        with self.assertRaisesRegex(errors.FailedPrecondition, r"^layers\.0\.weight: the model has other"):
            self.train(model, optimizer)

    def test_a_module_that_is_added_is_told_when_its_parameters_get_gradients(self):
        def add(model):
            model.more = nn.Linear(4, 4, bias=False)

        self.assert_told(add, r"^more\.weight has a gradient, but this optimizer does not train it")
        self.assert_told(add, r"^more\.weight has a gradient, but this optimizer does not train i", residency="bucket")
        model = Net(width=4)
        optimizer = self.optimizer(model)
        model.unused = nn.Linear(4, 4)
        self.train(model, optimizer)
        model.more = nn.Linear(4, 4, bias=False)
        with self.assertRaisesRegex(errors.FailedPrecondition, r"requires_grad_\(False\) on it"):
            self.train(model, optimizer)
        model.more.requires_grad_(False)
        self.train(model, optimizer)

    def test_wrappers_may_come_and_go(self):
        model = Net(tied=True, width=4)
        optimizer = self.optimizer(model)
        for change in (
            lambda: model.layers.__setitem__(1, nn.Sequential(model.layers[1])),
            lambda: model.layers.__setitem__(1, model.layers[1][0]),
            lambda: setattr(model.layers[2], "weight", model.layers[0].weight),
            lambda: setattr(model, "scripted", torch.jit.script(nn.Linear(4, 4))),
            lambda: model.add_module("itself", model),
        ):
            change()
            self.train(model, optimizer)
        self.assertEqual(optimizer.committed_step, 5)
        del model.itself


class PartTest(Changed):
    """An optimizer of a part of a model, of which nothing is frozen by requires_grad."""

    def test_it_trains_what_it_was_given(self):
        for options in {}, {"residency": "bucket"}, {"slots": 1, "pulled": True}, {"slots": 2}:
            for reference in Net(width=4),:
                with self.subTest(**options):
                    model = Net(width=4)
                    params = list(model.layers[2].parameters())
                    optimizer = self.optimizer(model, what="-".join(options), params=params, **options)
                    theirs = torch.optim.SGD(reference.layers[2].parameters(), lr=0.1)
                    for step in range(2):
                        for _ in range(options.get("slots", 1) - 1):
                            backward(model, step)
                        self.train(model, optimizer, step) if options.get("slots") != 2 else self.both(model, optimizer, step)
                        theirs.zero_grad()
                        backward(reference, step)
                        theirs.step()
                    model.layers[0].requires_grad_(False)  # as torch.optim: it is none of the optimizer's
                    optimizer.close()
                    for name, value in reference.state_dict().items():
                        torch.testing.assert_close(model.state_dict()[name], value)

    def both(self, model, optimizer, step):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()

    def test_requires_grad_of_the_rest_may_change(self):
        model = Net(width=4)
        optimizer = self.optimizer(model, params=list(model.layers[2].parameters()))
        for on in False, True:
            model.layers[0].requires_grad_(on)
            self.train(model, optimizer)
        model.layers[2].bias.requires_grad_(False)
        with self.assertRaisesRegex(errors.FailedPrecondition, r"^requires_grad of layers\.2\.bias is False now"):
            self.train(model, optimizer)


class MovedTest(Changed):
    def test_share_memory_is_told_and_reverted_with_the_gradients(self):
        for kind in "views", "decoded", "bucket":
            with self.subTest(kind):
                model = Net()
                optimizer = self.optimizer(model, what=kind, **KINDS[kind])
                self.train(model, optimizer)
                before = self.values(model)
                if kind != "bucket":
                    backward(model)  # its gradients move, too
                model.share_memory()
                with self.assertRaisesRegex(errors.FailedPrecondition, r"share_memory\(\).*optimizer\.revert\(\)"):
                    optimizer.step() if kind != "bucket" else backward(model)
                optimizer.revert()
                self.assert_same(before, self.values(model))
                optimizer.step()  # without gradients it does nothing
                self.assertEqual(optimizer.committed_step, 1)
                self.train(model, optimizer)
                reference = Net()
                theirs = self.optimizer(reference, what=f"{kind}-reference", **KINDS[kind])
                for _ in range(2):
                    self.train(reference, theirs)
                self.assert_same(self.values(reference), self.values(model))


class ForkTest(Changed):
    def test_a_forked_child_has_the_weights_of_when_it_was_forked(self):
        for kind in "views", "decoded", "connected":
            with self.subTest(kind):
                model = Net()
                with mock.patch.object(_client.Job, "on_this_host", kind != "connected"):
                    optimizer = self.optimizer(model, what=kind, **KINDS[kind])
                self.train(model, optimizer)
                before, (wait, go) = self.values(model), os.pipe()
                backward(model, 1)
                child = os.fork()
                if child == 0:
                    os.close(go)
                    os.read(wait, 1)
                    same = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
                    os._exit(7 if same and model.layers[0].weight.grad is None else 1)
                optimizer.step()
                self.assertFalse(torch.equal(before["layers.0.weight"], model.layers[0].weight))
                os.close(go)
                os.close(wait)
                self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 7)
                self.train(model, optimizer)

    def test_workers_of_a_loader_copy_no_weights(self):
        model = Net()
        optimizer = self.optimizer(model)
        with mock.patch.object(optimizer._placed._writes, "keep", side_effect=lambda: os._exit(3)):
            self.assertEqual(len(list(torch.utils.data.DataLoader(list(range(4)), num_workers=1))), 4)
        self.train(model, optimizer)


del Changed  # has no tests

if __name__ == "__main__":
    unittest.main()
