// The number types of the element rules. A rule is a template over a number type and is written with the operations
// below alone, each one IEEE operation rounded to nearest or an exact one on bits: so every number type computes the
// same bits (-ffp-contract=off, -fmad=false, subnormals kept).
//
//   floats     float: the reference, and the CUDA kernels          or a vector of floats: kernels/cpu/simd8.h
//   words      uint32_t                                            or a vector of words
//   masks      bool                                                or a vector of them
//
//   a + b, a - b, a * b, MulAdd, Sqrt, Divide, Abs, a < b, a <= b (floats)     a + b, a - b, a & b, a | b (words)
//   Select(mask, x, y), ShiftLeft<n>, ShiftRight<n>, FloatBits, FloatOfBits, RoundToInt, TruncateToInt, IntToFloat
//   Lookup8(table, word): entry (word & 7) of 8 floats
//   MinInt, MaxInt, AddWhere(mask, word), WithSignOf(word, x), SignedTwo(word), MulHigh16(words),
//   SubtractOrZero16(words)
// Integers are words in two's complement. Pure functions, thread-safe.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/base/host_device.h"
#include "core/format/format.h"

// Before a loop: do `times` of its iterations at once.
#ifdef __CUDACC__
#define SHARDMESH_UNROLL(times)
#else
#define SHARDMESH_PRAGMA(text) _Pragma(#text)
#define SHARDMESH_UNROLL(times) SHARDMESH_PRAGMA(GCC unroll times)
#endif

namespace shardmesh {

// a * b + c, rounded once.
SHARDMESH_RULE float MulAdd(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

SHARDMESH_RULE float Sqrt(float x) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(x);
#else
  return std::sqrt(x);
#endif
}

SHARDMESH_RULE float Divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

SHARDMESH_RULE float Abs(float x) { return FloatOfBits(FloatBits(x) & 0x7FFFFFFFu); }

// The larger; `a` when one of the two is NaN.
SHARDMESH_RULE float Max(float a, float b) { return a < b ? b : a; }
// The smaller; `a` when one of the two is NaN.
SHARDMESH_RULE float Min(float a, float b) { return b < a ? b : a; }

SHARDMESH_RULE float Select(bool mask, float yes, float no) { return mask ? yes : no; }
SHARDMESH_RULE uint32_t Select(bool mask, uint32_t yes, uint32_t no) { return mask ? yes : no; }

template <int kBits>
SHARDMESH_RULE uint32_t ShiftLeft(uint32_t x) {
  return x << kBits;
}

// To the nearest integer, ties to even. REQUIRES: |x| < 2^31.
SHARDMESH_RULE uint32_t RoundToInt(float x) {
#ifdef __CUDA_ARCH__
  return static_cast<uint32_t>(__float2int_rn(x));
#else
  return static_cast<uint32_t>(static_cast<int32_t>(std::lrint(x)));
#endif
}

// Of integers.
SHARDMESH_RULE uint32_t MinInt(uint32_t a, uint32_t b) {
  return static_cast<int32_t>(b) < static_cast<int32_t>(a) ? b : a;
}
SHARDMESH_RULE uint32_t MaxInt(uint32_t a, uint32_t b) {
  return static_cast<int32_t>(a) < static_cast<int32_t>(b) ? b : a;
}

// One more where the mask is set.
SHARDMESH_RULE uint32_t AddWhere(bool mask, uint32_t x) { return mask ? x + 1 : x; }

// `x`, or its negative where y's sign is set; where y is +0, 0 or x. REQUIRES: 0 <= x < 2^31.
SHARDMESH_RULE uint32_t WithSignOf(uint32_t x, float y) { return FloatBits(y) >> 31 != 0 ? 0u - x : x; }

// The bits of 2.0f with the sign of an integer, 0 for 0.
SHARDMESH_RULE uint32_t SignedTwo(uint32_t x) { return x == 0 ? 0u : 0x40000000u | (x & 0x80000000u); }

// a - b, or 0 where b is larger; the upper half of a * b. REQUIRES: both are below 2^16.
SHARDMESH_RULE uint32_t SubtractOrZero16(uint32_t a, uint32_t b) { return a < b ? 0 : a - b; }
SHARDMESH_RULE uint32_t MulHigh16(uint32_t a, uint32_t b) { return a * b >> 16; }

// Towards zero. REQUIRES: |x| < 2^31.
SHARDMESH_RULE uint32_t TruncateToInt(float x) { return static_cast<uint32_t>(static_cast<int32_t>(x)); }

// REQUIRES: below 2^24 in magnitude where the result has to be exact; beyond it is rounded to nearest.
SHARDMESH_RULE float IntToFloat(uint32_t x) {
#ifdef __CUDA_ARCH__
  return __int2float_rn(static_cast<int32_t>(x));
#else
  return static_cast<float>(static_cast<int32_t>(x));
#endif
}

SHARDMESH_RULE float Lookup8(const float* table, uint32_t word) { return table[word & 7]; }

}  // namespace shardmesh
