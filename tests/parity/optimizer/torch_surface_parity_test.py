#!/usr/bin/env python3
"""Calls of all that torch.optim, lr_scheduler, swa_utils, torch.amp and torch.nn.utils export, with a job's optimizer and with
torch.optim.AdamW: equal numbers, or a clear error. A name that torch adds and CALLS does not know fails the test."""
import copy
import os
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor

import torch
from shardmesh import errors
from shardmesh.torch import Optimizer
from torch import nn
from torch.optim import lr_scheduler, swa_utils

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from service import ServiceTest

AFTER = "it changes modules, before an optimizer is made"
NO_SENSE = {  # names that are not called with an optimizer
    "optim": {name: "another optimizer" for name in (
        "Adafactor Adadelta Adagrad Adam AdamW Adamax ASGD LBFGS Muon NAdam Optimizer RAdam RMSprop Rprop SGD SparseAdam").split()}
    | {"lr_scheduler": "a module", "swa_utils": "a module"},
    "optimizer": {"OptimizerPostHook": "a type", "OptimizerPreHook": "a type", "profile_hook_step": "wraps classes"},
    "lr_scheduler": {"LRScheduler": "an abstract class"},
    "amp": {"custom_bwd": "of functions", "custom_fwd": "of functions", "is_autocast_available": "of devices"},
    "utils": {name: AFTER for name in (
        "convert_conv2d_weight_memory_format convert_conv3d_weight_memory_format fuse_conv_bn_eval fuse_conv_bn_weights"
        " fuse_linear_bn_eval fuse_linear_bn_weights parametrizations parametrize remove_spectral_norm remove_weight_norm rnn"
        " skip_init spectral_norm stateless weight_norm").split()},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.norm(self.body(x)).tanh())


def batch(step):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def backward(model, step=0, scale=lambda loss: loss):
    loss = model(batch(step)).square().mean()
    scale(loss).backward()
    return loss.item()


def train(model, optimizer, after=lambda step: None, steps=6, step_of=None):
    for step in range(steps):
        backward(model, step)
        (step_of or optimizer.step)()
        optimizer.zero_grad()
        after(step)


def scheduled(make, metric=False):
    """Rates and states of a schedule that is saved and loaded half-way."""
    def call(model, optimizer):
        rates, schedule = [], make(optimizer)

        def after(step):
            nonlocal schedule
            schedule.step(*[1.0 if metric else None][:metric])
            rates.append([group["lr"] for group in optimizer.param_groups])
            if step == 3:
                state, rate = schedule.state_dict(), optimizer.param_groups[0]["lr"]
                schedule.load_state_dict(state)
                rates.append(rate)

        train(model, optimizer, after)
        return rates, schedule.get_last_lr()
    return call


SCHEDULES = {
    "LambdaLR": [lambda of: lr_scheduler.LambdaLR(of, lambda step: 0.9**step)],
    "MultiplicativeLR": [lambda of: lr_scheduler.MultiplicativeLR(of, lambda step: 0.9)],
    "StepLR": [lambda of: lr_scheduler.StepLR(of, 2)],
    "MultiStepLR": [lambda of: lr_scheduler.MultiStepLR(of, [1, 3])],
    "ConstantLR": [lambda of: lr_scheduler.ConstantLR(of, 0.5, 2)],
    "LinearLR": [lambda of: lr_scheduler.LinearLR(of, total_iters=4)],
    "ExponentialLR": [lambda of: lr_scheduler.ExponentialLR(of, 0.5)],
    "SequentialLR": [lambda of: lr_scheduler.SequentialLR(
        of, [lr_scheduler.LinearLR(of, total_iters=2), lr_scheduler.ExponentialLR(of, 0.5)], [2])],
    "CosineAnnealingLR": [lambda of: lr_scheduler.CosineAnnealingLR(of, 5)],
    "ChainedScheduler": [lambda of: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(of, 2), lr_scheduler.ExponentialLR(of, 0.9)])],
    "ReduceLROnPlateau": [lambda of: lr_scheduler.ReduceLROnPlateau(of, patience=1)],
    "CyclicLR": [lambda of: lr_scheduler.CyclicLR(of, 1e-3, 1e-2, 2, cycle_momentum=False),
                 lambda of: lr_scheduler.CyclicLR(of, 1e-3, 1e-2, 2)],
    "CosineAnnealingWarmRestarts": [lambda of: lr_scheduler.CosineAnnealingWarmRestarts(of, 3)],
    "OneCycleLR": [lambda of: lr_scheduler.OneCycleLR(of, 1e-2, 8, cycle_momentum=False), lambda of: lr_scheduler.OneCycleLR(of, 1e-2, 8)],
    "PolynomialLR": [lambda of: lr_scheduler.PolynomialLR(of, 5)],
}


def hooked(register, *arguments):
    """A hook that was called, and one that was removed."""
    def call(model, optimizer):
        seen = []
        handles = [getattr(optimizer, register)(lambda *given: seen.append(len(given))) for _ in range(2)]
        handles[1].remove()
        train(model, optimizer, steps=2)
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, steps=1)
        return seen
    return call


def with_group(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def saved(model, optimizer):
    train(model, optimizer, steps=3)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, steps=1)
    return state["state"]


def within(context):
    def call(model, optimizer):
        def step():
            with context():
                optimizer.step()
        train(model, optimizer, step_of=step)
    return call


def closure_step(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model(batch(0)).square().mean()
        loss.backward()
        return loss
    return [optimizer.step(closure).item() for _ in range(3)]


def compiled(model, optimizer):
    torch._dynamo.reset()
    train(model, optimizer, step_of=torch.compile(lambda: optimizer.step(), backend="eager"), steps=3)


OPTIMIZER = {
    "add_param_group": [with_group],
    "load_state_dict": [saved],
    "state_dict": [saved],
    "step": [train, closure_step, compiled, lambda model, optimizer: optimizer.step(), *map(within, (
        torch.no_grad, torch.enable_grad, torch.inference_mode, lambda: torch.autocast("cpu"), torch.autograd.detect_anomaly,
        torch.profiler.profile, lambda: torch.autograd.profiler.record_function("a")))],
    "zero_grad": [lambda model, optimizer: train(model, optimizer, lambda step: optimizer.zero_grad(set_to_none=False))],
    **{name: [hooked(name)] for name in (
        "register_step_pre_hook", "register_step_post_hook", "register_state_dict_pre_hook", "register_state_dict_post_hook",
        "register_load_state_dict_pre_hook", "register_load_state_dict_post_hook")},
}


def scaling(enabled, use=lambda scaler, model, optimizer, step: None):
    def call(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=enabled)
        seen = []
        for step in range(5):
            backward(model, step, scaler.scale)
            seen.append(use(scaler, model, optimizer, step))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(scaler.get_scale())
        return seen
    return call


def clipped(scaler, model, optimizer, step):
    scaler.unscale_(optimizer)
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()


SCALER = {
    "scale": lambda scaler, model, optimizer, step: scaler.scale([torch.ones(1), torch.ones(2)]),
    "unscale_": clipped,
    "step": lambda *_: None,
    "update": lambda scaler, model, optimizer, step: None,
    "state_dict": lambda scaler, model, optimizer, step: scaler.state_dict(),
    "load_state_dict": lambda scaler, model, optimizer, step: scaler.is_enabled() and scaler.load_state_dict(scaler.state_dict()),
    "is_enabled": lambda scaler, model, optimizer, step: scaler.is_enabled(),
    **{f"get_{name}": (lambda name: lambda scaler, *_: getattr(scaler, f"get_{name}")())(name)
       for name in ("scale", "backoff_factor", "growth_factor", "growth_interval")},
    "set_backoff_factor": lambda scaler, *_: scaler.set_backoff_factor(0.25),
    "set_growth_factor": lambda scaler, *_: scaler.set_growth_factor(4.0),
    "set_growth_interval": lambda scaler, *_: scaler.set_growth_interval(1),
}


def averaged(**how):
    def call(model, optimizer):
        mean = swa_utils.AveragedModel(model, **{key: value() for key, value in how.items()})
        train(model, optimizer, lambda step: mean.update_parameters(model))
        swa_utils.update_bn([batch(step) for step in range(3)], mean)
        return mean.state_dict()
    return call


SWA = {
    "AveragedModel": [averaged()], "update_bn": [averaged()],
    "SWALR": [scheduled(lambda of: swa_utils.SWALR(of, 1e-3, 3))],
    "get_ema_multi_avg_fn": [averaged(multi_avg_fn=swa_utils.get_ema_multi_avg_fn)],
    "get_swa_multi_avg_fn": [averaged(multi_avg_fn=swa_utils.get_swa_multi_avg_fn)],
    "get_ema_avg_fn": [averaged(avg_fn=swa_utils.get_ema_avg_fn)], "get_swa_avg_fn": [averaged(avg_fn=swa_utils.get_swa_avg_fn)],
}


def between(use):
    def call(model, optimizer):
        seen = []
        for step in range(3):
            backward(model, step)
            seen.append(use(model))
            optimizer.step()
            optimizer.zero_grad()
        return seen
    return call


def gradients(model):
    return [one.grad for one in model.parameters()]


UTILS = {
    "clip_grad_norm": [between(lambda model: nn.utils.clip_grad_norm(model.parameters(), 0.1))],
    "clip_grad_norm_": [between(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=1.0))],
    "clip_grad_value_": [between(lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01))],
    "clip_grads_with_norm_": [between(lambda model: nn.utils.clip_grads_with_norm_(
        model.parameters(), 0.1, nn.utils.get_total_norm(gradients(model))))],
    "get_total_norm": [between(lambda model: nn.utils.get_total_norm(gradients(model)))],
    "parameters_to_vector": [between(lambda model: nn.utils.parameters_to_vector(model.parameters()))],
    "vector_to_parameters": [between(lambda model: nn.utils.vector_to_parameters(
        torch.cat([one.detach().flatten() for one in model.parameters()]) * 2, model.parameters()))],
}


def swapped(model, optimizer):
    train(model, optimizer, steps=2)
    other = {name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()}
    backward(model)
    with torch.optim.swap_in_optimizer_params_and_state(optimizer, other, optimizer.state_dict()):
        optimizer.step()
    return optimizer.step()


def schedule_calls():
    return {name: [scheduled(make, metric=name == "ReduceLROnPlateau") for make in makes] for name, makes in SCHEDULES.items()}


CALLS = {
    "optim": (torch.optim.__all__, {"swap_in_optimizer_params_and_state": [swapped]}),
    "optimizer": ([name for name in dir(torch.optim.Optimizer) if name[0] != "_"], OPTIMIZER),
    "lr_scheduler": (lr_scheduler.__all__, schedule_calls()),
    "swa_utils": (swa_utils.__all__, SWA),
    "amp": (torch.amp.__all__, {"GradScaler": [scaling(on) for on in (True, False)], "autocast": [within(lambda: torch.autocast("cpu"))]}),
    "scaler": ([name for name in dir(torch.amp.GradScaler) if name[0] != "_"],
               {name: [scaling(on, use) for on in (True, False)] for name, use in SCALER.items()}),
    "utils": (nn.utils.__all__, UTILS),
}


def results(call, model, optimizer):
    result = call(model, optimizer)
    return result, {name: value.clone() for name, value in model.state_dict().items()}, [group["lr"] for group in optimizer.param_groups]


class SurfaceTest(ServiceTest):
    maxDiff = None

    def made(self, job):
        """A job takes half a second to be there: several are made at once."""
        torch.manual_seed(1)
        model = Net()
        return job, model, Optimizer(model, lr=1e-2, service=self.address, job=job, timeout=10)

    def outcome(self, call, job, model, optimizer):
        other = Net()
        other.load_state_dict(model.state_dict())
        try:
            theirs = results(call, other, torch.optim.AdamW(other.parameters(), lr=1e-2))
        except Exception as error:
            theirs = error
        try:
            ours = results(call, model, optimizer)
        except Exception as error:
            if type(error) is type(theirs) and str(error) == str(theirs):
                return "equal"  # torch's own refusal
            clear = "requires initialized optimizer state" in str(error)  # torch's: the state is the service's
            self.assertTrue(clear or type(error).__module__ == "shardmesh.errors", repr(error))
            return "refused"
        finally:
            core = optimizer.client._core
            core.delete_job(job, optimizer.job._core.uid)  # a worker has 64 at most
            optimizer.close()
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
        return "equal"

    def test_every_export_is_equal_or_refused(self):
        counts = {"equal": [], "refused": [], "wrong": []}
        todo = {}
        for folder, (exported, calls) in CALLS.items():
            known = set(calls) | set(NO_SENSE.get(folder, {}))
            self.assertEqual(sorted(set(exported) - known), [], f"{folder}: torch has these since; say how to call them")
            for name in sorted(set(exported) & set(calls)):
                for number, call in enumerate(calls[name]):
                    todo[f"{folder}.{name}.{number}"] = call
        with ThreadPoolExecutor(8) as pool:
            for keys in [list(todo)[begin:begin + 16] for begin in range(0, len(todo), 16)]:
                for key, made in zip(keys, pool.map(self.made, [key.replace("_", "-") for key in keys])):
                    try:
                        counts[self.outcome(todo[key], *made)].append(key)
                    except Exception as error:
                        counts["wrong"].append(f"{key}: {type(error).__name__} {str(error)[:300]}")
        print("calls %d, equal %d, refused %d, wrong %d" % (sum(map(len, counts.values())), *map(len, counts.values())))
        self.assertEqual(counts["wrong"], [])
        self.assertEqual(counts["refused"], [
            "optim.swap_in_optimizer_params_and_state.0", "optimizer.add_param_group.0", "lr_scheduler.CyclicLR.1",
            "lr_scheduler.OneCycleLR.1", "utils.vector_to_parameters.0"])

    def test_other_parameters_in_a_group(self):
        _, model, optimizer = self.made("group")
        self.addCleanup(optimizer.close)
        backward(model)
        optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(2)))
        with self.assertRaisesRegex(errors.FailedPrecondition, "group 0 has other parameters than those that the job trains"):
            optimizer.step()


if __name__ == "__main__":
    unittest.main()
