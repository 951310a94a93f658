// Number types of 8 fixed lanes over Highway, for the element rules: F32x8 stands for 8 floats, U32x8 for 8 uint32_t,
// U64x4 for 4 uint64_t. Always 8 lanes, whatever the processor could do: the order of draws is made for 8
// (core/base/philox.h). Only for translation units compiled with SIMD_COPTS (kernels/BUILD). Loads and stores need no
// alignment.
#pragma once

#include <hwy/highway.h>
#include <immintrin.h>

#include <cstdint>

static_assert(HWY_TARGET == HWY_AVX2, "compile with SIMD_COPTS of kernels/BUILD");

HWY_BEFORE_NAMESPACE();
namespace shardmesh {
namespace simd8 {

namespace hn = hwy::HWY_NAMESPACE;
using Floats = hn::FixedTag<float, 8>;
using Words = hn::FixedTag<uint32_t, 8>;
using Wides = hn::FixedTag<uint64_t, 4>;
using Halves8 = hn::FixedTag<uint16_t, 8>;
using Halves16 = hn::FixedTag<uint16_t, 16>;

struct U64x4 {
  HWY_INLINE U64x4() = default;
  HWY_INLINE explicit U64x4(uint64_t x) : lanes(hn::Set(Wides(), x)) {}
  HWY_INLINE explicit U64x4(hn::Vec<Wides> x) : lanes(x) {}
  hn::Vec<Wides> lanes;
};
HWY_INLINE U64x4 operator+(U64x4 a, U64x4 b) { return U64x4(hn::Add(a.lanes, b.lanes)); }
HWY_INLINE U64x4 operator^(U64x4 a, U64x4 b) { return U64x4(hn::Xor(a.lanes, b.lanes)); }
template <int kBits>
HWY_INLINE U64x4 ShiftRight(U64x4 a) {
  return U64x4(hn::ShiftRight<kBits>(a.lanes));
}
HWY_INLINE U64x4 MulLow32(U64x4 a, uint32_t multiplier) {
  return U64x4(hn::MulEven(hn::BitCast(Words(), a.lanes), hn::Set(Words(), multiplier)));
}

struct U32x8 {
  HWY_INLINE U32x8() = default;
  HWY_INLINE explicit U32x8(uint32_t x) : lanes(hn::Set(Words(), x)) {}
  HWY_INLINE explicit U32x8(hn::Vec<Words> x) : lanes(x) {}
  hn::Vec<Words> lanes;
};
HWY_INLINE U32x8 operator+(U32x8 a, U32x8 b) { return U32x8(hn::Add(a.lanes, b.lanes)); }
HWY_INLINE U32x8 operator-(U32x8 a, U32x8 b) { return U32x8(hn::Sub(a.lanes, b.lanes)); }
HWY_INLINE U32x8 operator&(U32x8 a, U32x8 b) { return U32x8(hn::And(a.lanes, b.lanes)); }
HWY_INLINE U32x8 operator|(U32x8 a, U32x8 b) { return U32x8(hn::Or(a.lanes, b.lanes)); }
template <int kBits>
HWY_INLINE U32x8 ShiftLeft(U32x8 a) {
  return U32x8(hn::ShiftLeft<kBits>(a.lanes));
}
template <int kBits>
HWY_INLINE U32x8 ShiftRight(U32x8 a) {
  return U32x8(hn::ShiftRight<kBits>(a.lanes));
}
// Lane 2i from the low half of even's lane i, lane 2i + 1 from the low half of odd's.
HWY_INLINE U32x8 Interleave(U64x4 even, U64x4 odd) {
  return U32x8(hn::OddEven(hn::BitCast(Words(), hn::ShiftLeft<32>(odd.lanes)), hn::BitCast(Words(), even.lanes)));
}

struct F32x8 {
  HWY_INLINE F32x8() = default;
  HWY_INLINE explicit F32x8(float x) : lanes(hn::Set(Floats(), x)) {}
  HWY_INLINE explicit F32x8(hn::Vec<Floats> x) : lanes(x) {}
  hn::Vec<Floats> lanes;
};
HWY_INLINE F32x8 operator+(F32x8 a, F32x8 b) { return F32x8(hn::Add(a.lanes, b.lanes)); }
HWY_INLINE F32x8 operator-(F32x8 a, F32x8 b) { return F32x8(hn::Sub(a.lanes, b.lanes)); }
HWY_INLINE F32x8 operator*(F32x8 a, F32x8 b) { return F32x8(hn::Mul(a.lanes, b.lanes)); }
HWY_INLINE F32x8 MulAdd(F32x8 a, F32x8 b, F32x8 c) { return F32x8(hn::MulAdd(a.lanes, b.lanes, c.lanes)); }
HWY_INLINE F32x8 Sqrt(F32x8 a) { return F32x8(hn::Sqrt(a.lanes)); }
HWY_INLINE F32x8 Divide(F32x8 a, F32x8 b) { return F32x8(hn::Div(a.lanes, b.lanes)); }
HWY_INLINE U32x8 FloatBits(F32x8 a) { return U32x8(hn::BitCast(Words(), a.lanes)); }
HWY_INLINE U32x8 IfNan(F32x8 a, U32x8 bits_if_nan, U32x8 bits) {
  return U32x8(hn::IfThenElse(hn::RebindMask(Words(), hn::IsNaN(a.lanes)), bits_if_nan.lanes, bits.lanes));
}
HWY_INLINE F32x8 FloatOfBits(U32x8 a) { return F32x8(hn::BitCast(Floats(), a.lanes)); }
HWY_INLINE F32x8 Abs(F32x8 a) { return F32x8(hn::Abs(a.lanes)); }

struct Mask8 {
  hn::Mask<Floats> lanes;
};
HWY_INLINE Mask8 operator<(F32x8 a, F32x8 b) { return {hn::Lt(a.lanes, b.lanes)}; }
HWY_INLINE Mask8 operator<=(F32x8 a, F32x8 b) { return {hn::Le(a.lanes, b.lanes)}; }
HWY_INLINE F32x8 Select(Mask8 mask, F32x8 yes, F32x8 no) {
  return F32x8(hn::IfThenElse(mask.lanes, yes.lanes, no.lanes));
}
HWY_INLINE U32x8 Select(Mask8 mask, U32x8 yes, U32x8 no) {
  return U32x8(hn::IfThenElse(hn::RebindMask(Words(), mask.lanes), yes.lanes, no.lanes));
}
HWY_INLINE U32x8 AddWhere(Mask8 mask, U32x8 a) {
  return U32x8(hn::Sub(a.lanes, hn::VecFromMask(Words(), hn::RebindMask(Words(), mask.lanes))));
}
HWY_INLINE U32x8 WithSignOf(U32x8 a, F32x8 b) {
  return U32x8(hn::Vec<Words>{_mm256_sign_epi32(a.lanes.raw, _mm256_castps_si256(b.lanes.raw))});
}
// The negative of 2.0f's bits as an integer has the bits of -2.0f.
HWY_INLINE U32x8 SignedTwo(U32x8 a) {
  return U32x8(hn::Vec<Words>{_mm256_sign_epi32(_mm256_set1_epi32(0x40000000), a.lanes.raw)});
}
HWY_INLINE U32x8 SubtractOrZero16(U32x8 a, U32x8 b) {
  return U32x8(hn::Vec<Words>{_mm256_subs_epu16(a.lanes.raw, b.lanes.raw)});
}
HWY_INLINE U32x8 MulHigh16(U32x8 a, U32x8 b) {
  return U32x8(hn::Vec<Words>{_mm256_mulhi_epu16(a.lanes.raw, b.lanes.raw)});
}
// Of integers.
HWY_INLINE U32x8 MaxInt(U32x8 a, U32x8 b) { return U32x8(hn::Vec<Words>{_mm256_max_epi32(a.lanes.raw, b.lanes.raw)}); }
HWY_INLINE U32x8 MinInt(U32x8 a, U32x8 b) { return U32x8(hn::Vec<Words>{_mm256_min_epi32(a.lanes.raw, b.lanes.raw)}); }
// The second operand of the processor's own instruction is what a NaN gives.
HWY_INLINE F32x8 Max(F32x8 a, F32x8 b) { return F32x8(hn::Vec<Floats>{_mm256_max_ps(b.lanes.raw, a.lanes.raw)}); }
HWY_INLINE F32x8 Min(F32x8 a, F32x8 b) { return F32x8(hn::Vec<Floats>{_mm256_min_ps(b.lanes.raw, a.lanes.raw)}); }
HWY_INLINE U32x8 RoundToInt(F32x8 a) { return U32x8(hn::Vec<Words>{_mm256_cvtps_epi32(a.lanes.raw)}); }
HWY_INLINE U32x8 TruncateToInt(F32x8 a) { return U32x8(hn::Vec<Words>{_mm256_cvttps_epi32(a.lanes.raw)}); }
HWY_INLINE F32x8 IntToFloat(U32x8 a) {
  return F32x8(hn::ConvertTo(Floats(), hn::BitCast(hn::RebindToSigned<Words>(), a.lanes)));
}
// The permutation reads the low three bits of an index.
HWY_INLINE F32x8 Lookup8(const float* table, U32x8 index) {
  return F32x8(hn::Vec<Floats>{_mm256_permutevar8x32_ps(hn::LoadU(Floats(), table).raw, index.lanes.raw)});
}
// Lane i: the largest of a[i]'s lanes.
HWY_INLINE F32x8 LargestOfEach(const F32x8 (&a)[8]) {
  __m256 pairs[4], fours[2];
  for (int i = 0; i < 4; ++i) {
    const __m256 x = a[2 * i].lanes.raw, y = a[2 * i + 1].lanes.raw;
    pairs[i] = _mm256_max_ps(_mm256_unpacklo_ps(x, y), _mm256_unpackhi_ps(x, y));
  }
  for (int i = 0; i < 2; ++i) {
    const __m256d x = _mm256_castps_pd(pairs[2 * i]), y = _mm256_castps_pd(pairs[2 * i + 1]);
    fours[i] = _mm256_max_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  }
  const __m256 low = _mm256_permute2f128_ps(fours[0], fours[1], 0x20);
  return F32x8(hn::Vec<Floats>{_mm256_max_ps(low, _mm256_permute2f128_ps(fours[0], fours[1], 0x31))});
}
HWY_INLINE float LargestLane(F32x8 a) { return hn::GetLane(hn::MaxOfLanes(Floats(), a.lanes)); }

HWY_INLINE F32x8 Load8(const float* from) { return F32x8(hn::LoadU(Floats(), from)); }
HWY_INLINE U32x8 LoadWords8(const uint32_t* from) { return U32x8(hn::LoadU(Words(), from)); }
HWY_INLINE U32x8 LoadWords8(const uint8_t* from) {
  return U32x8(hn::PromoteTo(Words(), hn::LoadU(hn::FixedTag<uint8_t, 8>(), from)));
}
HWY_INLINE U32x8 LoadWords8(const uint16_t* from) { return U32x8(hn::PromoteTo(Words(), hn::LoadU(Halves8(), from))); }
// The low bytes of words, or their low halves.
HWY_INLINE void StoreBytes8(U32x8 a, uint8_t* to) {
  hn::StoreU(hn::TruncateTo(hn::FixedTag<uint8_t, 8>(), a.lanes), hn::FixedTag<uint8_t, 8>(), to);
}
// The low bytes of 32 words in a row; 0 for negative ones. REQUIRES: all are below 256.
HWY_INLINE __m256i PackBytes(const U32x8 (&a)[4]) {
  const __m256i halves0 = _mm256_packus_epi32(a[0].lanes.raw, a[1].lanes.raw);
  const __m256i halves1 = _mm256_packus_epi32(a[2].lanes.raw, a[3].lanes.raw);
  const __m256i bytes = _mm256_packus_epi16(halves0, halves1);  // in the order of 128-bit halves
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
HWY_INLINE void StoreBytes32(const U32x8 (&a)[4], uint8_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), PackBytes(a));
}
HWY_INLINE void StoreHalves8(U32x8 a, uint16_t* to) { hn::StoreU(hn::TruncateTo(Halves8(), a.lanes), Halves8(), to); }
// bf16: the upper halves of floats. (A broadcast and a shuffle of bytes is one operation outside the load units, and
// none that crosses the 128-bit halves.)
HWY_INLINE F32x8 Load8(const uint16_t* from) {
  const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i places = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                                          -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  return F32x8(hn::Vec<Floats>{_mm256_castsi256_ps(_mm256_shuffle_epi8(twice, places))});
}
HWY_INLINE void Store8(F32x8 a, float* to) { hn::StoreU(a.lanes, Floats(), to); }
// The upper halves of 16 words in a row: what bf16 keeps.
HWY_INLINE hn::Vec<Halves16> UpperHalves(U32x8 first, U32x8 second) {
  return hn::ConcatOdd(Halves16(), hn::BitCast(Halves16(), second.lanes), hn::BitCast(Halves16(), first.lanes));
}

}  // namespace simd8
}  // namespace shardmesh
HWY_AFTER_NAMESPACE();
