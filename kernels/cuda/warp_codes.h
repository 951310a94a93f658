// The 8-bit floats of states as threads of kernels/cuda/warp_step_body.h read and write them: the bits of
// kernels/tile/states.h in fewer instructions. Pure functions, thread-safe.
//
// A float whose exponent is as much smaller as its bias is larger has the code in its upper bits, subnormal codes
// included: one multiplication by a power of two takes one to the other. It is exact because subnormals are kept.
#pragma once

#include <type_traits>

#include "kernels/cuda/warp_pieces.h"
#include "kernels/tile/states.h"

namespace shardmesh {

template <class Code>
inline constexpr bool kIsFp8 = false;
template <bool kSigned, int64_t kElements, bool kWide>
inline constexpr bool kIsFp8<Fp8<float, kSigned, kElements, kWide>> = true;
template <class Code>
inline constexpr bool kIsSignedFp8 = false;
template <int64_t kElements, bool kWide>
inline constexpr bool kIsSignedFp8<Fp8<float, true, kElements, kWide>> = true;

// Code `k` of four in a word; Code::Decode. `kSigned`: the state has a sign.
template <class Mini, bool kSigned>
SHARDMESH_RULE float DecodeFp8At(uint32_t word, int k) {
  constexpr uint32_t kKept = kSigned ? 0x87F00000u : Mini::kSigned ? 0x07F00000u : 0x0FF00000u;
  const uint32_t upper = word << (24 - 8 * k);
  const uint32_t moved = kSigned ? static_cast<uint32_t>(static_cast<int32_t>(upper) >> 4) : upper >> 4;
  const float value = FloatOfBits(moved & kKept) * PowerOfTwo(127 - Mini::kBias);
  if constexpr (Mini::kSigned) return value;
#ifdef __CUDA_ARCH__
  return fminf(value, Mini::kLargest);
#else
  return Min(value, Mini::kLargest);
#endif
}

// Four codes in a word; Code::Decode of each.
template <class Code, bool kSigned>
SHARDMESH_RULE void DecodeFp8(uint32_t word, float (&to)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if constexpr (kIsSignedFp8<Code>) {
    SHARDMESH_UNROLL_WHOLE
    for (int p = 0; p < 2; ++p) {
      uint32_t halves;
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(word >> (16 * p))));
      asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high;\n}"
          : "=f"(to[2 * p]), "=f"(to[2 * p + 1])
          : "r"(halves));
    }
  } else
#endif
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<typename Code::Mini, UE5M3>) {
    // The upper bytes of half floats, but for the sign that those have.
    const uint32_t pairs[2] = {Bytes<0x1404>(word, 0) >> 1, Bytes<0x3424>(word, 0) >> 1};
    SHARDMESH_UNROLL_WHOLE
    for (int p = 0; p < 2; ++p) {
      asm("{\n .reg .b32 kept;\n .reg .b16 low, high;\n min.f16x2 kept, %2, %3;\n mov.b32 {low, high}, kept;\n"
          " cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high;\n}"
          : "=f"(to[2 * p]), "=f"(to[2 * p + 1])
          : "r"(pairs[p]), "r"(0x7B807B80u));  // the largest, twice
    }
  } else
#endif
  {
    SHARDMESH_UNROLL_WHOLE
    for (int k = 0; k < 4; ++k) to[k] = DecodeFp8At<typename Code::Mini, kSigned>(word, k);
  }
}

// Code::Encode of a second moment of fp8x32. `draw`: as a float.
template <class Mini>
SHARDMESH_RULE uint32_t EncodeFp8Sr(float y, float draw) {
  static_assert(!Mini::kSigned);
  const float power = FloatOfBits(FloatBits(y) & 0x7F800000u);
  constexpr float kLeastPower = PowerOfTwo(1 - Mini::kBias), kDrawStep = PowerOfTwo(-Mini::kMantissa - 16);
#ifdef __CUDA_ARCH__
  const float kept = fminf(__fmaf_rn(draw, fmaxf(kLeastPower, power) * kDrawStep, y), Mini::kLargest);
  const float cut = __fmul_rz(kept, PowerOfTwo(Mini::kBias - 127));
#else
  const float moved = MulAdd(draw, Max(kLeastPower, power) * kDrawStep, y);
  const float kept = moved < Mini::kLargest ? moved : Mini::kLargest;
  // Bits that no code has are cut first, so that the product is not rounded up.
  const float cut = FloatOfBits(FloatBits(kept) & 0xFFFF0000u) * PowerOfTwo(Mini::kBias - 127);
#endif
  return MaxInt(MinInt(FloatBits(y), 1u), FloatBits(cut) >> (23 - Mini::kMantissa));
}

// The same of four in a word, where the shortest way is right: over their scale they are normal numbers of the code,
// and none is above its largest. `x`: not over their scale yet, whose inverse is a power of two. `words`: with the
// draws in their lower or upper halves. A float's bits and the draw add up to the code's, with a carry where the draw
// takes the number to the next power of two.
template <class Mini>
SHARDMESH_RULE bool AreNormal(const float (&x)[4], float scale) {
  const float least = scale * PowerOfTwo(1 - Mini::kBias);
  bool normal = true;
  for (int k = 0; k < 4; ++k) normal &= x[k] >= least;  // a NaN is not
  return normal;
}
template <class Mini>
SHARDMESH_RULE uint32_t EncodeNormalSr(const float (&x)[4], float inverse, const uint32_t (&words)[4], bool upper) {
  static_assert(!Mini::kSigned && Mini::kMantissa == 3);
  constexpr uint32_t kOne = 0x3F800000u, kMoved = uint32_t{127 - Mini::kBias} << 23;
  const uint32_t power = (FloatBits(inverse) - kOne - kMoved) << 4;
  uint32_t moved[4];
  SHARDMESH_UNROLL_WHOLE
  for (int k = 0; k < 4; ++k) moved[k] = (FloatBits(x[k]) << 4) + HalfWithin(words[k], upper, power);
  return BytesOfFour<3>(moved);
}

// Four codes in a word; Code::Encode of each, where it needs no draws.
template <class Code>
SHARDMESH_RULE uint32_t EncodeFp8(const float (&y)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if constexpr (kIsSignedFp8<Code>) {
    // To nearest, ties to even, beyond the largest: the largest. The rule's NaN is the largest, too.
    uint16_t pairs[2];
    for (int p = 0; p < 2; ++p) {
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
          : "=h"(pairs[p])
          : "f"(fminf(y[2 * p + 1], E4M3::kLargest)), "f"(fminf(y[2 * p], E4M3::kLargest)));
    }
    return pairs[0] | static_cast<uint32_t>(pairs[1]) << 16;
  } else
#endif
  {
    uint32_t word = 0;
    for (int k = 0; k < 4; ++k) word |= (Code::Encode(y[k], 0u) & 0xFFu) << (8 * k);
    return word;
  }
}

// Divide(1, scale) of BlockScale's scales.
template <class Code>
SHARDMESH_RULE float InverseOfScale(float scale) {
  if constexpr (kShortScales<Code>) return FloatOfBits(0x7F000000u - FloatBits(scale));  // a power of two
  if constexpr (!kShortScales<Code>) return Divide(1.0f, scale);
}

}  // namespace shardmesh
