// int8 weights with a scale for each row, once for every number type: a step without a copy in higher precision, so the
// rounding has to be stochastic (torchao's int8 quantized training does the same with draws of its own). Codes are
// words in two's complement, -127 to 127. Pure functions, thread-safe.
//
//   scale = largest magnitude of the row / 127, at least 2^-100        value = code * scale
//
// torchao's rows (0.18, quantize_int8_rowwise) have a scale that may be 0, and multiply by the reciprocal of one that
// is at least 1e-12.
#pragma once

#include <type_traits>

#include "kernels/rules/number.h"

namespace shardmesh {

inline constexpr float kInt8Largest = 127;

// To nearest, ties to even. |y| is at most 127 but for rounding; a NaN becomes 127.
template <class Number>
SHARDMESH_RULE auto EncodeInt8(Number y) {
  return RoundToInt(Max(Number(-kInt8Largest), Min(Number(kInt8Largest), y)));
}

// Stochastically: up with the probability of the fraction, in steps of 2^-16. `draw`: uniform in [0, 65536).
template <class Number, class Word>
SHARDMESH_RULE Word EncodeInt8Stochastic(Number y, Word draw) {
  const Number kept = Max(Number(-kInt8Largest), Min(Number(kInt8Largest), y));
  const Number cut = IntToFloat(TruncateToInt(kept));
  const Number floor = Select(kept < cut, cut - Number(1.0f), cut);
  // The fraction is exact; so is the comparison with draw + 1/2 in units of 2^-16, whose mean is 1/2.
  const Number chance = (kept - floor) * Number(65536.0f);
  const Number up = Select(IntToFloat(draw) + Number(0.5f) < chance, Number(1.0f), Number(0.0f));
  return RoundToInt(floor + up);
}

template <class Number, class Word>
SHARDMESH_RULE Number DecodeInt8(Word code) {
  return IntToFloat(((code + Word(0x80u)) & Word(0xFFu)) - Word(0x80u));
}

SHARDMESH_RULE float TorchaoInt8Scale(float largest) { return Divide(largest, kInt8Largest); }
SHARDMESH_RULE float TorchaoInt8Inverse(float scale) { return Divide(1.0f, Max(scale, 1e-12f)); }

// The scale of a block of nf4, less the mean and times its factor: to nearest, and down to -128. REQUIRES: not NaN.
template <class Number>
SHARDMESH_RULE auto EncodeNf4Scale(Number y) {
  return RoundToInt(Max(Number(-128.0f), Min(Number(kInt8Largest), y)));
}

}  // namespace shardmesh
