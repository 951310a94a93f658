#!/usr/bin/env python3
"""encode() and decode() beside torchao's casts, bit for bit: weights as they are published, and optimizer states."""
import logging
import sys
import unittest
import warnings

import numpy as np
import torch

from shardmesh.numerics import Step, decode, encode

warnings.filterwarnings("ignore")  # torchao's own, on import
logging.disable(logging.WARNING)
from torchao.float8.config import ScalingGranularity  # noqa: E402
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic  # noqa: E402
from torchao.optim import AdamW8bit  # noqa: E402
from torchao.optim.quant_utils import create_dynamic_map  # noqa: E402
from torchao.optim.subclass_4bit import OptimState4bit  # noqa: E402
from torchao.optim.subclass_8bit import OptimState8bit  # noqa: E402
from torchao.optim.subclass_fp8 import OptimStateFp8  # noqa: E402
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx  # noqa: E402
from torchao.prototype.quantized_training.int8 import quantize_int8_rowwise  # noqa: E402
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4  # noqa: E402

logging.disable(logging.NOTSET)


def bits(array):
    """The bytes of a NumPy array or a tensor of any type."""
    if isinstance(array, torch.Tensor):
        array = array.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def arrays():
    """Name: an array of 256 x 512, a different difficulty each."""
    rng = np.random.default_rng(11)
    normal = rng.standard_normal((256, 512)).astype(np.float32)
    wide = (normal * 2.0 ** rng.integers(-30, 30, normal.shape)).astype(np.float32)
    blocks = normal * np.repeat(2.0 ** rng.integers(-100, 100, (256, 16)), 32, axis=1)
    zeros = normal.copy()
    zeros[::3], zeros[1::3, :256], zeros[2, 3] = 0, -0.0, 1e-45
    negative = -np.abs(normal)  # the largest magnitude of a block is -1 times its scale: no level of dyn8 is -1
    ties = (rng.integers(-64, 65, normal.shape) / 64).astype(np.float32)
    exponents = np.arange(2**16, dtype=np.uint32)[rng.permutation(2**16)] << 16
    finite = (exponents & 0x7F800000) < 0x7F800000
    every_bf16 = np.where(finite, exponents, 0).view(np.float32)
    return {
        "normal": normal, "wide": wide, "blocks": blocks.astype(np.float32), "zeros": zeros, "negative": negative,
        "ties": ties, "every bf16": np.concatenate([every_bf16, every_bf16[::-1]]).reshape(256, 512),
    }


ARRAYS = {name: torch.from_numpy(array) for name, array in arrays().items()}


class CodesTest(unittest.TestCase):
    def same(self, ours, theirs, what):
        np.testing.assert_array_equal(bits(ours), bits(theirs), what)

    def test_levels_are_torchaos(self):
        for signed in True, False:
            ours = decode({"codes": np.arange(256, dtype=np.uint8), "scales": np.ones(1, np.float32)}, "dyn8", (256,),
                          signed=signed, compat="torchao")
            self.same(ours, torch.tensor(create_dynamic_map(signed)), signed)

    def test_optimizer_states(self):
        makers = {
            "dyn8": lambda shape, signed: OptimState8bit.zeros(shape, signed=signed),
            "dyn4": lambda shape, signed: OptimState4bit.zeros(shape, signed=signed),
            "fp8": lambda shape, signed: OptimStateFp8.zeros(shape),
        }
        for name, tensor in ARRAYS.items():
            for format, make in makers.items():
                for signed in True, False:
                    values = tensor if signed else tensor.abs()
                    theirs = make(values.shape, signed)
                    theirs.copy_(values)
                    options = {"signed": signed, "compat": "torchao"}
                    ours = encode(values, format, **options)
                    self.same(ours["codes"], theirs.codes, (name, format, options))
                    self.same(ours["scales"], theirs.scale, (name, format, options))
                    decoded = decode(ours, format, values.shape, **options)
                    self.same(decoded, theirs.dequantize(), (name, format, options))

    def test_own_states_are_torchaos_but_for_rounding(self):
        """Levels and scales differ by a few units in the last place, so few values fall on the other side of a tie."""
        for format in "dyn8", "dyn4", "fp8":
            ours = encode(ARRAYS["normal"], format)["codes"]
            theirs = encode(ARRAYS["normal"], format, compat="torchao")["codes"]
            self.assertLess(np.mean(ours != theirs), 1e-4)

    def test_fp8_tensor(self):
        types = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
        for name, tensor in ARRAYS.items():
            for element, dtype in types.items():
                for power_of_2 in False, True:
                    theirs = hp_tensor_to_float8_dynamic(tensor, dtype, None, round_scales_to_power_of_2=power_of_2)
                    ours = encode(tensor, "fp8_tensor", element=element, power_of_2=power_of_2)
                    self.same(ours["codes"], theirs._data, (name, element))
                    self.same(ours["scales"], theirs._scale, (name, element))
                    self.same(decode(ours, "fp8_tensor", tensor.shape, element=element),
                              theirs.to_original_precision(), (name, element))

    def test_fp8_row(self):
        for name, tensor in ARRAYS.items():
            for power_of_2 in False, True:
                theirs = hp_tensor_to_float8_dynamic(
                    tensor, torch.float8_e4m3fn, None, scaling_granularity=ScalingGranularity.AXISWISE,
                    axiswise_dim=-1, round_scales_to_power_of_2=power_of_2)
                ours = encode(tensor, "fp8_row", power_of_2=power_of_2)
                self.assertEqual(ours["scales"].shape, tuple(theirs._scale.shape))
                self.same(ours["codes"], theirs._data, (name, power_of_2))
                self.same(ours["scales"], theirs._scale, (name, power_of_2))
                self.same(decode(ours, "fp8_row", tensor.shape), theirs.to_original_precision(), (name, power_of_2))

    def test_fp8_block_is_the_cast_of_each_block(self):
        """torchao's own blockwise cast (prototype) is this arithmetic; it stores 1 / scale, and needs triton."""
        for name, whole in ARRAYS.items():
            tensor = whole[:200, :400].contiguous()  # with blocks at the edges
            ours = encode(tensor, "fp8_block")
            for row in 0, 128:
                for column in 0, 128, 256, 384:
                    block = tensor[row:row + 128, column:column + 128].contiguous()
                    theirs = hp_tensor_to_float8_dynamic(block, torch.float8_e4m3fn, None)
                    self.same(ours["codes"][row:row + 128, column:column + 128], theirs._data, (name, row, column))
                    self.same(ours["scales"][row // 128, column // 128], theirs._scale, (name, row, column))

    def test_mx8(self):
        modes = {"floor": ScaleCalculationMode.FLOOR, "rceil": ScaleCalculationMode.RCEIL}
        for name, tensor in ARRAYS.items():
            for scaling, mode in modes.items():
                scales, codes = to_mx(tensor, torch.float8_e4m3fn, 32, mode)
                ours = encode(tensor, "mx8", scaling=scaling)
                self.same(ours["scales"], scales, (name, scaling))
                self.same(ours["codes"], codes, (name, scaling))
                theirs = to_dtype(codes, scales, torch.float8_e4m3fn, 32, torch.float32)
                self.same(decode(ours, "mx8", tensor.shape), theirs, (name, scaling))

    def test_int8_row(self):
        for name, tensor in ARRAYS.items():
            codes, scales = quantize_int8_rowwise(tensor)
            ours = encode(tensor, "int8_row", compat="torchao")
            self.same(ours["codes"], codes, name)
            self.same(ours["scales"], scales, name)
            self.same(decode(ours, "int8_row", tensor.shape), codes * scales.view(-1, 1), name)

    def test_int8_row_rounded_stochastically_is_a_neighbour(self):
        codes = quantize_int8_rowwise(ARRAYS["normal"])[0].numpy().astype(int)
        ours = encode(ARRAYS["normal"], "int8_row", stochastic=True, compat="torchao")["codes"]
        self.assertLessEqual(np.abs(ours - codes).max(), 1)

    def test_nf4(self):
        for name in "normal", "negative", "ties":  # elsewhere torchao has NaN: blocks of zeros
            tensor = ARRAYS[name]
            theirs = to_nf4(tensor)
            ours = encode(tensor, "nf4")
            self.same(ours["codes"], theirs.quantized_data, name)
            # A sum of 2048 positive numbers in any order: 2047 roundings, of half a unit in the last place each.
            np.testing.assert_allclose(ours["mean"], theirs.scaler_mean.numpy(), rtol=2048 * 2**-24)
            ours = encode(tensor, "nf4", mean=theirs.scaler_mean)
            self.same(ours["scales"], theirs.quantized_scalers, name)
            self.same(ours["factors"], theirs.quantization_factor, name)
            self.same(decode(ours, "nf4", tensor.shape), theirs.get_original_weight(), name)

    def test_bf16(self):
        for name, tensor in ARRAYS.items():
            self.same(encode(tensor, "bf16")["codes"], tensor.bfloat16(), name)
            ours = encode(tensor.bfloat16(), "fp8_row")  # a bf16 tensor is its values
            self.same(ours["codes"], encode(tensor.bfloat16().float(), "fp8_row")["codes"], name)


class TensorsTest(unittest.TestCase):
    def test_steps_are_torchaos(self):
        """Its optimizer, compiled as it comes, and Step with compat, from its states and over three steps."""
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(64, 256))
        optimizer = AdamW8bit([weight], lr=1e-2)
        step = Step("AdamW", states="dyn8", compat="torchao", lr=1e-2)
        state = step.init(weight)
        for number in range(1, 4):
            weight.grad = torch.randn_like(weight)
            step.apply(state, weight.grad, number)
            optimizer.step()
            for name, signed in ("exp_avg", True), ("exp_avg_sq", False):
                theirs, ours = optimizer.state[weight][name], state.parts[name]
                np.testing.assert_array_equal(bits(ours["codes"]), bits(theirs.codes), (number, name))
                np.testing.assert_array_equal(bits(ours["scales"]), bits(theirs.scale), (number, name))
                np.testing.assert_array_equal(bits(state.moments[name]), bits(theirs.dequantize()), (number, name))
            # A unit in the last place now and then: torch's square root on this processor.
            np.testing.assert_allclose(state.weights, weight.detach(), rtol=0, atol=2**-22)

    def test_tensors_are_stepped_where_they_lie(self):
        weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
        gradient = torch.randn(64, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
        step = Step("AdamW", weights="bf16")
        state = step.init(weight)
        mine = weight.bfloat16()
        state.parts["weights"]["codes"] = mine
        step.apply(state, gradient, 1)
        self.assertFalse(torch.equal(mine, weight.bfloat16()))
        np.testing.assert_array_equal(bits(mine), bits(state.parts["weights"]["codes"]))

    def test_tensors_that_cannot_be_read_are_refused(self):
        for tensor, message in [(torch.ones(4, 4).T[1:], "not contiguous"), (torch.ones(4).half(), "float16"),
                                (torch.ones(4, device="meta"), "lies on meta")]:
            with self.assertRaisesRegex(ValueError, message):
                encode(tensor, "fp32")
        encode(torch.nn.Parameter(torch.ones(4)), "fp32")


if __name__ == "__main__":
    sys.exit(unittest.main())
