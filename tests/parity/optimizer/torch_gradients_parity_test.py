#!/usr/bin/env python3
"""What `.grad` is between backward() and step(): the whole gradient, or nothing that code can use; and ranks without one."""
import os
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
from shardmesh import errors
from shardmesh.torch import Optimizer
from torch import nn

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from service import ServiceTest


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def loss_of(model, seed=0):
    return model(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))).square().mean()


def scaled(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    return scaler


def parameter(model):
    return model.layers[0].weight


def exchange(one, other, what="grad"):
    of_one, of_other = getattr(one, what), getattr(other, what)
    setattr(one, what, of_other)
    setattr(other, what, of_one)


USES = {  # of a model whose gradients `.grad` cannot show
    "read": lambda model, _: parameter(model).grad.norm(),
    "number": lambda model, _: parameter(model).grad[0, 0].item(),
    "numpy": lambda model, _: parameter(model).grad.numpy(),
    "data": lambda model, _: parameter(model).grad.data.mul_(2),
    "noise": lambda model, _: parameter(model).grad.add_(0.1),
    "other way round": lambda model, _: torch.zeros(4, 4).copy_(parameter(model).grad),
    "item": lambda model, _: parameter(model).grad.__setitem__(0, 1.0),
    "print": lambda model, _: str(parameter(model).grad),
    "norm": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "plain norm": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False),
    "value": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "zeros": lambda model, _: model.zero_grad(set_to_none=False),
    "copy of a tensor": lambda model, _: torch.tensor(parameter(model).grad),
    "nested": lambda model, _: torch.nested.nested_tensor([parameter(model).grad]),
    "other memory": lambda model, _: parameter(model).grad.set_(torch.ones(4, 4)),
    "other data": lambda model, _: setattr(parameter(model).grad, "data", torch.ones(4, 4)),
    "unscale_": lambda model, optimizer: scaled(model, optimizer).unscale_(optimizer),
}
AS_LEFT = {  # by a program, where `.grad` is the gradient
    "dropped": lambda model: model.zero_grad(),
    "one dropped": lambda model: setattr(parameter(model), "grad", None),
    "zeroed": lambda model: model.zero_grad(set_to_none=False),
    "replaced": lambda model: setattr(parameter(model), "grad", torch.ones(4, 4)),
    "transposed": lambda model: setattr(parameter(model), "grad", parameter(model).grad.t()),
    "exchanged": lambda model: exchange(*(layer.weight for layer in model.layers)),
    "data exchanged": lambda model: exchange(*(layer.weight.grad for layer in model.layers), "data"),
}
OTHER_MEMORY = {  # for the tensor in `.grad`, which stays the same object
    "data": lambda gradient: setattr(gradient, "data", gradient.data * torch.linspace(0, 1, 16).view(4, 4)),
    "data, transposed": lambda gradient: setattr(gradient, "data", gradient.data.t()),
    "set_": lambda gradient: gradient.set_(gradient * 3),
    "t_": lambda gradient: gradient.t_(),
}
CHANGES = {  # which step() sees
    "put": lambda model: setattr(parameter(model), "grad", torch.ones(4, 4)),
    "taken away": lambda model: model.zero_grad(),
}


class Gradients(ServiceTest):
    def optimizer(self, model, job, **options):
        options = {"lr": 0.1, "timeout": 10, "service": self.address, "job": f"{self.id()}{job}".replace(" ", "-"), **options}
        optimizer = Optimizer(model, "SGD", **options)
        self.addCleanup(optimizer.close)
        return optimizer


class SeveralSlotsTest(Gradients):
    def assert_refused(self, model, optimizer):
        for name, use in USES.items():
            with self.subTest(name), self.assertRaisesRegex(errors.FailedPrecondition, "the gradient of layers.*clip_norm="):
                use(model, optimizer)

    def test_no_part_of_a_gradient_can_be_used(self):
        for options in {"slots": 2}, {"slots": 2, "residency": "bucket"}, {"residency": "bucket"}:
            with self.subTest(**options):
                model = Blocks()
                optimizer = self.optimizer(model, "-".join(options), **options)
                for slot in range(options.get("slots", 1)):
                    loss_of(model, slot).backward()
                    self.assert_refused(model, optimizer)
                optimizer.step()
                self.assertTrue(all(one.grad is None for one in model.parameters()))
                self.assert_mean_of_slots(model, options.get("slots", 1))

    def test_no_part_of_a_gradient_of_pulled_slots_can_be_used(self):
        model = Blocks()
        optimizer = self.optimizer(model, "", slots=2, pulled=True)
        for seed in optimizer.slots([0, 1]):
            loss_of(model, seed).backward()
            self.assert_refused(model, optimizer)
        self.assert_refused(model, optimizer)
        with self.assertRaisesRegex(errors.FailedPrecondition, "a backward outside of a slot"):
            loss_of(model).backward()
        optimizer.step()
        self.assert_mean_of_slots(model, 2)

    def assert_mean_of_slots(self, model, slots):
        right = Blocks()
        for seed in range(slots):
            (loss_of(right, seed) / slots).backward()
        torch.optim.SGD(right.parameters(), lr=0.1).step()
        for ours, theirs in zip(model.state_dict().values(), right.parameters()):
            torch.testing.assert_close(ours, theirs)

    def test_what_is_put_there_or_taken_away_is_told(self):
        for number, (name, change) in enumerate(CHANGES.items()):
            for first in True, False:
                with self.subTest(name, first=first):
                    model = Blocks()
                    optimizer = self.optimizer(model, f"{number}{first}", slots=2)
                    loss_of(model).backward()
                    if not first:
                        loss_of(model, 1).backward()
                    change(model)
                    with self.assertRaisesRegex(errors.FailedPrecondition, r"layers.\d.(weight|bias) was (put|set to None)"):
                        loss_of(model, 1).backward() if first else optimizer.step()
                    optimizer.zero_grad()
                    for seed in range(2):
                        loss_of(model, seed).backward()
                    optimizer.step()
                    self.assert_mean_of_slots(model, 2)

    def test_hooks_do_not_see_a_part(self):
        model, seen = Blocks(), []

        def hook(one):
            with self.assertRaises(errors.FailedPrecondition):
                one.grad.mul_(0.5)
            seen.append(one)

        handles = [one.register_post_accumulate_grad_hook(hook) for one in model.parameters()]
        optimizer = self.optimizer(model, "", slots=2)
        handles += [one.register_post_accumulate_grad_hook(hook) for one in model.parameters()]
        for seed in range(2):
            with optimizer.no_sync():
                (loss_of(model, seed) / 2).backward()
            (loss_of(model, seed) / 2).backward()
        optimizer.step()
        self.assertEqual(len(seen), 4 * 4 * 2)
        self.assert_mean_of_slots(model, 2)
        for handle in handles:
            handle.remove()
        optimizer.close()
        loss_of(model).backward()
        self.assertTrue(parameter(model).grad.any())

    def test_one_slot_shows_the_whole(self):
        model, right = Blocks(), Blocks()
        optimizer = self.optimizer(model, "")
        for each, of_it in (model, optimizer), (right, torch.optim.SGD(right.parameters(), lr=0.1)):
            for seed in range(2):
                loss_of(each, seed).backward()
            nn.utils.clip_grad_norm_(each.parameters(), 0.01)
            parameter(each).grad.add_(0.1)
            of_it.step()
        for ours, theirs in zip(model.parameters(), right.parameters()):
            torch.testing.assert_close(ours, theirs)

    def test_one_slot_takes_each_gradient_as_the_program_left_it(self):
        """In the first step, too, where a gradient that was dropped is in the slot's window still."""
        for name, change in AS_LEFT.items():
            with self.subTest(name):
                model, right = Blocks(), Blocks()
                optimizer = self.optimizer(model, name)
                for each, of_it in (model, optimizer), (right, torch.optim.SGD(right.parameters(), lr=0.1)):
                    loss_of(each).backward()
                    change(each)
                    of_it.step()
                for ours, theirs in zip(model.parameters(), right.parameters()):
                    torch.testing.assert_close(ours, theirs)

    def test_other_memory_of_a_gradient_is_taken(self):
        for name, change in OTHER_MEMORY.items():
            for zero in "None", "zeros", "none at all", "changed twice":
                with self.subTest(name, zero=zero):
                    model, right = Blocks(), Blocks()
                    optimizer = self.optimizer(model, f"{name}{zero}".replace(",", ""))
                    for each, of_it in (model, optimizer), (right, torch.optim.SGD(right.parameters(), lr=0.1)):
                        for seed in range(4):
                            loss_of(each, seed).backward()
                            if seed != 2:
                                change(parameter(each).grad)
                            if zero == "changed twice":
                                loss_of(each, seed + 4).backward()
                                change(parameter(each).grad)
                            of_it.step()
                            if zero != "none at all":
                                of_it.zero_grad(set_to_none=zero != "zeros")
                    for ours, theirs in zip(model.parameters(), right.parameters()):
                        torch.testing.assert_close(ours, theirs)

    def test_other_memory_of_another_shape_is_an_error_after_which_the_step_begins_again(self):
        for number, shape in enumerate(((3, 4), (16,), (2, 8))):
            with self.subTest(shape=shape):
                model, right = Blocks(), Blocks()
                optimizer = self.optimizer(model, str(number))
                loss_of(model).backward()
                parameter(model).grad.resize_(shape)
                for _ in range(2):
                    with self.assertRaisesRegex(errors.FailedPrecondition, "grad of layers.0.weight was given the shape .*zero_grad"):
                        optimizer.step()
                optimizer.zero_grad()
                for each, of_it in (model, optimizer), (right, torch.optim.SGD(right.parameters(), lr=0.1)):
                    loss_of(each).backward()
                    of_it.step()
                torch.testing.assert_close(parameter(model), parameter(right))

    def test_a_pulled_slot_alone_takes_its_gradient_as_the_program_left_it(self):
        for name, change in {**AS_LEFT, **{
            name: lambda model, change=change: change(parameter(model).grad) for name, change in OTHER_MEMORY.items()
        }}.items():
            with self.subTest(name):
                model, right = Blocks(), Blocks()
                optimizer = self.optimizer(model, name.replace(",", ""), slots=1, pulled=True)
                others = torch.optim.SGD(right.parameters(), lr=0.1)
                for seed in range(2):
                    for each, of_it in (model, optimizer), (right, others):
                        for _ in optimizer.slots([seed]) if each is model else [seed]:
                            loss_of(each, seed).backward()
                            change(each)
                        of_it.step()
                        of_it.zero_grad()
                for ours, theirs in zip(model.parameters(), right.parameters()):
                    torch.testing.assert_close(ours, theirs)

    def test_other_memory_of_a_gradient_is_taken_before_it_is_handed_over(self):
        """A block's bucket is handed over with the last of its gradients. Until then `.grad` shows them."""
        model, right = Blocks(), Blocks()
        optimizer = self.optimizer(model, "", residency="bucket")
        seen = []

        def hook(one, of=model):
            try:
                one.grad.data = one.grad.data * 3
            except errors.FailedPrecondition:
                return
            seen.append(next(name for name, other in of.named_parameters() if other is one))

        for one in model.parameters():
            one.register_post_accumulate_grad_hook(hook)
        loss_of(model).backward()
        optimizer.step()
        loss_of(right).backward()
        self.assertTrue(seen)
        for name, one in right.named_parameters():
            one.grad.mul_(3 if name in seen else 1)
        torch.optim.SGD(right.parameters(), lr=0.1).step()
        for ours, theirs in zip(model.state_dict().values(), right.parameters()):
            torch.testing.assert_close(ours, theirs)

    def test_a_model_is_compiled_anew_between_slots(self):
        """torch.compile describes the `.grad` of each parameter that it finds."""
        model = Blocks()
        optimizer = self.optimizer(model, "", slots=2)
        compiled = torch.compile(model, backend="aot_eager")
        for rows in 2, 3, 4, 5:
            compiled(torch.ones(rows, 4)).sum().backward()
            if rows % 2:
                optimizer.step()
        self.assertEqual(optimizer.committed_step, 2)


class RanksWithoutABackwardTest(Gradients):
    """Of two ranks, each a thread."""

    def run_ranks(self, job, steps, **options):
        """steps: for each step, how many backwards each rank has; what its tokens are, is their number."""
        models = [Blocks(), Blocks()]
        optimizers = []
        for rank, model in enumerate(models):
            with mock.patch.dict(os.environ, {"RANK": str(rank), "WORLD_SIZE": "2"}):
                optimizers.append(self.optimizer(model, job, **options))

        def train(rank):
            for number, backwards in enumerate(steps):
                for slot in range(backwards[rank]):
                    loss_of(models[rank], 4 * number + 2 * rank + slot).backward()
                if options.get("token_weights") and backwards[rank]:
                    optimizers[rank].tokens(*[1] * backwards[rank])
                optimizers[rank].step()
                self.assertEqual(optimizers[rank].committed_step, number + 1)
                optimizers[rank].zero_grad()

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(train, range(2)))
        for ours, theirs in zip(*(model.state_dict().values() for model in models)):
            self.assertTrue(torch.equal(ours, theirs))
        return models[0]

    def right(self, steps, slots, by_tokens):
        model = Blocks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, backwards in enumerate(steps):
            losses = [loss_of(model, 4 * number + 2 * rank + slot) for rank in range(2) for slot in range(backwards[rank])]
            if losses:
                (sum(losses) / (len(losses) if by_tokens else slots)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return model

    def test_its_slots_are_zeros_and_no_rank_is_a_step_ahead(self):
        for number, (each, options) in enumerate((
            (1, {}), (2, {"slots": 4}), (2, {"slots": 4, "token_weights": True}), (1, {"token_weights": True}),
            (1, {"residency": "bucket"}), (2, {"slots": 4, "residency": "bucket"}),
        )):
            with self.subTest(**options):
                steps = [(each, each), (each, 0), (0, each), (0, 0), (each, each)]
                model = self.run_ranks(str(number), steps, **options)
                right = self.right(steps, 2 * each, options.get("token_weights"))
                for ours, theirs in zip(model.state_dict().values(), right.state_dict().values()):
                    torch.testing.assert_close(ours, theirs)

    def test_one_rank_alone_does_nothing_as_torch(self):
        model = Blocks()
        optimizer = self.optimizer(model, "")
        optimizer.step()
        self.assertEqual((optimizer.committed_step, optimizer.last), (0, None))

    def test_pulled_slots_without_a_loop(self):
        with mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "2"}):
            optimizer = self.optimizer(Blocks(), "", slots=2, pulled=True)
        with self.assertRaisesRegex(errors.FailedPrecondition, "without a loop over optimizer.slots"):
            optimizer.step()


del Gradients  # has no tests

if __name__ == "__main__":
    unittest.main()
