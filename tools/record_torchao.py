#!/usr/bin/env python3
"""Writes what kernels/ keeps of torchao as literal data. Needs torch and torchao (2.13 and 0.18.0 were used), on a CPU.

Usage: record_torchao.py map > kernels/encode/torchao_map.inc
       record_torchao.py steps > kernels/step/torchao_recorded.inc

map    the levels of create_dynamic_map, signed and unsigned, of 8 bits.
steps  codes, scales and weights after three compiled steps of AdamW on 256 elements, for each format; the inputs are
       those of kernels/step/torchao_step_test.cc.
"""
import sys

import numpy
import torch
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.optim.quant_utils import create_dynamic_map

ELEMENTS = 4096  # torchao quantizes no smaller tensor; the first block is kept
KEPT = 256
VERSION = torch.__version__.split("+")[0]


def literal(value):
    """A float of C++, exact."""
    mantissa, exponent = float(value).hex().split("p")
    return f"{mantissa.rstrip('0').rstrip('.')}p{exponent}f" if value else "0.0f"


def lines(items, width=118):
    """The items, comma behind each, in lines of at most `width` columns."""
    line = "   "
    for item in items:
        if len(line) + len(item) + 2 > width:
            yield line
            line = "   "
        line += f" {item},"
    yield line


def print_map():
    print(f"// torchao's create_dynamic_map, 8 bits, as torch {VERSION} computes it on an x86-64 CPU.")
    print("// Another build of torch may differ in the last bit of some entries (linspace with or without fused")
    print("// multiply-adds). Written by tools/record_torchao.py.")
    for name, signed in (("kTorchaoSignedLevels", True), ("kTorchaoUnsignedLevels", False)):
        levels = torch.tensor(create_dynamic_map(signed=signed), dtype=torch.float32).tolist()
        print(f"constexpr float {name}[256] = {{", *lines(map(literal, levels)), "};", sep="\n")


def mix64(x):
    x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return x ^ (x >> numpy.uint64(31))


def inputs(seed):
    """Numbers of both signs and many sizes, exact in fp32, and a few zeros."""
    bits = mix64(numpy.arange(ELEMENTS, dtype=numpy.uint64) + numpy.uint64(seed << 32))
    mantissa = (bits >> numpy.uint64(40)).astype(numpy.int64) - (1 << 23)
    size = (bits & numpy.uint64(15)).astype(numpy.int64)
    values = numpy.ldexp(mantissa.astype(numpy.float64), (-23 - size).astype(numpy.int32)).astype(numpy.float32)
    return torch.from_numpy(numpy.where(bits % numpy.uint64(17) == 0, numpy.float32(0), values))


def hexadecimal(tensor):
    """The bytes of a tensor's kept elements, as strings of C++."""
    text = tensor.contiguous().view(torch.uint8).numpy().tobytes().hex()
    return [f'     "{text[i:i + 112]}"' for i in range(0, len(text), 112)]


def record(optimizer, state_format, dtype):
    weight = torch.nn.Parameter(inputs(1).to(dtype))
    optimizer = optimizer([weight], lr=1e-2, weight_decay=0.1)
    for step in range(3):
        weight.grad = inputs(2 + step).to(dtype)
        optimizer.step()
    state = optimizer.state[weight]
    weights = "kFp32" if dtype == torch.float32 else "kBf16"
    print(f"    {{StateFormat::{state_format}, WeightFormat::{weights},")
    for name in ("exp_avg", "exp_avg_sq"):
        codes, scale = state[name].codes, state[name].scale
        print(*hexadecimal(codes[: codes.numel() * KEPT // ELEMENTS]), sep="\n", end=",\n")
        print(*hexadecimal(scale[: scale.numel() * KEPT // ELEMENTS]), sep="\n", end=",\n")
    print(*hexadecimal(weight.detach()[:KEPT]), sep="\n", end="},\n")


def print_steps():
    print(f"// The first {KEPT} elements after three steps of torchao 0.18.0, compiled by torch {VERSION}: codes and")
    print("// scales of both states, then the weights; bytes as hexadecimal digits.")
    print("// Written by tools/record_torchao.py.")
    print("constexpr Recorded kRecorded[] = {")
    record(AdamW8bit, "kDyn8", torch.float32)
    record(AdamW4bit, "kDyn4", torch.bfloat16)
    record(AdamWFp8, "kFp8", torch.bfloat16)
    print("};")


if __name__ == "__main__":
    if sys.argv[1:] == ["map"]:
        print_map()
    elif sys.argv[1:] == ["steps"]:
        print_steps()
    else:
        sys.exit(__doc__)
