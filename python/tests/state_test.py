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

    def test_pieces_begin_and_go_on_as_the_whole(self):
        weights, gradient = numbers(0, 6, 256).ravel() * np.float32(1.001), numbers(1, 6, 256).ravel()
        for format in "fp32", "bf16", "bf16_sr", "bf16+16", "bf16+8sr", "int8_row":
            shape = (6, 256) if format == "int8_row" else (6 * 256,)
            step = Step("AdamW", format, "dyn8", seed=5)
            whole = step.init(weights.reshape(shape), tensor=4)
            started = snapshot(whole)
            step.apply(whole, gradient.reshape(shape), 1, tensor=4)
            for begin, end in (0, 2), (2, 5), (5, 6):
                rows, elements = slice(begin, end), slice(begin * 256, end * 256)
                own = (end - begin, 256) if format == "int8_row" else (-1,)
                place = {"tensor": 4, "first_element": begin * 256}
                piece = step.init(weights[elements].reshape(own), **place)
                blocks = {"scales": rows} if format == "int8_row" else {}
                for when in started, snapshot(whole):
                    for part, array in piece.parts["weights"].items():
                        want = when["weights"][part]
                        want = want[blocks[part]] if part in blocks else want.ravel()[elements]
                        np.testing.assert_array_equal(array.ravel(), want, (format, begin, part))
                    if when is started:
                        step.apply(piece, gradient[elements].reshape(own), 1, **place)

    def test_places_are_checked(self):
        step, last = Step("SGD", "bf16+8sr"), 2**64 - 256
        state = step.init(numbers(0, 256), first_element=last)
        self.assertTrue(step.apply(state, numbers(1, 256), 1, first_element=last))
        encode(numbers(0, 256), "bf16_sr", first_element=last)
        longer = numbers(0, 257)
        for call in (step.init, longer), (step.apply, step.init(longer), longer, 1), (encode, longer, "bf16_sr"):
            self.refused(f"first_element is {last}, with 257 elements", *call, first_element=last)
            self.refused("first_element is -256", *call, first_element=-256)
            self.refused("first_element is an integer of 1001 bits", *call, first_element=2**1000)
            self.refused("multiple of 256", *call, first_element=1)
            self.refused("first_element is 1.5", *call, first_element=1.5, kind=TypeError)

    def test_nothing_is_done_with_nothing(self):
        for weights in "fp32", "bf16+8sr", "int8_row":
            for shape in (0,), (3, 0), (0, 3), (0, 0):
                for optimizer in "SGD", "AMSGrad", "Lion", "Muon":
                    if optimizer == "Muon" and (len(shape) != 2 or weights == "int8_row"):
                        continue
                    step, nothing = Step(optimizer, weights, "dyn8"), np.zeros(shape, np.float32)
                    state = step.init(nothing)
                    before = snapshot(state)
                    self.assertTrue(step.apply(state, [nothing, nothing], 1))
                    np.testing.assert_equal(snapshot(state), before)
                    self.assertEqual(state.weights.shape, shape)
                    self.refused("clip is nan", step.apply, state, nothing, 1, clip=np.nan)
        step = Step("AdamW", "bf16_sr", "dyn8", compat="torchao")
        self.assertTrue(step.apply(step.init(numbers(0, 0)), numbers(0, 0), 1))

    def test_numbers_of_muon_are_checked_at_once(self):
        for name, values in {
            "ns_steps": (2.5, 5.0, "5", np.nan, -1, 100, 2**70), "eps": (0, -1, np.nan, 1e7, 1e-39),
            "ns_coefficients": ((1, 2, np.inf), (np.nan, 1, 2), (1, 1e39, 1), (1, 2)), "momentum": (1.5, -0.1, np.nan),
        }.items():
            for value in values:
                self.refused(name, Step, "Muon", **{name: value})
        self.refused("ns_steps is 100; it must lie in [0, 99]", Step, "Muon", ns_steps=100)
        Step("Muon", ns_steps=np.int64(99), ns_coefficients=np.ones(3), eps=1e-7)

    def test_values_of_another_type_are_named(self):
        for message, arguments, options in [
            ("adam: betas is 0.9; it is 2 numbers", ("Adam",), {"betas": 0.9}),
            ("adam: betas is '12'; it is 2 numbers", ("Adam",), {"betas": "12"}),
            ("adam: betas is 'x'; it is a number", ("Adam",), {"betas": (0.9, "x")}),
            ("sgd: lr is 'x'; it is a number", ("SGD",), {"lr": "x"}),
            ("sgd: lr is '0.1'; it is a number", ("SGD",), {"lr": "0.1"}),
            ("sgd: lr is None; it is a number", ("SGD",), {"lr": None}),
            ("optimizer is None; it is a string", (None,), {}), ("weights is 1; it is a string", ("SGD", 1), {}),
            ("states is None; it is a string", ("SGD", "fp32", None), {}),
            ("seed is 1.5; it is an integer", ("SGD",), {"seed": 1.5}),
            ("implementation is 1; it is a string", ("SGD",), {"implementation": 1}),
        ]:
            self.refused(message, Step, *arguments, kind=TypeError, **options)
        step, good = Step("AdamW"), numbers(1)
        state = step.init(numbers(0))
        before = snapshot(state)
        for message, wrong in [
            ("step is 1.5; it is an integer", {"step": 1.5}), ("tensor is 'x'", {"tensor": "x"}),
            ("clip is 'x'", {"clip": "x"}), ("divide is (1,)", {"divide": (1,)}), ("state is {}", {"state": {}}),
        ]:
            self.refused(message, step.apply, kind=TypeError, **{"state": state, "gradient": good, "step": 1, **wrong})
        np.testing.assert_equal(snapshot(state), before)
        self.refused("tensor is 1.5", Step("SGD", "bf16+8sr").init, good, tensor=1.5, kind=TypeError)
        self.refused("format is None", encode, good, None, kind=TypeError)
        self.refused("state is 'x'", encode, good, "bf16_sr", state="x", kind=TypeError)
        self.refused("lr is inf", Step, "SGD", lr=10**400)
        self.refused("AMSGrad: amsgrad is False", Step, "AMSGrad", amsgrad=False)
        self.assertEqual(len(Step("AMSGrad", amsgrad=True).init(good).moments), 3)

    def test_the_fast_mode_names_its_library(self):
        self.assertIsNone(Step("Muon").blas)
        self.assertNotIn("fast", repr(Step("Muon")))
        try:
            fast = Step("Muon", fast=True)
        except errors.FailedPrecondition as error:
            self.skipTest(f"SKIPPED: {error}")
        self.assertIn(fast.blas, ("libopenblas.so.0", "libmkl_rt.so", "libblas.so.3"))
        self.assertIn(f"fast, by {fast.blas}", repr(fast))


if __name__ == "__main__":
    sys.exit(unittest.main())
