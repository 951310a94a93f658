#!/usr/bin/env python3
"""shardmesh.numerics.State: whose it is, copies of it, and pieces of a tensor; and what Step refuses by name."""
import copy
import pickle
import sys
import unittest

import numpy as np

from shardmesh import errors
from shardmesh.numerics import Step, encode


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape or (5, 130)).astype(np.float32)


def snapshot(state):
    return {stream: {part: array.copy() for part, array in parts.items()} for stream, parts in state.parts.items()}


class StateTest(unittest.TestCase):
    def refused(self, message, call, *arguments, kind=errors.InvalidArgument, **options):
        with self.assertRaises(kind) as caught:
            call(*arguments, **options)
        self.assertIn(message, str(caught.exception))

    def test_the_state_of_another_step_is_refused(self):
        steps = {
            "adam (exp_avg, exp_avg_sq) with weights fp32, states dyn8": Step("Adam", states="dyn8"),
            "adam (exp_avg, exp_avg_sq) with weights fp32, states fp8": Step("Adam", states="fp8"),
            "adam (exp_avg, exp_avg_sq) with weights fp32, states dyn8, compat torchao":
                Step("Adam", states="dyn8", compat="torchao"),
            "adam (exp_avg, exp_avg_sq) with weights bf16, states dyn8": Step("Adam", "bf16", "dyn8"),
            "adam (exp_avg, exp_avg_sq, max_exp_avg_sq) with weights fp32": Step("AMSGrad"),
            "adamw (exp_avg, exp_avg_sq) with weights fp32": Step("AdamW"),
            "lion (exp_avg) with weights fp32": Step("Lion"), "muon (momentum_buffer) with": Step("Muon"),
            "sgd (momentum_buffer) with": Step("SGD", momentum=0.5), "sgd (no moments) with": Step("SGD"),
        }
        for mine, step in steps.items():
            for other, maker in steps.items():
                state = maker.init(numbers(0, 8, 256))
                if maker is step:
                    self.assertTrue(step.apply(state, numbers(1, 8, 256), 1))
                    continue
                before = snapshot(state)
                self.refused(f"the state is of {other}", step.apply, state, numbers(1, 8, 256), 1)
                self.refused(f"the step is of {mine}", step.apply, state, numbers(1, 8, 256), 1)
                np.testing.assert_equal(snapshot(state), before)
        self.assertIn("adamw (exp_avg, exp_avg_sq)", repr(Step("AdamW").init(numbers(0))))
        faster = Step("AdamW", lr=1.0)  # hyper-parameters may change from step to step
        self.assertTrue(faster.apply(Step("AdamW").init(numbers(0)), numbers(1), 1))

    def test_copies_and_pickles_go_on_by_themselves(self):
        for weights in "fp32", "bf16+8sr", "int8_row":
            step = Step("AdamW", weights, "dyn4", seed=3)
            state = step.init(numbers(0))
            step.apply(state, numbers(1), 1)
            before = snapshot(state)
            others = [copy.deepcopy(state)]
            others += [pickle.loads(pickle.dumps(state, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
            for other in others:
                np.testing.assert_equal(snapshot(other), before)
                np.testing.assert_array_equal(other.weights, state.weights)
                self.assertTrue(step.apply(other, numbers(2), 2))
                np.testing.assert_equal(snapshot(state), before)
            step.apply(state, numbers(2), 2)
            for other in others:
                np.testing.assert_equal(snapshot(other), snapshot(state))
            self.refused("has no other", others[-1].parts["weights"].__setitem__, "other", numbers(0))


if __name__ == "__main__":
    sys.exit(unittest.main())
