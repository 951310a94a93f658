#!/usr/bin/env python3
"""shardmesh.numerics.Step: one optimizer step on arrays of any format."""
import sys
import unittest

import numpy as np

from shardmesh import _core, errors
from shardmesh.numerics import Step, encode

WEIGHTS = ["fp32", "bf16", "bf16_sr", "bf16+16", "bf16+8sr", "int8_row"]
STATES = ["fp32", "bf16_sr", "dyn8", "dyn4", "fp8", "fp8x32"]
OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}, "Adam": {"weight_decay": 0.1},
    "AdamW": {"maximize": True}, "AMSGrad": {}, "Lion": {"betas": (0.8, 0.95)},
}
SHAPE = (5, 130)


def numbers(seed, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(SHAPE) * scale).astype(np.float32)


def snapshot(state):
    return {stream: {part: array.copy() for part, array in parts.items()} for stream, parts in state.parts.items()}


class StepTest(unittest.TestCase):
    def assert_same(self, a, b):
        np.testing.assert_equal(a, b)

    def refused(self, message, call, *arguments, **options):
        with self.assertRaises(errors.InvalidArgument) as caught:
            call(*arguments, **options)
        self.assertIn(message, str(caught.exception))

    def test_muon_steps_a_matrix(self):
        start, gradients = numbers(1), [numbers(2), numbers(3)]
        states = [self.after(Step("Muon", lr=0.1, implementation=each), start, gradients) for each in ("reference", None)]
        self.assert_same(snapshot(states[0]), snapshot(states[1]))
        moved = states[0].weights - start * (1 - 0.1 * 0.1) ** 2
        # Two steps of an orthogonal matrix (singular values between 0.7 and 1.2) by lr sqrt(max(1, rows / columns)).
        self.assertLess(np.linalg.norm(moved, 2), 2 * 0.1 * 1.2)
        self.assertGreater(np.linalg.norm(moved, 2), 0.1 * 0.7)
        self.refused("muon steps matrices", Step("Muon").apply, Step("Muon").init(start[0]), gradients[0][0], 1)
        self.refused("ns_coefficients has 2 numbers", Step, "Muon", ns_coefficients=(1, 2))
        self.refused("adjust_lr_fn is 'other'", Step, "Muon", adjust_lr_fn="other")

    def test_muons_fast_mode_is_close_to_the_exact_one(self):
        self.refused("adamw has no fast mode", Step, "AdamW", fast=True)
        self.refused("so give None", Step, "Muon", fast=True, implementation="simd")
        try:
            fast = Step("Muon", lr=0.1, fast=True)
        except errors.FailedPrecondition as error:
            self.assertIn("libopenblas.so.0", str(error))
            self.skipTest(f"SKIPPED: {error}")
        start, gradients = numbers(1), [numbers(2)]
        exact, other = (self.after(step, start, gradients) for step in (Step("Muon", lr=0.1), fast))
        np.testing.assert_array_equal(exact.moments["momentum_buffer"], other.moments["momentum_buffer"])
        rows, columns = start.shape
        # Either update is within 1e-3 of float64 (kernels/muon/newton_schulz_test.cc), and rounded into weights once.
        bound = 0.1 * max(1, rows / columns) ** 0.5 * 2e-3 + 2 * 2.0**-24 * 1.01 * np.linalg.norm(exact.weights)
        self.assertLess(np.linalg.norm(exact.weights.astype(np.float64) - other.weights), bound)

    def after(self, step, start, gradients):
        state = step.init(start)
        for number, gradient in enumerate(gradients, 1):
            self.assertTrue(step.apply(state, gradient, number))
        return state

    def test_both_implementations_have_the_same_bits(self):
        for optimizer, hyper in OPTIMIZERS.items():
            for weights in WEIGHTS:
                for states in STATES:
                    results = []
                    for implementation in "reference", "simd", None:
                        step = Step(optimizer, weights, states, seed=3, implementation=implementation, **hyper)
                        state = step.init(numbers(0))
                        for number in 1, 2:
                            gradient = numbers(number, 0.1)
                            self.assertTrue(step.apply(state, gradient, number, tensor=2, first_element=256))
                        results.append(snapshot(state))
                    self.assert_same(results[0], results[1])
                    self.assert_same(results[0], results[2])
                    self.assertFalse(np.array_equal(state.weights, numbers(0)))

    def test_sgd_and_adamw_are_their_formulas(self):
        weights, gradient = numbers(0), numbers(1)
        sgd = Step("SGD", lr=0.5)
        state = sgd.init(weights)
        sgd.apply(state, gradient, 1)
        np.testing.assert_allclose(state.weights, weights - np.float32(0.5) * gradient, rtol=0, atol=1e-6)
        self.assertEqual(list(state.moments), [])
        adam = Step("AdamW", lr=0.01, weight_decay=0.0)
        state = adam.init(weights)
        adam.apply(state, gradient, 1)
        np.testing.assert_allclose(state.weights, weights - 0.01 * np.sign(gradient), rtol=0, atol=1e-6)
        np.testing.assert_allclose(state.moments["exp_avg"], 0.1 * gradient, rtol=1e-6)
        np.testing.assert_allclose(state.moments["exp_avg_sq"], 0.001 * gradient**2, rtol=1e-6)

    def test_no_step_writes_nf4(self):
        self.refused("no step writes nf4 weights: they are frozen", Step, "SGD", "nf4")

    def test_moments_have_torchs_names(self):
        names = {name: list(Step(name, **hyper).init(numbers(0)).moments) for name, hyper in OPTIMIZERS.items()}
        self.assertEqual(names, {
            "SGD": ["momentum_buffer"], "Adam": ["exp_avg", "exp_avg_sq"], "AdamW": ["exp_avg", "exp_avg_sq"],
            "AMSGrad": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"], "Lion": ["exp_avg"]})
        self.assertEqual(len(Step("AdamW", amsgrad=True).init(numbers(0)).moments), 3)

    def test_what_a_step_stores_is_what_encode_gives(self):
        place = {"seed": 5, "step": 1, "tensor": 2, "first_element": 512}
        for weights in WEIGHTS:
            step, plain = Step("SGD", weights, seed=5, lr=0.1), Step("SGD", lr=0.1)
            state = step.init(numbers(0), tensor=2)
            exact = plain.init(state.weights)
            for each, how in (step, state), (plain, exact):
                each.apply(how, numbers(1), 1, tensor=2, first_element=512)
            options = {"bf16_sr": place, "bf16+8sr": place, "int8_row": {**place, "stochastic": True}}.get(weights, {})
            self.assert_same(dict(state.parts["weights"]), encode(exact.weights, weights, **options))
        for states in STATES:
            step, plain = Step("AMSGrad", states=states, seed=5), Step("AMSGrad")
            state, exact = step.init(numbers(0)), plain.init(numbers(0))
            for each, how in (step, state), (plain, exact):
                each.apply(how, numbers(1), 1, tensor=2, first_element=512)
            for index, (name, values) in enumerate(exact.moments.items()):
                options = {"fp32": {}, "bf16_sr": {**place, "state": index}}.get(states, {"signed": index == 0})
                if states == "fp8x32":
                    options |= {**place, "stochastic": True}
                self.assert_same(dict(state.parts[name]), encode(values, states, **options))
                self.assertLess(np.abs(state.moments[name] - values).max(), 0.15 * np.abs(values).max())

    def test_torchaos_steps_begin_with_scales_of_0(self):
        for states in "fp32", "dyn8", "dyn4", "fp8":
            step = Step("AdamW", "bf16_sr", states, compat="torchao", weight_decay=0.1)
            state = step.init(np.zeros(1024, np.float32))
            self.assertTrue(all((array == 0).all() for stream in state.parts.values() for array in stream.values()))
            gradient = numbers(1).ravel()[:512].repeat(2)
            step.apply(state, gradient, 1)
            self.assertLess(np.abs(state.weights + 1e-3 * np.sign(gradient)).max(), 1e-5)
            exact = encode(gradient * np.float32(0.1), states, **({} if states == "fp32" else {"compat": "torchao"}))
            np.testing.assert_allclose(state.parts["exp_avg"][list(exact)[-1]], exact[list(exact)[-1]], rtol=1e-6)
        self.refused("whole blocks of 256", step.apply, step.init(np.zeros(100, np.float32)), gradient[:100], 1)
        state.parts["exp_avg"]["scales"][0] = -1
        self.refused("exp_avg: scale 0 is -1", step.apply, state, gradient, 2)
        lion = Step("Lion", compat="torchao")
        self.refused("torchao has no lion", lion.apply, lion.init(gradient), gradient, 1)
        self.refused("has one", Step, "Adam", compat="torchao", implementation="simd")

    def test_slots_are_added_divided_and_clipped(self):
        one, two, three = numbers(1), numbers(2), numbers(3)
        for gradients, options, same in [
            ([one, one], {}, one), ([one, one], {"divide": 4.0}, one / 2), (one, {"clip": 0.5}, one / 2),
            ([one, two, three], {"divide": 1}, (one + two) + three),
        ]:
            states = []
            for given, how in (gradients, options), (same, {}):
                step = Step("Adam", states="dyn8")
                states.append(step.init(numbers(0)))
                step.apply(states[-1], given, 1, **how)
            self.assert_same(snapshot(states[0]), snapshot(states[1]))

    def test_bf16_gradients_are_their_values(self):
        codes = encode(numbers(1), "bf16")["codes"]
        states = []
        for gradient in codes, (codes.astype(np.uint32) << 16).view(np.float32):
            step = Step("AdamW")
            states.append(step.init(numbers(0)))
            step.apply(states[-1], gradient, 1)
        self.assert_same(snapshot(states[0]), snapshot(states[1]))

    def test_initial_weights_are_rounded_to_nearest(self):
        self.assert_same(dict(Step("SGD", "bf16_sr").init(numbers(0)).parts["weights"]), encode(numbers(0), "bf16"))
        self.assert_same(Step("SGD", "bf16+16").init(numbers(0)).weights, numbers(0))

    def test_parts_are_set_and_changed_in_place(self):
        step, other = Step("Adam", "bf16", "dyn8"), Step("Adam", "bf16", "dyn8")
        state, copied = step.init(numbers(0)), other.init(numbers(7))
        for number in 1, 2:
            step.apply(state, numbers(number), number)
        for stream, parts in state.parts.items():
            for part, array in parts.items():
                copied.parts[stream][part] = array.copy()
        for each in state, copied:
            step.apply(each, numbers(3), 3)
        self.assert_same(snapshot(state), snapshot(copied))
        mine = np.full(3, 2.0, np.float32)
        state.parts["exp_avg"]["scales"] = mine
        step.apply(state, numbers(4), 4)
        self.assertTrue((mine != 2).all(), "the step writes the array that was set")
        state.parts["weights"]["codes"][0, 0] = 0x3F80
        self.assertEqual(state.weights[0, 0], 1.0)

    def test_wrong_parts_are_refused(self):
        state = Step("Adam", "bf16", "dyn8").init(numbers(0))
        codes = state.parts["exp_avg"]["codes"]
        frozen = codes.copy()
        frozen.flags.writeable = False
        for message, part, array in [
            ("exp_avg has no remainder; dyn8 has codes, scales", "remainder", codes),
            ("codes is of int8; it must be of uint8", "codes", codes.view(np.int8)),
            ("codes has the shape (4, 130)", "codes", codes[:4]), ("codes is read-only", "codes", frozen),
            ("codes is not contiguous", "codes", np.zeros((130, 5), np.uint8).T),
        ]:
            self.refused(message, state.parts["exp_avg"].__setitem__, part, array)
        self.refused("cannot be deleted", state.parts["exp_avg"].__delitem__, "codes")
        with self.assertRaises(TypeError):
            state.parts["exp_avg"] = {}

    def test_streams_that_share_memory_are_refused(self):
        step = Step("Adam")
        state = step.init(numbers(0))
        state.parts["exp_avg"]["codes"] = state.parts["exp_avg_sq"]["codes"]
        self.refused("overlap", step.apply, state, numbers(1), 1)

    def test_gradients_that_are_not_finite_change_nothing(self):
        for states in STATES:
            step = Step("AMSGrad", "bf16_sr", states)
            state = step.init(numbers(0))
            step.apply(state, numbers(1), 1)
            before = snapshot(state)
            for bad in np.nan, np.inf, -np.inf, np.float32(3e38):
                gradient = numbers(2)
                gradient[4, 129] = bad
                self.refused("gradient 1: element 649 is ", step.apply, state, [numbers(1), gradient], 2)
                self.assertIs(step.apply(state, [numbers(1), gradient], 2, nonfinite="skip"), False)
                self.assert_same(snapshot(state), before)

    def test_stored_scales_that_are_not_positive_change_nothing(self):
        for states in "dyn8", "dyn4", "fp8", "fp8x32":
            step = Step("AdamW", states=states)
            for bad in np.nan, np.inf, -1.0, 0.0:
                state = step.init(numbers(0))
                scale = encode(np.array([bad], np.float32), "bf16")["codes"][0] if states == "fp8x32" else bad  # bf16
                state.parts["exp_avg_sq"]["scales"][-1] = scale
                before = snapshot(state)
                for policy in "fail", "skip":
                    self.refused("exp_avg_sq: scale ", step.apply, state, numbers(1), 1, nonfinite=policy)
                self.assert_same(snapshot(state), before)

    def test_wrong_arguments_are_refused(self):
        step = Step("AdamW")
        state = step.init(numbers(0))
        before = snapshot(state)
        good = numbers(1)
        for message, arguments, options in [
            ("the first step is 1", (good, 0), {}), ("multiple of 256", (good, 1), {"first_element": 1}),
            ("clip is nan", (good, 1), {"clip": np.nan}), ("above 0", (good, 1), {"divide": -1}),
            ("nonfinite is 'ignore'", (good, 1), {"nonfinite": "ignore"}), ("at least one", ([], 1), {}),
            ("gradient 0 has the shape (650,)", (good.ravel(), 1), {}), ("tensor is -1", (good, 1), {"tensor": -1}),
            ("gradient 0 is of float64", (good.astype(float), 1), {}),
            ("gradient 1 is of uint16", ([good, encode(good, "bf16")["codes"]], 1), {}),
            ("overlap", (state.parts["weights"]["codes"], 1), {}),
        ]:
            self.refused(message, step.apply, state, *arguments, **options)
            self.assert_same(snapshot(state), before)
        for message, arguments, options in [
            ("optimizer \"rmsprop\" is none", ("RMSprop",), {}), ("no format of weights", ("SGD", "fp9"), {}),
            ("no format of states", ("SGD", "fp32", "int8"), {}), ("seed is -1", ("SGD",), {"seed": -1}),
            ("sgd has no hyper-parameter betas", ("SGD",), {"betas": (0.9, 0.99)}),
            ("betas has 3 numbers", ("Adam",), {"betas": (0.9, 0.99, 1)}), ("lr is -1", ("SGD",), {"lr": -1}),
            ("beta1", ("Adam",), {"betas": (1.5, 0.9)}), ("compat is 'apex'", ("Adam",), {"compat": "apex"}),
            ("it is reference or simd", ("Adam",), {"implementation": "cuda"}),
        ]:
            self.refused(message, Step, *arguments, **options)

    def test_the_whole_of_a_tensor_is_its_pieces(self):
        """Blocks and draws count from the tensor's start."""
        weights, gradient = numbers(0).ravel(), numbers(1).ravel()
        step = Step("Adam", "bf16_sr", "dyn8", seed=9)
        whole = step.init(weights)
        step.apply(whole, gradient, 1)
        for begin, end in (0, 512), (512, 650):
            piece = step.init(weights[begin:end])
            step.apply(piece, gradient[begin:end], 1, first_element=begin)
            np.testing.assert_array_equal(piece.weights, whole.weights[begin:end])
            np.testing.assert_array_equal(piece.moments["exp_avg"], whole.moments["exp_avg"][begin:end])

    def test_empty_tensors_are_stepped(self):
        for shape in (0,), (3, 0):
            step = Step("AdamW", "bf16", "dyn4")
            state = step.init(np.zeros(shape, np.float32))
            self.assertTrue(step.apply(state, np.zeros(shape, np.float32), 1))
            self.assertEqual(state.weights.shape, shape)

    def test_objects_that_were_not_constructed_are_refused(self):
        with self.assertRaises(TypeError):
            _core.OptimizerStep.__new__(_core.OptimizerStep).states


if __name__ == "__main__":
    sys.exit(unittest.main())
