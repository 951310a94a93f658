// 8-bit floats, once for every number type: fp8's E4M3 and E5M2 (Micikevicius et al., "FP8 formats for deep learning",
// 2022, in the "fn" form of ONNX and PyTorch: no infinity in E4M3), and UE5M3, which has no sign, no infinity and no
// NaN. Codes are words, 0 to 255. Pure functions, thread-safe.
//
//   format  exponent bits, bias  largest        smallest > 0
//   E4M3    4, 7                 448            2^-9
//   E5M2    5, 15                57344          2^-16
//   UE5M3   5, 15                61440          2^-17         (a half float has all of them; codes above 0xF7 are never
//                                                             written, and read as the largest)
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/rules/number.h"

namespace shardmesh {

struct E4M3 {
  static constexpr int kMantissa = 3, kBias = 7;
  static constexpr float kLargest = 448.0f;
  static constexpr bool kSigned = true;
};
struct E5M2 {
  static constexpr int kMantissa = 2, kBias = 15;
  static constexpr float kLargest = 57344.0f;
  static constexpr bool kSigned = true;
};
struct UE5M3 {
  static constexpr int kMantissa = 3, kBias = 15;
  static constexpr float kLargest = 61440.0f;
  static constexpr bool kSigned = false;
};

SHARDMESH_HOST_DEVICE constexpr float PowerOfTwo(int exponent) {
  float power = 1;
  for (; exponent > 0; --exponent) power *= 2;
  for (; exponent < 0; ++exponent) power /= 2;
  return power;
}

// To nearest, ties to even; beyond the largest: the largest; a NaN: the largest. REQUIRES: not negative when there is
// no sign.
template <class Mini, class Number>
SHARDMESH_RULE auto EncodeMinifloat(Number x) {
  using Word = std::decay_t<decltype(FloatBits(x))>;
  constexpr int kCut = 23 - Mini::kMantissa;
  constexpr float kMagic = PowerOfTwo(kCut + 1 - Mini::kBias);  // its unit in the last place is the smallest code's
  const Number kept = Max(Number(-Mini::kLargest), Min(Number(Mini::kLargest), x));
  const Number magnitude = Abs(kept);
  const Word bits = FloatBits(magnitude);
  const Word rounded = bits + Word((1u << (kCut - 1)) - 1) + (ShiftRight<kCut>(bits) & Word(1u));
  const Word normal = ShiftRight<kCut>(rounded) - Word(uint32_t{127 - Mini::kBias} << Mini::kMantissa);
  const Word subnormal = FloatBits(magnitude + Number(kMagic)) - FloatBits(Number(kMagic));
  const Word code = Select(magnitude < Number(PowerOfTwo(1 - Mini::kBias)), subnormal, normal);
  if constexpr (!Mini::kSigned) return code;
  return code | (ShiftRight<24>(FloatBits(kept)) & Word(0x80u));
}

// The distance from the number at or below x, which is not negative, to the next.
template <class Mini, class Number>
SHARDMESH_RULE Number StepOfMinifloat(Number x) {
  using Word = std::decay_t<decltype(FloatBits(x))>;
  const Number power = FloatOfBits(FloatBits(x) & Word(0x7F800000u));
  return Max(Number(PowerOfTwo(1 - Mini::kBias)), power) * Number(PowerOfTwo(-Mini::kMantissa));
}

// To one of the two numbers around x, the upper one with a probability of where x lies between them, to 2^-16: right on
// average. `draw`: uniform in [0, 65536). Beyond the largest, or NaN: the largest. REQUIRES: x is not negative.
template <class Mini, class Number, class Word>
SHARDMESH_RULE Word EncodeMinifloatSr(Number x, Word draw) {
  constexpr int kCut = 23 - Mini::kMantissa;
  constexpr int kSmallest = 1 - Mini::kBias - Mini::kMantissa;  // the exponent of the smallest number
  const Number moved = MulAdd(IntToFloat(draw), StepOfMinifloat<Mini>(x) * Number(PowerOfTwo(-16)), x);
  const Number kept = Select(moved < Number(Mini::kLargest), moved, Number(Mini::kLargest));
  const Word normal = ShiftRight<kCut>(FloatBits(kept)) - Word(uint32_t{127 - Mini::kBias} << Mini::kMantissa);
  const Number smallest_normal(PowerOfTwo(1 - Mini::kBias));
  const Word subnormal = TruncateToInt(Min(kept, smallest_normal) * Number(PowerOfTwo(-kSmallest)));
  return Select(kept < smallest_normal, subnormal, normal);
}

// Exact. REQUIRES: a code that EncodeMinifloat gives (others: see DecodeAnyMinifloat).
template <class Mini, class Number, class Word>
SHARDMESH_RULE Number DecodeMinifloat(Word code) {
  constexpr int kCut = 23 - Mini::kMantissa;
  const Word magnitude = Mini::kSigned ? code & Word(0x7Fu) : MinInt(code, Word(0xF7u));
  const Word bits = ShiftLeft<kCut>(magnitude) + Word(uint32_t{127 - Mini::kBias} << 23);
  // Subnormal codes: as if there were a leading one, which is then taken off.
  const Number smallest_normal(PowerOfTwo(1 - Mini::kBias));
  const Number subnormal = FloatOfBits(bits + Word(1u << 23)) - smallest_normal;
  const Number value = Select(FloatOfBits(bits) < smallest_normal, subnormal, FloatOfBits(bits));
  if constexpr (!Mini::kSigned) return value;
  return FloatOfBits(FloatBits(value) | ShiftLeft<24>(code & Word(0x80u)));
}

// Every code: E4M3's 0x7F and 0xFF are NaN, E5M2's 0x7C infinity and what lies above NaN, with their signs.
template <class Mini, class Number, class Word>
SHARDMESH_RULE Number DecodeAnyMinifloat(Word code) {
  const Number value = DecodeMinifloat<Mini, Number>(code);
  if constexpr (!Mini::kSigned) return value;
  const Word sign = ShiftLeft<24>(code & Word(0x80u));
  const Number nan = FloatOfBits(Word(0x7FC00000u) | sign);
  if constexpr (std::is_same_v<Mini, E4M3>) return Select(Abs(value) <= Number(E4M3::kLargest), value, nan);
  const Number special = Select(Abs(value) <= Number(65536.0f), FloatOfBits(Word(0x7F800000u) | sign), nan);
  return Select(Abs(value) <= Number(Mini::kLargest), value, special);
}

}  // namespace shardmesh
