// fp32 weights split into a bf16 that everybody reads and a remainder that only the step reads, once for every number
// type. All of it is integer arithmetic on the bits u of a float: a carry crosses exponents and subnormals by itself.
//
//   bf16+16   upper = (u + 0x8000) >> 16, remainder = u - (upper << 16), from -2^15 to 2^15 - 1: exact
//             (TransformerEngine and apex keep the same pair)
//   bf16+8sr  the remainder's upper byte; its lower byte r is rounded stochastically: up with probability r / 256. So
//   the
//             24 bits that stay are right on average, and `upper` is still the bf16 nearest to them
//
// `upper` is the nearest bf16; ties go away from zero. Words hold one element each; both parts lie in the low bits, a
// remainder sign-extended. Values that are not finite keep their upper half (a NaN becomes the one NaN) and have no
// remainder. A finite value above the largest bf16 by half a unit or more reads as infinity in bf16 and still decodes
// to itself. Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/rules/number.h"

namespace shardmesh {

template <class Word>
struct SplitWeight {
  Word upper;
  Word remainder;
};

// 0xFFFFFFFF-like masks are avoided: |x| <= largest finite is false for infinities and NaN.
template <class Number>
SHARDMESH_RULE auto SplitExact(Number x) {
  using Word = std::decay_t<decltype(FloatBits(x))>;
  const Word bits = FloatBits(x);
  const auto finite = Abs(x) < FloatOfBits(Word(0x7F800000u));
  const Word upper = ShiftRight<16>(bits + Word(0x8000u));
  const Word special = IfNan(x, Word(uint32_t{kBf16Nan}), ShiftRight<16>(bits));
  return SplitWeight<Word>{Select(finite, upper, special), Select(finite, bits - ShiftLeft<16>(upper), Word(0u))};
}

template <class Number, class Word>
SHARDMESH_RULE Number JoinExact(Word upper, Word remainder) {
  return FloatOfBits(ShiftLeft<16>(upper) + remainder);
}

// `draw`: uniform in [0, 256).
template <class Number, class Word>
SHARDMESH_RULE SplitWeight<Word> SplitStochastic(Number x, Word draw) {
  const SplitWeight<Word> exact = SplitExact(x);
  // (remainder + draw) >> 8 with its sign; 128 is one more of `upper` and 128 less.
  const Word rounded = ShiftRight<8>(exact.remainder + draw + Word(0x8000u)) - Word(0x80u);
  const auto carries = Number(127.5f) < IntToFloat(rounded);
  return {Select(carries, exact.upper + Word(1u), exact.upper), Select(carries, rounded - Word(256u), rounded)};
}

template <class Number, class Word>
SHARDMESH_RULE Number JoinStochastic(Word upper, Word remainder) {
  return FloatOfBits(ShiftLeft<16>(upper) + ShiftLeft<8>(remainder));
}

}  // namespace shardmesh
