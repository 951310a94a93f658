// Lanes and draws of 8 floats at a time (kernels/simd8.h). Only for translation units compiled for AVX2 and FMA.
#pragma once

#include "kernels/simd8.h"
#include "kernels/tile/draws.h"

HWY_BEFORE_NAMESPACE();
namespace shardmesh {

template <>
struct Lanes<simd8::F32x8> {
  using Number = simd8::F32x8;
  using Word = simd8::U32x8;
  static constexpr int kWidth = 8;

  static HWY_INLINE Number Load(const float* from) { return simd8::Load8(from); }
  static HWY_INLINE void Store(Number x, float* to) { simd8::Store8(x, to); }
  static HWY_INLINE Number LoadBf16(const uint16_t* from) { return simd8::Load8(from); }
  static HWY_INLINE Word LoadBytes(const uint8_t* from) { return simd8::LoadWords8(from); }
  static HWY_INLINE Word LoadHalves(const uint16_t* from) { return simd8::LoadWords8(from); }
  static HWY_INLINE Word LoadWords(const uint32_t* from) { return simd8::LoadWords8(from); }
  static HWY_INLINE void StoreBytes(Word x, uint8_t* to) { simd8::StoreBytes8(x, to); }
  static HWY_INLINE void StoreHalves(Word x, uint16_t* to) { simd8::StoreHalves8(x, to); }
  static HWY_INLINE float Largest(Number x) { return simd8::LargestLane(x); }
};

// Four even and four odd counters at a time, in 64-bit lanes.
template <>
struct DrawFiller<simd8::F32x8> {
  static HWY_INLINE void Fill(const DrawStream& stream, uint64_t first_element, TileDraws& draws) {
    using simd8::U64x4;
    alignas(32) static constexpr uint64_t kEvenLanes[4] = {0, 2, 4, 6};
    for (int group = 0; group < kTileElements / 64; ++group) {
      const uint64_t number = DrawCounter(first_element + 64 * static_cast<uint64_t>(group));
      const U64x4 low = U64x4(number) + U64x4(simd8::hn::Load(simd8::Wides(), kEvenLanes));
      const U64x4 high(number >> 32), tensor(uint64_t{stream.tensor}), step(uint64_t{stream.step});
      U64x4 even[4] = {low, high, tensor, step};
      U64x4 odd[4] = {low + U64x4(uint64_t{1}), high, tensor, step};
#pragma GCC unroll 10
      for (uint32_t round = 0; round < kPhiloxRounds; ++round) {
        const U64x4 key0(uint64_t{stream.key.words[0] + round * kPhiloxKeyStep0});
        const U64x4 key1(uint64_t{stream.key.words[1] + round * kPhiloxKeyStep1});
        PhiloxRound(even, key0, key1);
        PhiloxRound(odd, key0, key1);
      }
      for (int w = 0; w < 4; ++w) {
        simd8::hn::StoreU(simd8::Interleave(even[w], odd[w]).lanes, simd8::Words(), draws.words[group][w]);
      }
    }
  }
};

}  // namespace shardmesh
HWY_AFTER_NAMESPACE();
