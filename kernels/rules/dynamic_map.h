// The dynamic 8-bit map (dyn8), once for every number type: 256 levels in [0, 1] or [-1, 1], spread evenly inside each
// of seven decades (Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022; bitsandbytes'
// create_dynamic_map, as torchao has it). Codes are words, 0 to 255, in the order of their levels.
//
//   decade d = 0 .. 6 holds the values up to 10^(d-6), in n levels: n = 2^d with a sign, 2^(d+1) without
//   level j of decade d = 10^(d-6) * (0.1 + 0.9 * (j + 0.5) / n),  j = 0 .. n-1
//   signed:   code 127 is 0, code 127 +- (n + j) is +- that level, code 255 is 1 (there is no -1)
//   unsigned: code 0 is 0, code n - 1 + j is that level, code 255 is 1
//
// Levels are computed (one multiply-add with literal constants) instead of read from a table of 256, which no vector
// unit does fast; they differ from the textbook's by at most 2 units in the last place. The encoder finds the nearest
// level by the same arithmetic turned round: a value closer than 2^-20 of itself to the middle between two may get
// either. Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/rules/number.h"

namespace shardmesh {

// Straight lines between values and positions: n + j in decade d, 2^7 or 2^8 for the level 1.
template <bool kSigned>
struct DynamicMap {
  // Of a position x, by its exponent modulo 8: level = level_scale * x + level_shift; with a sign, half of the shift.
  float level_scale[8], level_shift[8];
  // Of a value, by its decade (7: the level 1): x = position_scale * y + position_shift, at most position_last. Without
  // a sign x is less by 1, and so the code.
  float position_scale[8], position_shift[8], position_last[8];
  float decade_end[8];  // above it the next decade's first level is nearer

  SHARDMESH_HOST_DEVICE static constexpr DynamicMap Make() {
    constexpr int kFirst = kSigned ? 0 : 1;
    DynamicMap map{};
    double decade = 1e-6;
    for (int d = 0; d < 7; ++d, decade *= 10) {
      const int exponent = kSigned ? d : d + 1;
      const double n = static_cast<double>(1 << exponent), step = decade * 0.9 / n;
      const double shift = decade * (0.1 - 0.9 + 0.45 / n);
      map.level_scale[(127 + exponent) & 7] = static_cast<float>(step);
      map.level_shift[(127 + exponent) & 7] = static_cast<float>(kSigned ? shift / 2 : shift);
      map.position_scale[d] = static_cast<float>(1 / step);
      map.position_shift[d] = static_cast<float>(-shift / step - kFirst);
      map.position_last[d] = static_cast<float>(2 * n - 1 - kFirst);
      // Between decade * (1 - 0.45 / n) and 10 * decade * (0.1 + 0.225 / n), or 1.
      map.decade_end[d] = static_cast<float>(d < 6 ? decade * (1 + 0.9 / n) : 1 - 0.225 / n);
    }
    if (kSigned) {
      map.level_shift[(127 + 7) & 7] = 0.5f;
      // The one level of decade 0 has 0 for a neighbour.
      map.position_scale[0] = static_cast<float>(1 / 5.5e-7);
      map.position_shift[0] = 0;
    } else {
      map.level_scale[127 & 7] = static_cast<float>(1.0 / 255);  // x = 1 and x = 256
      map.level_shift[127 & 7] = static_cast<float>(-1.0 / 255);
    }
    map.position_shift[7] = map.position_last[7] = kSigned ? 128 : 255;
    map.decade_end[7] = 2;
    return map;
  }

  // The position of y in [0, 1] (less by 1 without a sign), not yet rounded. REQUIRES: y is not -0.
  template <class Number>
  SHARDMESH_RULE static Number Position(Number y) {
    using Word = std::decay_t<decltype(FloatBits(y))>;
    static constexpr DynamicMap kMap = Make();
    // A decade that is right or one too low: log10(y) + 6.68, where the upper half of y's bits, over 128, is 127 and
    // the logarithm to base 2, or up to 0.1 less.
    constexpr uint32_t kDecadeZero = 13416, kLog2 = 154;  // 128 * (127 - 6.68 / log10(2)), 2^16 * log10(2) / 128
    const Word low = MulHigh16(SubtractOrZero16(ShiftRight<16>(FloatBits(y)), Word(kDecadeZero)), Word(kLog2));
    const Word decade = AddWhere(Lookup8(kMap.decade_end, low) < y, low);
    const Number x = MulAdd(y, Lookup8(kMap.position_scale, decade), Lookup8(kMap.position_shift, decade));
    return Min(Lookup8(kMap.position_last, decade), x);
  }

  // The level at a position, which is negative for negative levels; at 0: 0.
  template <class Number, class Word>
  SHARDMESH_RULE static Number Level(Word position) {
    static constexpr DynamicMap kMap = Make();
    const Number x = IntToFloat(position);
    const auto exponent = ShiftRight<23>(FloatBits(x));  // the sign lies above the three bits that count
    const Number scale = Lookup8(kMap.level_scale, exponent), shift = Lookup8(kMap.level_shift, exponent);
    if constexpr (!kSigned) return MulAdd(scale, x, shift);
    return MulAdd(scale, x, shift * FloatOfBits(SignedTwo(position)));
  }
};

// |y| is at most 1 but for rounding; a NaN gets any code. Codes of -1 stand for 0: there is no level -1, so what is
// nearest to it is cut to the last negative one by whoever stores it.
template <class Number>
SHARDMESH_RULE auto EncodeDynamicSigned(Number y) {
  using Word = std::decay_t<decltype(FloatBits(y))>;
  return WithSignOf(RoundToInt(DynamicMap<true>::Position(Abs(y))), y) + Word(127u);
}

template <class Number, class Word>
SHARDMESH_RULE Number DecodeDynamicSigned(Word code) {
  return DynamicMap<true>::template Level<Number>(code - Word(127u));
}

// What is above 0 gets code 1 or more, so that a second moment never vanishes beside a first one that does not. +0 <=
// y, at most 1 but for rounding; a NaN gets any code.
template <class Number>
SHARDMESH_RULE auto EncodeDynamicUnsigned(Number y) {
  using Word = std::decay_t<decltype(FloatBits(y))>;
  const Word code = RoundToInt(DynamicMap<false>::Position(y));
  return MaxInt(MinInt(FloatBits(y), Word(1u)), code);
}

template <class Number, class Word>
SHARDMESH_RULE Number DecodeDynamicUnsigned(Word code) {
  return DynamicMap<false>::template Level<Number>(code + Word(1u));
}

}  // namespace shardmesh
