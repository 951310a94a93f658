#!/usr/bin/env python3
"""shardmesh.numerics.encode and decode: what Python adds to kernels/encode/encode.h, and a few values of each format."""
import subprocess
import sys
import unittest

import numpy as np

import shardmesh
from shardmesh import errors, numerics
from shardmesh.numerics import decode, encode

# Format: NumPy's types and shapes of its parts, of an array of 130 x 160.
PARTS = {
    "fp32": {"codes": ("float32", (130, 160))},
    "bf16": {"codes": ("uint16", (130, 160))},
    "bf16_sr": {"codes": ("uint16", (130, 160))},
    "bf16+16": {"codes": ("uint16", (130, 160)), "remainder": ("int16", (130, 160))},
    "bf16+8sr": {"codes": ("uint16", (130, 160)), "remainder": ("int8", (130, 160))},
    "int8_row": {"codes": ("int8", (130, 160)), "scales": ("float32", (130,))},
    "nf4": {"codes": ("uint8", (10400,)), "scales": ("int8", (325,)), "factors": ("float32", (2,)),
            "mean": ("float32", ())},
    "dyn8": {"codes": ("uint8", (130, 160)), "scales": ("float32", (82,))},
    "dyn4": {"codes": ("uint8", (10400,)), "scales": ("float32", (163,))},
    "fp8": {"codes": ("uint8", (130, 160)), "scales": ("float32", (82,))},
    "fp8x32": {"codes": ("uint8", (130, 160)), "scales": ("uint16", (650,))},
    "fp8_tensor": {"codes": ("uint8", (130, 160)), "scales": ("float32", ())},
    "fp8_row": {"codes": ("uint8", (130, 160)), "scales": ("float32", (130, 1))},
    "fp8_block": {"codes": ("uint8", (130, 160)), "scales": ("float32", (2, 2))},
    "mx8": {"codes": ("uint8", (130, 160)), "scales": ("uint8", (130, 5))},
}


def numbers(*shape):
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


class NumericsTest(unittest.TestCase):
    def refused(self, message, call, *arguments, **options):
        with self.assertRaises(errors.InvalidArgument) as caught:
            call(*arguments, **options)
        self.assertIn(message, str(caught.exception))

    def test_parts_have_their_types_and_shapes(self):
        array = numbers(130, 160)
        for format, expected in PARTS.items():
            parts = encode(array, format)
            self.assertEqual({name: (str(part.dtype), part.shape) for name, part in parts.items()}, expected, format)
            decoded = decode(parts, format, array.shape)
            self.assertEqual((decoded.dtype, decoded.shape), (np.float32, array.shape))
            error = np.linalg.norm(decoded - array) / np.linalg.norm(array)
            self.assertLess(error, 0.16 if format in ("nf4", "dyn4") else 0.04, format)

    def test_any_number_of_dimensions(self):
        for shape in (), (0,), (1,), (3, 0), (64,), (2, 3, 32):
            for format in PARTS:
                if format == "fp8_block" and len(shape) != 2 or format == "mx8" and shape in ((), (1,)):
                    continue
                array = np.ones(shape, np.float32)
                np.testing.assert_allclose(decode(encode(array, format), format, shape), array, rtol=0.02)

    def test_bf16_codes_are_its_upper_bits(self):
        codes = np.arange(65536, dtype=np.uint16).reshape(256, 256)
        back = encode(codes, "bf16")["codes"]
        number = (codes & 0x7FFF) <= 0x7F80
        np.testing.assert_array_equal(back[number], codes[number])
        self.assertTrue((back[~number] == 0x7FC0).all())

    def test_exact_formats_give_back_every_bit(self):
        bits = np.random.default_rng(1).integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
        array = bits.view(np.float32)
        array = array[~np.isnan(array)]
        for format in "fp32", "bf16+16":
            decoded = decode(encode(array, format), format, array.shape)
            np.testing.assert_array_equal(decoded.view(np.uint32), array.view(np.uint32))

    def test_draws_are_those_of_the_place(self):
        array = numbers(4096)
        base = encode(array, "bf16_sr")["codes"]
        np.testing.assert_array_equal(encode(array, "bf16_sr", seed=0, step=1, tensor=0)["codes"], base)
        np.testing.assert_array_equal(encode(array[1024:], "bf16_sr", first_element=1024)["codes"], base[1024:])
        places = {"seed": 2**64 - 1}, {"step": 2}, {"tensor": 1}, {"first_element": 256}, {"state": 0}, {"state": 2}
        for place in places:
            other = encode(array, "bf16_sr", **place)["codes"]
            self.assertFalse(np.array_equal(other, base), place)
            self.assertLessEqual(np.abs(other.astype(int) - base).max(), 1)
        self.assertFalse(np.array_equal(encode(array, "int8_row")["codes"],
                                        encode(array, "int8_row", stochastic=True)["codes"]))

    def test_options_choose(self):
        array = np.abs(numbers(256)) + np.float32(0.01)
        for format in "dyn8", "dyn4", "fp8x32":
            first, second = (encode(array, format, signed=signed)["codes"] for signed in (True, False))
            self.assertFalse(np.array_equal(first, second))
        compatible = encode(np.zeros(256, np.float32), "fp8", compat="torchao")
        self.assertEqual(compatible["scales"][0], np.float32(1e-12) / np.float32(448))
        self.assertEqual(encode(array, "fp8_tensor", element="e5m2")["codes"].max(), 0x7B)
        self.assertEqual(np.frexp(encode(array, "fp8_tensor", power_of_2=True)["scales"])[0], 0.5)
        self.assertEqual(np.frexp(encode(array, "fp8_row")["scales"][0])[0], 0.5)
        ceil, floor = (encode(array, "mx8", scaling=scaling)["scales"] for scaling in ("rceil", "floor"))
        self.assertTrue((ceil >= floor).all())
        self.assertEqual(encode(array, "nf4", mean=0.25)["mean"], np.float32(0.25))

    def test_wrong_formats_options_and_arrays_are_refused(self):
        array = numbers(4, 32)
        self.refused("there are fp32", encode, array, "fp9")
        self.refused("fp32 has no option seed; it has none", encode, array, "fp32", seed=1)
        self.refused("it has signed, compat", encode, array, "dyn8", sign=True)
        self.refused("element is 'e3m4'", encode, array, "fp8_tensor", element="e3m4")
        self.refused("seed is -1", encode, array, "bf16_sr", seed=-1)
        self.refused("seed is 18446744073709551616", encode, array, "bf16_sr", seed=2**64)
        self.refused("multiple of 256", encode, array, "bf16_sr", first_element=1)
        self.refused("state is 3", encode, array, "bf16_sr", state=3)
        with_nan = array.copy()
        with_nan[1, 1] = np.nan
        self.refused("element 33 is nan", encode, with_nan, "fp8_row")
        self.refused("the array is of float64", encode, array.astype(np.float64), "fp32")
        self.refused("the array is of int8", encode, array.astype(np.int8), "fp32")
        self.refused("the array is not contiguous", encode, array.T, "fp32")
        self.refused("multiple of 32", encode, array[:, :31].copy(), "mx8")
        self.refused("two dimensions", encode, array.reshape(2, 2, 32), "fp8_block")
        with self.assertRaises(TypeError):
            encode(array, "bf16_sr", seed=1.5)

    def test_the_mean_of_nf4_is_a_finite_number_of_fp32(self):
        array = numbers(64)
        for mean in np.nan, np.inf, -np.inf, 1e39, 10**400, -(10**400):
            self.refused("nf4: mean is ", encode, array, "nf4", mean=mean)
        with self.assertRaisesRegex(TypeError, "nf4: mean is 'x'; it is a number"):
            encode(array, "nf4", mean="x")
        self.assertEqual(encode(array, "nf4", mean=np.finfo(np.float32).max)["mean"], np.finfo(np.float32).max)

    def test_misaligned_arrays_are_refused(self):
        memory = np.zeros(4 * 32 + 1, np.uint8)
        self.refused("multiple of 4", encode, memory[1:].view(np.float32), "fp32")

    def test_wrong_parts_are_refused(self):
        parts = encode(numbers(4, 32), "dyn8")
        self.refused("there are no scales", decode, {"codes": parts["codes"]}, "dyn8", (4, 32))
        wide = {**parts, "scales": parts["scales"].astype(float)}
        self.refused("scales is of float64", decode, wide, "dyn8", (4, 32))
        self.refused("codes has the shape (4, 32)", decode, parts, "dyn8", (4, 33))
        self.refused("at least 0", decode, parts, "dyn8", (-4, 32))

    def test_parts_may_be_read_only(self):
        parts = encode(numbers(4, 32), "dyn8")
        for part in parts.values():
            part.flags.writeable = False
        decode(parts, "dyn8", (4, 32))

    def test_objects_that_were_not_constructed_are_refused(self):
        code = shardmesh._core.Code.__new__(shardmesh._core.Code)
        with self.assertRaises(TypeError):
            code.parts((3,))

    def test_without_numpy_the_package_says_what_is_missing(self):
        script = ("import sys; sys.modules['numpy'] = None; import shardmesh\n"
                  "try: shardmesh.numerics\n"
                  "except ImportError as error: print(error)")
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
        self.assertIn("shardmesh.numerics needs NumPy", run.stdout)
        self.assertIs(shardmesh.numerics, numerics)


if __name__ == "__main__":
    sys.exit(unittest.main())
