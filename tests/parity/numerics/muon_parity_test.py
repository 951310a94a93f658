#!/usr/bin/env python3
"""One Muon step from torch's own state, beside torch.optim.Muon and beside the formula in float64.

torch iterates in bf16, shardmesh in fp32. So the momentum buffer, which both keep in fp32, has the same bits; and the
step is compared with the formula in float64, from which torch's is away by its own rounding.
"""
import sys
import unittest

import numpy as np
import torch

from shardmesh.numerics import Step

HYPER = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
SHAPES = (64, 64), (48, 96), (96, 48), (33, 65)
STEPS = 3
A, B, C = 3.4445, -4.7750, 2.0315


def in_float64(weights, buffer, gradient, adjust):
    """torch.optim.Muon's formula; the buffer has been moved on."""
    update = gradient + HYPER["momentum"] * (buffer - gradient)
    x = update / max(np.linalg.norm(update), 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    x = x.T if tall else x
    rows, columns = weights.shape
    scale = 0.2 * np.sqrt(max(rows, columns)) if adjust else np.sqrt(max(1, rows / columns))
    return weights * (1 - HYPER["lr"] * HYPER["weight_decay"]) - HYPER["lr"] * scale * x


class MuonParityTest(unittest.TestCase):
    def test_a_step_from_torchs_state(self):
        random = np.random.default_rng(11)
        for shape in SHAPES:
            for adjust in None, "match_rms_adamw":
                with self.subTest(shape=shape, adjust=adjust):
                    self.steps(shape, adjust, random)

    def steps(self, shape, adjust, random):
        weights = torch.nn.Parameter(torch.tensor(random.standard_normal(shape), dtype=torch.float32))
        theirs = torch.optim.Muon([weights], adjust_lr_fn=adjust, **HYPER)
        ours = Step("Muon", adjust_lr_fn=adjust, **HYPER)
        for step in range(1, STEPS + 1):
            state = ours.init(weights.detach())
            if step > 1:
                state.parts["momentum_buffer"]["codes"] = theirs.state[weights]["momentum_buffer"].numpy().copy()
            before = weights.detach().numpy().astype(np.float64)
            weights.grad = torch.tensor(random.standard_normal(shape), dtype=torch.float32)
            theirs.step()
            self.assertTrue(ours.apply(state, weights.grad, step))
            buffer = theirs.state[weights]["momentum_buffer"].numpy()
            np.testing.assert_array_equal(state.moments["momentum_buffer"], buffer)
            exact = in_float64(before, buffer.astype(np.float64), weights.grad.numpy().astype(np.float64), adjust)
            moved = np.linalg.norm(exact - before)
            our_error = np.linalg.norm(state.weights - exact) / moved
            their_error = np.linalg.norm(weights.detach().numpy() - exact) / moved
            # An iteration multiplies an error by at most a + 3|b| + 5c = 28 where singular values reach 1, and by 4.3
            # on the way there; a fused product of k terms rounds by k / 2 units at most. What is left after five is
            # bounded by 96 * 4.3^5 * 2^-24 = 0.0084 of the whole; a step that is right lies far below.
            self.assertLess(our_error, 0.0084)
            self.assertLess(our_error, their_error, "fp32 is nearer than bf16")


if __name__ == "__main__":
    sys.exit(unittest.main())
