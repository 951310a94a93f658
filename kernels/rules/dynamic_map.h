// The dynamic 8-bit map (dyn8), once for every number type: 256 levels in [0, 1] or [-1, 1], spread evenly inside each
// of seven decades (Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022; bitsandbytes'
// create_dynamic_map, as torchao has it). Codes are words, 0 to 255, in the order of their levels.
//
//   decade d = 0 .. 6 holds the values up to 10^(d-6), in n levels: n = 2^d with a sign, 2^(d+1) without
//   level j of decade d = 10^(d-6) * (0.1 + 0.9 * (j + 0.5) / n),  j = 0 .. n-1
//   signed:   code 127 is 0, code 127 +- (n + j) is +- that level, code 255 is 1 (there is no -1)
//   unsigned: code 0 is 0, code n - 1 + j is that level, code 255 is 1
//
// The levels are computed (one multiply-add with literal constants) instead of read from a table of 256, which no
// vector unit does fast; they differ from the textbook's by at most 2 units in the last place. An encoder finds the
// nearest level by the same arithmetic; a value closer than 2^-20 of itself to the middle between two may get either.
// Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/rules/number.h"

namespace shardmesh {
namespace dynamic_map {

// By the exponent of a position x, modulo 8: level = kScale * x + kShift.
struct Line {
  float scale[8];
  float shift[8];
};
constexpr Line MakeLine(bool is_signed) {
  Line line{};
  double decade = 1e-6;
  for (int d = 0; d < 7; ++d, decade *= 10) {
    const int exponent = is_signed ? d : d + 1;
    const double n = static_cast<double>(1 << exponent);
    const int entry = (127 + exponent) & 7;
    line.scale[entry] = static_cast<float>(decade * 0.9 / n);
    line.shift[entry] = static_cast<float>(decade * (0.1 - 0.9 + 0.45 / n));
  }
  if (is_signed) {
    line.shift[(127 + 7) & 7] = 1;  // x = 128
  } else {
    line.scale[127 & 7] = static_cast<float>(1.0 / 255);  // x = 1 and x = 256
    line.shift[127 & 7] = static_cast<float>(-1.0 / 255);
  }
  return line;
}
inline constexpr Line kSignedLine = MakeLine(true), kUnsignedLine = MakeLine(false);

// The position of `y` in (0, 1] among the levels, before rounding: n + j in decade d.
template <bool kSigned, class Number>
SHARDMESH_RULE Number Position(Number y) {
  using Word = std::decay_t<decltype(FloatBits(y))>;
  // A decade that is right or one too low: log10(y) + 6.68, with the logarithm to base 2 read off the bits.
  constexpr float kLog2 = 0.30102999566f;
  const Number estimate = MulAdd(IntToFloat(FloatBits(y)), Number(kLog2 / 8388608.0f), Number(6.68f - 127.0f * kLog2));
  const Word decade = TruncateToInt(Max(estimate, Number(0.0f)));
  constexpr float kPowers[8] = {1e6f, 1e5f, 1e4f, 1e3f, 1e2f, 10.0f, 1.0f, 0.1f};
  Number z = y * Lookup8(kPowers, decade);
  Number n = FloatOfBits(ShiftLeft<23>(decade + Word(kSigned ? 127u : 128u)));
  // Beyond the middle between this decade's last level and the next one's first.
  const auto next = Number(0.9f) < MulAdd(n, z, Number(0.0f) - n);
  z = Select(next, z * Number(0.1f), z);
  n = Select(next, n + n, n);
  const Number x = MulAdd(n, MulAdd(z, Number(1.0f / 0.9f), Number(static_cast<float>(1 - 0.1 / 0.9))), Number(-0.5f));
  return Min(x, MulAdd(n, Number(2.0f), Number(-1.0f)));
}

inline constexpr float kSignedZero = 2.75e-7f;  // the middle between 0 and the smallest level
inline constexpr float kUnsignedZero = 1.625e-7f;
inline constexpr float kSignedOne = 0.99648437f;  // the middle between the largest two: (1 + 0.99296875) / 2
inline constexpr float kUnsignedOne = 0.99824219f;

}  // namespace dynamic_map

// REQUIRES: |y| <= 1, not NaN.
template <class Number>
SHARDMESH_RULE auto EncodeDynamicSigned(Number y) {
  using Word = std::decay_t<decltype(FloatBits(y))>;
  const Number magnitude = Abs(y);
  const Word sign = FloatBits(y) & Word(0x80000000u);
  Number x = dynamic_map::Position<true>(magnitude);
  x = Select(magnitude <= Number(dynamic_map::kSignedZero), Number(0.0f), x);
  const Word code = RoundToInt(FloatOfBits(FloatBits(x) | sign)) + Word(127u);
  return Select(Number(dynamic_map::kSignedOne) < y, Word(255u), code);
}

template <class Number, class Word>
SHARDMESH_RULE Number DecodeDynamicSigned(Word code) {
  const Number x = IntToFloat(code - Word(127u));
  const Word sign = FloatBits(x) & Word(0x80000000u);
  const Number magnitude = Abs(x);
  const Word exponent = ShiftRight<23>(FloatBits(magnitude));
  const Number level = MulAdd(Lookup8(dynamic_map::kSignedLine.scale, exponent), magnitude,
                              Lookup8(dynamic_map::kSignedLine.shift, exponent));
  const Number kept = Select(Number(0.0f) < magnitude, level, Number(0.0f));
  return FloatOfBits(FloatBits(kept) | sign);
}

// kGuard: what is above 0 gets code 1 or more, so that a second moment never vanishes beside a first one that does not.
// REQUIRES: 0 <= y <= 1.
template <bool kGuard, class Number>
SHARDMESH_RULE auto EncodeDynamicUnsigned(Number y) {
  using Word = std::decay_t<decltype(FloatBits(y))>;
  Word code = RoundToInt(dynamic_map::Position<false>(y)) - Word(1u);
  const Number zero(kGuard ? 0.0f : dynamic_map::kUnsignedZero);
  if constexpr (kGuard) code = Select(y <= Number(dynamic_map::kUnsignedZero), Word(1u), code);
  code = Select(y <= zero, Word(0u), code);
  return Select(Number(dynamic_map::kUnsignedOne) < y, Word(255u), code);
}

template <class Number, class Word>
SHARDMESH_RULE Number DecodeDynamicUnsigned(Word code) {
  const Number x = IntToFloat(code + Word(1u));
  const Word exponent = ShiftRight<23>(FloatBits(x));
  return MulAdd(Lookup8(dynamic_map::kUnsignedLine.scale, exponent), x,
                Lookup8(dynamic_map::kUnsignedLine.shift, exponent));
}

}  // namespace shardmesh
