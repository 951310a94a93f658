#!/usr/bin/env python3
"""What a new user of shardmesh.torch does by mistake, and the error that tells so before any harm."""
import math
import os
import sys
import unittest
from unittest import mock

import torch
from shardmesh import errors
from shardmesh.torch import Optimizer, follow
from shardmesh.torch._machine import _service
from torch import nn
from torch.nn.utils import parametrize

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from service import ServiceTest


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x))


def backward(model, seed=0, **how):
    model(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))).square().mean().backward(**how)


class Misuse(ServiceTest):
    def optimizer(self, model, algorithm="SGD", **options):
        options = {"lr": 0.1, "timeout": 10, "service": self.address, "job": self.id(), **options}
        optimizer = Optimizer(model, algorithm, **options)
        self.addCleanup(optimizer.close)
        return optimizer


class ArgumentsTest(unittest.TestCase):
    NONE = [
        ("clip_norm", "0 .no clipping. or a positive number", math.nan, -1.0, "1", None, math.inf),
        ("seed", "an integer from 0 to 2.64 - 1", -1, 2**64, 1.5, None),
        ("workers", "an integer from 1 to 1024", "a", 0, -1, 1.5, 2000, None),
        ("timeout", "seconds above 0, from 0.001 to 1e8", 1e12, 1e-9, 0, -1, math.nan, math.inf, "1", None),
        ("slots", "an integer from 1 to 128", 0, -1, "a", 1.5, True, 129),
        ("publish_every", "an integer from 1", 0, -5, "a"),
        ("lr", r"lie in \[0, 1e6\]", math.nan, -1.0, math.inf, torch.tensor(-1.0)),
        ("lr", "a number", "a", None, torch.ones(2)),
        ("betas", r"both must lie in \[0, 1\)", (1.0, 0.9), (0.9, -0.1), (0.9, math.nan)),
        ("betas", "pair", 0.9, (0.9,), "ab"),
        ("eps", r"lie in \[1.2e-38, 1e6\]", -1, 0, math.nan),
        ("weight_decay", r"lie in \[0, infinity\)", -1, math.nan, math.inf),
        ("algorithm", "SGD, Adam, AdamW, Lion and Muon", "Adagrad", torch.optim.AdamW, None),
        ("weights", "fp32, bf16, .* or nf4", "fp16", 3),
        ("states", "fp32, bf16_sr, .* or fp8x32", "fp16", 3),
        ("gather", "stored, fp8_tensor, .* or nf4", "fp16", 3),
        ("gradients", "fp32 or bf16", "fp16", 3),
        ("residency", "full or bucket", "block", None),
        ("deliver", "decoded or quantized", "codes", None),
        ("mesh", "ddp=2,fsdp=4", 3, "ddp", ""),
        ("service", "10.0.0.1:7000", 3, "nohost", "host:99999"),
        ("job", "1 to 128 characters", 3, "", "a b"),
        ("pulled", "True or False", 1, None),
        ("token_weights", "True or False", 1, None),
        ("init", "function", 3),
        ("resume", "path", 3),
        ("model", "torch.nn.Module", 3),
    ]

    def test_what_is_none_is_said_with_its_value_before_anything_starts(self):
        with mock.patch.object(_service, "find", side_effect=AssertionError("started")):
            for name, right, *values in self.NONE:
                for value in values:
                    with self.subTest(name, value=value), self.assertRaisesRegex(ValueError, f"{name}.*{right}") as raised:
                        Optimizer(Net(), **{name: value})
                    self.assertIn(repr(value)[:40], str(raised.exception))
            for how, right in (
                ({"algorithm": "SGD", "momentum": 2.0}, r"momentum is 2.0; .*\[0, 1\]"),
                ({"algorithm": "SGD", "nesterov": True}, "needs a momentum and no dampening"),
                ({"algorithm": 1e-3}, r'algorithm 0.001 is none; .*by name: Optimizer\(model, "AdamW", lr=0.001\)'),
                ({"lr": 0.1, "learning_rate": 0.1}, "has no hyperparameter 'learning_rate'"),
            ):
                with self.subTest(**how), self.assertRaisesRegex(errors.InvalidArgument, right):
                    Optimizer(Net(), **how)
            with self.assertRaisesRegex(errors.InvalidArgument, "lr is -1; "):
                Optimizer([{"params": Net().named_parameters(), "lr": -1}])
            with self.assertRaisesRegex(errors.InvalidArgument, "needs the model"):
                Optimizer(Net().named_parameters(), deliver="quantized", gather="int8_row")

    def test_what_is_at_the_edge_is_good(self):
        with mock.patch.object(_service, "find", side_effect=AssertionError("started")):
            for how in (
                {"lr": torch.tensor(0.1)}, {"lr": 0}, {"betas": (0, 0.5)}, {"algorithm": "Lion", "betas": [1, 1]}, {"seed": 2**64 - 1},
                {"slots": 128}, {"clip_norm": 0}, {"clip_norm": 1}, {"timeout": 1}, {"publish_every": 1}, {"workers": 1024},
                {"algorithm": "SGD", "momentum": 1, "nesterov": True}, {"job": "a" * 128}, {"service": "unknown:1"},
            ):
                with self.subTest(**how), self.assertRaisesRegex(AssertionError, "started"):
                    Optimizer(Net(), **how)


class ChangedTest(Misuse):
    def test_hyperparameters_and_weights_that_were_changed_are_told_in_their_number(self):
        model = Net()
        optimizer = self.optimizer(model, "AdamW")
        for key, value, said in ("betas", (0.5, 0.5), "betas of group 0 were"), ("eps", 1e-3, "eps of group 0 was"):
            before, optimizer.param_groups[0][key] = optimizer.param_groups[0][key], value
            backward(model)
            with self.assertRaisesRegex(errors.Unimplemented, f"^{said} changed from"):
                optimizer.step()
            optimizer.param_groups[0][key] = before
        for layer, said in (model.head, "head.bias was .* has its weights"), (model.body, "body.bias, head.bias were .* their weights"):
            with torch.no_grad():
                layer.bias.add_(1)
            with self.assertRaisesRegex(errors.FailedPrecondition, f"^{said}"):
                optimizer.step()


    def test_an_equal_pair_is_no_change_and_a_rate_is_a_number(self):
        model = Net()
        optimizer = self.optimizer(model, "AdamW", betas=(0.9, 0.99))
        optimizer.param_groups[0]["betas"] = [0.9, 0.99]
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = "high"
        model(torch.ones(1, 4)).sum().backward()
        with self.assertRaisesRegex(errors.InvalidArgument, "group 0: lr is 'high'; it must be a number"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        for path in "", "a\0b":
            with self.assertRaisesRegex(errors.InvalidArgument, "folder is .*; it must be the path of a folder"):
                optimizer.save(path)


class PulledTest(Misuse):
    def test_pulled_slots_of_a_loader(self):
        optimizer = self.optimizer(Net(), pulled=True, slots=2)
        loader = torch.utils.data.DataLoader(list(range(4)))
        for batches in loader, iter(loader), (seed for seed in range(2)), 3:
            said = rf"batches is a {type(batches).__name__}; .*`loader = iter\(loader\)`.*next\(loader\) for _ in range\(2\)"
            with self.subTest(said), self.assertRaisesRegex(errors.InvalidArgument, said):
                optimizer.slots(batches)

    def test_a_loop_over_pulled_slots_that_is_left_early(self):
        model, digests = Net(), set()
        for left in -1, 0, 1, 2:  # at which slot; 2: step() in the loop
            optimizer = self.optimizer(model, pulled=True, slots=2, job=f"{self.id()}{left}")
            for slot, seed in enumerate(optimizer.slots([5, 6])):
                backward(model, seed)
                if left == 2:
                    with self.assertRaisesRegex(errors.FailedPrecondition, f"slot {slot} was taken .* step.. was called in it"):
                        optimizer.step()
                if slot == left:
                    break
            if left in (0, 1):
                for _ in range(2):
                    with self.assertRaisesRegex(errors.FailedPrecondition, f"slot {left} was taken and is not .*left before its end"):
                        optimizer.step()
                    optimizer.zero_grad()
                for seed in optimizer.slots([5, 6]):
                    backward(model, seed)
            optimizer.step()
            self.assertEqual(optimizer.committed_step, 1)
            digests.add(str(optimizer.job.digest()))
            optimizer.close()
            model = Net()
        self.assertEqual(len(digests), 1)


class OtherParametersTest(Misuse):
    def assert_told(self, change, said, *, both=False, **options):
        """both: the model has none of its parameters any more."""
        model = Net()
        optimizer = self.optimizer(model, **options)
        change(model)
        if both:
            change(model, "body")
        if not options.get("pulled"):
            backward(model)
        with self.assertRaisesRegex(errors.FailedPrecondition, said):
            optimizer.slots([0]) if options.get("pulled") else optimizer.step()
        self.assertEqual(optimizer.committed_step, 0)
        optimizer.close()

    def test_an_assignment_to_a_parameter(self):
        def change(model, name="head"):
            layer = getattr(model, name)
            layer.weight, layer.bias = nn.Parameter(torch.ones_like(layer.weight)), nn.Parameter(torch.ones_like(layer.bias))

        for both in False, True:
            with self.subTest(both=both):
                said = r"^(body.weight, body.bias, head.weight and 1 more|head.weight, head.bias): the model has other .*assignment"
                self.assert_told(change, said, both=both, job=f"{both}")
        self.assert_told(change, "head.weight, head.bias: the model has other", pulled=True, slots=1, job="pulled")
        self.assert_told(lambda model: setattr(model.head, "bias", nn.Parameter(torch.ones(2))), "^head.bias: the model has other")

    def test_another_module_in_a_place(self):
        self.assert_told(lambda model: setattr(model, "head", nn.Linear(4, 5)), "^head.weight, head.bias: the model has other")

    def test_a_conversion_that_makes_new_parameters(self):
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            self.assert_told(lambda model: model.double().float(), "^body.weight.* has other .*conversion.*close")
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)

    def test_what_leaves_the_parameters_in_the_model_is_no_mistake(self):
        model = Net()
        optimizer = self.optimizer(model)
        for step, change in enumerate((
            lambda: setattr(model, "head", nn.Sequential(model.head)),  # a wrapper
            lambda: setattr(model, "head", model.head[0]),
            lambda: setattr(model.body, "bias", model.body.bias),
            lambda: setattr(model, "more", nn.Linear(2, 2)),  # as torch.optim: not trained
            lambda: setattr(model, "more", None),
            lambda: setattr(model, "head", nn.Identity()),  # zeros for its gradients
        )):
            change()
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
            self.assertEqual(optimizer.committed_step, step + 1)

    def test_an_assignment_that_is_taken_back(self):
        model = Net()
        optimizer = self.optimizer(model)
        before, model.head.weight = model.head.weight, nn.Parameter(torch.ones(2, 4))
        with self.assertRaisesRegex(errors.FailedPrecondition, "^head.weight: the model has other"):
            optimizer.step()
        model.head.weight = before
        backward(model)
        optimizer.step()
        self.assertEqual(optimizer.committed_step, 1)

    def test_a_parametrization(self):
        self.assert_told(lambda model: parametrize.register_parametrization(model.head, "weight", nn.Softplus()), "head.weight")
        self.assert_told(lambda model: nn.utils.parametrizations.weight_norm(model.head), "^head.weight", job="norm")


class Blocks(Net):
    """For bucket residency."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.body, self.head])
        del self.body, self.head

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def named_shapes(model):
    return [(name, parameter.shape) for name, parameter in model.named_parameters()]


class GradientsTest(Misuse):
    def test_gradients_with_a_graph_are_refused_and_nothing_of_them_stays(self):
        for how in {}, {"slots": 2}, {"residency": "bucket"}:
            with self.subTest(**how):
                model = Blocks()
                optimizer = self.optimizer(model, job="graph" + "".join(how), **how)
                with self.assertRaisesRegex(errors.Unimplemented, "create_graph=True"):
                    backward(model, create_graph=True)
                if how.get("residency") != "bucket":  # there it has not begun
                    with self.assertRaisesRegex(errors.FailedPrecondition, "raised.*zero_grad"):
                        optimizer.step()
                optimizer.zero_grad()
                for _ in range(how.get("slots", 1)):
                    backward(model)
                optimizer.step()
                self.assert_as_torch(model, lambda copied: backward(copied))

    def assert_as_torch(self, model, loss):
        """After one step of SGD with lr=0.1 the model has the weights of torch's own."""
        copied = Blocks()
        loss(copied)
        torch.optim.SGD(copied.parameters(), lr=0.1).step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, copied.state_dict()[name])

    def test_gradients_of_gradients(self):
        def penalty(model):
            loss = model(torch.ones(3, 4)).square().sum()
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            (loss + sum(gradient.square().sum() for gradient in gradients)).backward()

        model = Blocks()
        optimizer = self.optimizer(model)
        penalty(model)
        optimizer.step()
        self.assertFalse(any(parameter.grad.requires_grad for parameter in model.parameters()))
        self.assert_as_torch(model, penalty)
        model = Blocks()
        optimizer = self.optimizer(model, residency="bucket", job="bucket")
        with self.assertRaisesRegex(errors.Unimplemented, 'create_graph=True with residency="bucket".*full'):
            penalty(model)
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        self.assert_as_torch(model, backward)

    def test_gradients_that_were_handed_over_are_not_dropped(self):
        for slots in 1, 2:
            for to_none in True, False:
                with self.subTest(slots=slots, to_none=to_none):
                    model = Blocks()
                    optimizer = self.optimizer(model, residency="bucket", slots=slots, job=f"{slots}-{to_none}")
                    for _ in range(slots - 1):
                        backward(model, 7)
                    if slots > 1:
                        optimizer.zero_grad(set_to_none=to_none)  # before its last slot nothing is handed over
                    for _ in range(slots):
                        backward(model)
                    with self.assertRaisesRegex(errors.FailedPrecondition, "handed over .* cannot be taken back: call step()"):
                        optimizer.zero_grad(set_to_none=to_none)
                    windows = [optimizer._session.gradient(slots - 1, *one) for one in named_shapes(model)]
                    before = [window.clone() for window in windows]
                    with self.assertRaisesRegex(errors.FailedPrecondition, "handed over already|call step()"):
                        backward(model, 9)
                    for window, handed_over in zip(windows, before):  # the workers leave zeros where they have read
                        self.assertTrue(((window == handed_over) | (window == 0)).all())
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=to_none)
                    self.assertEqual(optimizer.last.step, 1)
                    self.assert_as_torch(model, backward)

    def test_the_norm_of_gradients_is_known_or_none(self):
        for clip_norm, pulled in (0.0, False), (100.0, False), (0.0, True), (100.0, True):
            with self.subTest(clip_norm=clip_norm, pulled=pulled):
                model = Net()
                optimizer = self.optimizer(
                    model, clip_norm=clip_norm, pulled=pulled, slots=1 if pulled else None, job=f"norm-{clip_norm:g}-{pulled}"
                )
                for _ in optimizer.slots([0]) if pulled else [0]:
                    backward(model)
                    norm = torch.linalg.vector_norm(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
                optimizer.step()
                if clip_norm == 0:
                    self.assertIsNone(optimizer.last.gradient_norm)
                    continue
                self.assertAlmostEqual(optimizer.last.gradient_norm, norm.item(), places=5)
                for _ in optimizer.slots([0]) if pulled else [0]:
                    backward(model)
                    model.body.weight.grad.fill_(math.nan)
                optimizer.step()
                self.assertEqual(optimizer.last[2::2], (True, None))


class OthersTest(Misuse):
    def test_following_a_model_that_is_trained_here(self):
        model = Net()
        optimizer = self.optimizer(model)
        with self.assertRaisesRegex(errors.FailedPrecondition, "trained by an optimizer of this process.*model of its own"):
            follow(model, service=optimizer.service, job=self.id())
        with follow(Net(), service=optimizer.service, job=self.id()) as following:
            self.assertEqual(following.step, 0)
        optimizer.close()

    def test_a_backward_in_a_forked_child_leaves_its_parents_gradients(self):
        model = Net()
        self.optimizer(model)
        backward(model)
        before = model.head.weight.grad.clone()
        child = os.fork()
        if child == 0:
            try:
                backward(model, 1)
            except errors.FailedPrecondition as error:
                os._exit(7 if "was forked from" in str(error) else 1)
            finally:
                os._exit(2)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 7)
        self.assertTrue(torch.equal(model.head.weight.grad, before))

    def test_another_group(self):
        optimizer = self.optimizer(Net())
        with self.assertRaisesRegex(errors.Unimplemented, "give all groups when the optimizer is made, or close"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        self.assertEqual(len(optimizer.param_groups), 1)


del Misuse  # has no tests

if __name__ == "__main__":
    unittest.main()
