// The scales of published 8-bit floats: from a block's largest magnitude to what its values are multiplied by.
//
//   fp8_tensor, fp8_row, fp8_block    a float: code = value * scale (torchao 0.18, float8_utils.amax_to_scale)
//   mx8                               E8M0, a power of two: value = code * 2^(scale - 127) (OCP Microscaling formats
//                                     v1.0; torchao's to_mx, modes RCEIL and FLOOR)
//
// Powers of two are read off the bits. torchao's eager code takes them from log2 in fp32, which rounds: where a number
// lies within a few units in the last place of a power of two its exponent may be one off; its CUDA kernels' is not.
// Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/rules/minifloat.h"

namespace shardmesh {

// In double, then rounded to fp32. (torch has reciprocal * largest there: no fp32 quotient lies near enough to the
// middle of two floats for that to differ.) REQUIRES: finite.
template <class Mini>
SHARDMESH_RULE float Float8Scale(float largest) {
  const double floor = 1e-12, wide = largest;
  return static_cast<float>(static_cast<double>(Mini::kLargest) / (wide < floor ? floor : wide));
}

// The largest power of two that is not above x. REQUIRES: a positive normal number.
template <class Number>
SHARDMESH_RULE Number PowerOfTwoBelow(Number x) {
  using Word = std::decay_t<decltype(FloatBits(x))>;
  return FloatOfBits(FloatBits(x) & Word(0x7F800000u));
}

// The code of the smallest power of two that is not below x, and at least 2^-127. REQUIRES: 0 <= x <= 2^127.
template <class Number>
SHARDMESH_RULE auto E8m0Above(Number x) {
  using Word = std::decay_t<decltype(FloatBits(x))>;
  const Word code = ShiftRight<23>(FloatBits(x) + Word(0x7FFFFFu));
  return Select(x <= FloatOfBits(Word(0x400000u)), Word(0u), code);
}

// 2^(code - 127); 255 is NaN.
template <class Number, class Word>
SHARDMESH_RULE Number DecodeE8m0(Word code) {
  const Word normal = Select(IntToFloat(code) < Number(1.0f), Word(0x400000u), ShiftLeft<23>(code));
  return FloatOfBits(Select(Number(254.5f) < IntToFloat(code), Word(0x7FC00000u), normal));
}

template <class Word, class Number>
struct MxScale {
  Word code;
  Number multiplier;  // of the values, before they become E4M3
};

// RCEIL: the power of two above largest / 448, so that nothing saturates. At code 0 torchao multiplies by 1, not 2^127
// (values that small have code 0 either way). REQUIRES: finite, not negative.
template <class Number>
SHARDMESH_RULE auto MxScaleCeil(Number largest) {
  using Word = std::decay_t<decltype(FloatBits(largest))>;
  const Word code = E8m0Above(Divide(largest, Number(E4M3::kLargest)));
  const Number power = FloatOfBits(ShiftLeft<23>(Word(254u) - code));
  return MxScale<Word, Number>{code, Select(IntToFloat(code) < Number(1.0f), Number(1.0f), power)};
}

// FLOOR: largest's own power of two becomes 2^8, E4M3's largest one; values above 448 saturate. At code 0 torchao
// multiplies by 2^126, not 2^127. REQUIRES: finite, not negative.
template <class Number>
SHARDMESH_RULE auto MxScaleFloor(Number largest) {
  using Word = std::decay_t<decltype(FloatBits(largest))>;
  const Word exponent = ShiftRight<23>(FloatBits(largest));
  const auto small = IntToFloat(exponent) <= Number(8.0f);
  const Word code = Select(small, Word(0u), exponent - Word(8u));
  const Number power = FloatOfBits(ShiftLeft<23>(Word(254u) - code));
  return MxScale<Word, Number>{code, Select(small, Number(PowerOfTwo(126)), power)};
}

}  // namespace shardmesh
