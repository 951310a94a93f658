#!/usr/bin/env python3
"""Step beside torch.optim in fp32, and Lion, which torch does not have, beside its formula in float64: 100 steps on
recorded gradients, within a bound that is derived for every element.

Both compute one formula in fp32, with scalars that are computed in double and rounded, but in other orders of
operations. A rounding to nearest changes a number x by at most u |x|, u = 2^-24 (half a unit in the last place). So
after an operation the two differ by no more than what their arguments differed, passed through the operation, and
u |result| for each rounding of either.
`Bounds` carries that along for every element, in double (a running error analysis: Higham, "Accuracy and stability of
numerical algorithms", 2002, section 3.3). The roundings, each as a dot behind its result:

              torch 2.13 (_single_tensor_*)        shardmesh (kernels/rules/optimizers.h)   u times, both together
  gradient    (g + (c. w).).                       fma(c., w, g).                           3 c w, 2 g'
  buffer      ((mu. b). + ((1-tau). g).).          fma(mu., b, ((1-tau). g).).              3 mu b, 4 (1-tau) g, 2 b'
  Nesterov    (g + (mu. b').).                     fma(mu., b', g).                         3 mu b', 2 n
  m           (m + (w1. (g - m).).).               fma(b1., m, (w1. g).).                   w1 (3 (g-m) + 2g), b1 m, 2m'
  v           ((b2. v). + ((w2. g). g).).          fma(b2., v, ((w2. g). g).).              3 b2 v, 6 w2 g g, 2 v'
  d           ((sqrt(v'). / r.). + eps.).          fma(sqrt(v')., (1/r)., eps.).            5 sqrt(v')/r, 2 eps, 2 d
  w           ((D. w). - ((s. m'). / d).).         fma(s., (m' / d)., (D. w).).             4 D w, 5 s m'/d, 2 w'
  w of SGD    (w - (lr. n).).                      fma(lr., n, w).                          3 lr n, 2 w'
with c the coupled decay, D = 1 - lr decay the other, w1 = 1 - b1, w2 = 1 - b2, r = sqrt(1 - b2^t), s = lr / (1 - b1^t).
"""
import sys
import unittest

import numpy as np
import torch

from shardmesh.numerics import Step

U = 2.0**-24
STEPS = 100
SLACK = 1 + 2.0**-20  # for the products of roundings: an operation has fewer than 12 of them, and 12 u < 2^-20
LR = 1e-2
CASES = {  # optimizer and hyper-parameters, as shardmesh and as torch have them
    "SGD": ("SGD", {}, torch.optim.SGD),
    "SGD, momentum": ("SGD", {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}, torch.optim.SGD),
    "SGD, Nesterov": ("SGD", {"momentum": 0.8, "nesterov": True, "maximize": True}, torch.optim.SGD),
    "Adam": ("Adam", {}, torch.optim.Adam),
    "Adam, decay": ("Adam", {"weight_decay": 0.01, "betas": (0.85, 0.98)}, torch.optim.Adam),
    "AdamW": ("AdamW", {"eps": 1e-6}, torch.optim.AdamW),
    "AdamW, maximize": ("AdamW", {"weight_decay": 0.1, "maximize": True}, torch.optim.AdamW),
    "AMSGrad": ("AMSGrad", {"amsgrad": True}, torch.optim.Adam),
}


def lion(w, m, g, lr, betas, weight_decay):
    """One step of Lion in float64 (Chen et al., "Symbolic discovery of optimization algorithms", 2023, algorithm 2).

    New weights, new momentum, and the direction whose sign was taken.
    """
    beta1, beta2 = betas
    direction = beta1 * m + (1 - beta1) * g
    return w - lr * (np.sign(direction) + weight_decay * w), beta2 * m + (1 - beta2) * g, direction


def recorded():
    """The first layer's weights, and its gradients over 100 steps of training a small network on random images.

    Some pixels are always 0: so are their weights and gradients, and an update is 0 / (0 + eps).
    """
    torch.manual_seed(4)
    layer = torch.nn.Linear(64, 96)
    model = torch.nn.Sequential(layer, torch.nn.ReLU(), torch.nn.Linear(96, 10))
    alive = torch.rand(64) < 0.9
    images, labels = torch.randn(256, 64) * alive, torch.randint(0, 10, (256,))
    with torch.no_grad():
        layer.weight *= alive
    start, gradients = layer.weight.detach().clone(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        batch = torch.arange(32) + 32 * (number % 8)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        gradients.append(layer.weight.grad.clone())
        optimizer.step()
    return start, gradients


class Bounds:
    """How far the two may lie apart: of the weights, and of each state. Told the numbers that we have, step by step."""

    def __init__(self, shape, hyper):
        self.hyper = hyper
        self.weights = np.zeros(shape)
        self.states = {}

    def add(self, name, factor, passed_on, rounded):
        """The bound of a state: factor times what it was, and what came with the new values and by rounding them."""
        before = self.states.get(name, np.zeros_like(self.weights))
        self.states[name] = SLACK * (factor * before + passed_on + U * rounded)
        return self.states[name]

    def gradient(self, g, w, coupled):
        """The gradient with its share of the weight decay, and its bound."""
        g = -g if self.hyper["maximize"] else g
        c = self.hyper["weight_decay"] if coupled else 0
        if c == 0:
            return g, np.zeros_like(g)
        total = g + c * w
        return total, c * self.weights + U * (3 * c * np.abs(w) + 2 * np.abs(total))

    def sgd(self, number, g, w, before, after):
        lr, mu, tau = (self.hyper[name] for name in ("lr", "momentum", "dampening"))
        direction, bound = self.gradient(g, w, coupled=True)
        if mu:
            share = 1 if number == 1 else 1 - tau
            b, new = before["momentum_buffer"], after["momentum_buffer"]
            rounded = 3 * mu * np.abs(b) + 4 * share * np.abs(direction) + 2 * np.abs(new)
            of_buffer = self.add("momentum_buffer", mu, share * bound, rounded)
            if self.hyper["nesterov"]:
                direction = direction + mu * new
                bound = bound + mu * of_buffer + U * (3 * mu * np.abs(new) + 2 * np.abs(direction))
            else:
                direction, bound = new, of_buffer
        self.move(w, 1, lr * direction, lr * bound + U * 3 * lr * np.abs(direction))

    def adam(self, number, g, w, before, after, decoupled):
        (beta1, beta2), eps = self.hyper["betas"], self.hyper["eps"]
        g, bound = self.gradient(g, w, coupled=not decoupled)
        m, new_m = before["exp_avg"], after["exp_avg"]
        rounded = (1 - beta1) * (3 * np.abs(g - m) + 2 * np.abs(g)) + beta1 * np.abs(m) + 2 * np.abs(new_m)
        of_m = self.add("exp_avg", beta1, (1 - beta1) * bound, rounded)
        v, new_v = before["exp_avg_sq"], after["exp_avg_sq"]
        rounded = 3 * beta2 * v + (1 - beta2) * 6 * g**2 + 2 * new_v
        of_v = self.add("exp_avg_sq", beta2, (1 - beta2) * (2 * np.abs(g) * bound + bound**2), rounded)
        if self.hyper["amsgrad"]:  # a maximum of two differs by no more than they do, and is not rounded
            new_v = after["max_exp_avg_sq"]
            of_v = self.states["max_exp_avg_sq"] = np.maximum(self.states.get("max_exp_avg_sq", 0), of_v)
        root = np.sqrt(new_v) / np.sqrt(1 - beta2**number)
        of_root = root - np.sqrt(np.maximum(new_v - of_v, 0)) / np.sqrt(1 - beta2**number)
        d = root + eps
        of_d = SLACK * (of_root + U * (5 * root + 2 * eps + 2 * d))
        # x / d - x' / d' = (x - x') / d' + (x / d) (d' - d) / d', and d' is at least d - of_d.
        step = self.hyper["lr"] / (1 - beta1**number)
        update = step * new_m / d
        of_update = (step * of_m + np.abs(update) * of_d) / (d - of_d) + U * 5 * np.abs(update)
        decay = 1 - self.hyper["lr"] * self.hyper["weight_decay"] if decoupled else 1
        self.move(w, decay, update, of_update)

    def lion(self, g, w, m, new_m, direction):
        """Against float64, where nothing rounds: each of our roundings is u |result| alone.

              c = fma(b1., m, (w1. g).).      m' = fma(b2., m, (w2. g).).      w' = fma(-lr., sign c, (D. w).).
        Signs are the same where the direction lies farther from 0 than its bound; elsewhere they may be opposite.
        Returns how many elements those are.
        """
        (beta1, beta2), lr = self.hyper["betas"], self.hyper["lr"]
        of_m = self.states.get("exp_avg", np.zeros_like(w))
        rounded = beta1 * np.abs(m) + 2 * (1 - beta1) * np.abs(g) + np.abs(direction)
        of_direction = SLACK * (beta1 * of_m + U * rounded)
        self.add("exp_avg", beta2, 0, beta2 * np.abs(m) + 2 * (1 - beta2) * np.abs(g) + np.abs(new_m))
        unsure = (np.abs(direction) <= of_direction) & (of_direction > 0)
        decay = 1 - lr * self.hyper["weight_decay"]
        rounded = 2 * decay * np.abs(w) + lr + np.abs(w) + lr
        self.weights = SLACK * (decay * self.weights + np.where(unsure, 2 * lr, 0) + U * rounded)
        return int(unsure.sum())

    def move(self, w, decay, update, of_update):
        rounded = (4 * decay * np.abs(w) if decay != 1 else 0) + 2 * np.abs(decay * w - update)
        self.weights = SLACK * (decay * self.weights + of_update + U * rounded)


def as_double(state):
    return state.weights.astype(np.float64), {name: x.astype(np.float64) for name, x in state.moments.items()}


class StepParityTest(unittest.TestCase):
    def check(self, what, ours, theirs, bound):
        """The largest difference as a part of its bound, which it must not be above."""
        difference = np.abs(ours.astype(np.float64) - theirs.double().numpy())
        np.testing.assert_array_less(difference, bound + 1e-300, what)
        return float((difference / (bound + 1e-300)).max())

    def run_case(self, name, start, gradients):
        optimizer, given, torchs = CASES[name]
        weight = torch.nn.Parameter(start.clone())
        rival = torchs([weight], lr=LR, foreach=False, **given)
        step = Step(optimizer, lr=LR, **given)
        state = step.init(start)
        bounds, largest = Bounds(start.shape, rival.param_groups[0]), 0.0
        for number, gradient in enumerate(gradients, 1):
            w, before = as_double(state)
            weight.grad = gradient.clone()
            rival.step()
            self.assertTrue(step.apply(state, gradient, number))
            after = as_double(state)[1]
            if optimizer == "SGD":
                bounds.sgd(number, gradient.double().numpy(), w, before, after)
            else:
                bounds.adam(number, gradient.double().numpy(), w, before, after, decoupled=optimizer == "AdamW")
            largest = max(largest, self.check((name, number), state.weights, weight.detach(), bounds.weights))
            for moment, values in state.moments.items():
                self.check((name, number, moment), values, rival.state[weight][moment], bounds.states[moment])
        moved = np.abs(state.weights - start.numpy())
        apart = np.abs(state.weights.astype(np.float64) - weight.detach().double().numpy())
        print(f"  {name:16} moved by {moved.max():.1e}, apart by {apart.max():.1e}, bound {bounds.weights.max():.1e}"
              f" (median {np.median(bounds.weights):.1e}), largest part of a bound {largest:.2f}")
        self.assertLess(bounds.weights.max(), 1e-2 * moved.max(), "the bound should say something")

    def test_100_steps_are_torchs(self):
        print("\n100 steps beside torch.optim:")
        start, gradients = recorded()
        for name in CASES:
            with self.subTest(name):
                self.run_case(name, start, gradients)

    def test_100_steps_of_lion_are_its_formula(self):
        hyper = {"lr": 1e-3, "betas": (0.85, 0.98), "weight_decay": 0.1}
        start, gradients = recorded()
        step = Step("Lion", **hyper)
        state = step.init(start)
        bounds, unsure = Bounds(start.shape, hyper), 0
        weights, momentum = start.double().numpy(), np.zeros(start.shape)
        for number, gradient in enumerate(gradients, 1):
            w, m, g = weights, momentum, gradient.double().numpy()
            weights, momentum, direction = lion(w, m, g, **hyper)
            self.assertTrue(step.apply(state, gradient, number))
            unsure += bounds.lion(g, w, m, momentum, direction)
            self.check(("Lion", number), state.weights, torch.from_numpy(weights), bounds.weights)
            self.check(("Lion", number, "exp_avg"), state.moments["exp_avg"], torch.from_numpy(momentum),
                       bounds.states["exp_avg"])
        moved = np.abs(weights - start.numpy()).max()
        print(f"\n  Lion moved by {moved:.1e}, apart by {np.abs(state.weights - weights).max():.1e}, bound (median)"
              f" {np.median(bounds.weights):.1e}; {unsure} of {STEPS * start.numel()} signs are not sure")
        self.assertLess(np.median(bounds.weights), 1e-3 * moved, "the bound should say something")
        self.assertLess(unsure, 1e-4 * STEPS * start.numel())


if __name__ == "__main__":
    sys.exit(unittest.main())
