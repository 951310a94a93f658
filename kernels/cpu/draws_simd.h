// The random words (core/base/philox.h) of 64 elements at a time, with 8 lanes: four even and four odd counters in
// 64-bit lanes. Only for translation units compiled for AVX2 and FMA. For one thread.
#pragma once

#include "core/base/philox.h"
#include "kernels/cpu/simd8.h"

HWY_BEFORE_NAMESPACE();
namespace shardmesh::simd8 {

// Of one tensor at one step, for one purpose. What lanes have in common is computed once: the round keys, and of the
// first two rounds whatever the counter's low word does not reach yet.
class GroupDraws {
 public:
  // `key`: the step's (KeyOfStep). `step`: its low 32 bits.
  HWY_INLINE GroupDraws(PhiloxKey key, uint32_t tensor, uint32_t step) : key_(key), tensor_(tensor), step_(step) {
    for (uint32_t round = 0; round < kPhiloxRounds; ++round) {
      Spread(KeyWord(0, round), keys_[round][0]);
      Spread(KeyWord(1, round), keys_[round][1]);
    }
  }

  // The output words of the group that `element`, a multiple of 64, begins.
  HWY_INLINE void Fill(uint64_t element, U32x8 (&words)[4]) {
    alignas(32) static constexpr uint64_t kEvenLanes[4] = {0, 2, 4, 6};
    const uint64_t number = DrawCounter(element);  // a multiple of 8: no lane carries into the high word
    if (number >> 32 != high_) Prepare(number >> 32);
    const U64x4 counters = U64x4(number) + Wide(kEvenLanes);
    U64x4 even[4], odd[4];
    const U64x4 product = MulLow32(counters, kPhiloxMultiplier0);
    SecondRound(product, even);
    SecondRound(product + U64x4(uint64_t{kPhiloxMultiplier0}), odd);  // of the counter after it
#pragma GCC unroll 8
    for (int round = 2; round < kPhiloxRounds; ++round) {
      const U64x4 key0 = Wide(keys_[round][0]), key1 = Wide(keys_[round][1]);
      PhiloxRound(even, key0, key1);
      PhiloxRound(odd, key0, key1);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) words[i] = Interleave(even[i], odd[i]);
  }

  // The draws of vector `vector` (0 to 7) of the group, uniform in [0, 65536).
  static HWY_INLINE U32x8 Of(const U32x8 (&words)[4], int vector) {
    return vector < 4 ? words[vector] & U32x8(0xFFFFu) : ShiftRight<16>(words[vector - 4]);
  }

 private:
  static HWY_INLINE U64x4 Wide(const uint64_t (&from)[4]) { return U64x4(hn::Load(Wides(), from)); }
  static HWY_INLINE void Spread(uint64_t x, uint64_t (&to)[4]) {
    for (uint64_t& lane : to) lane = x;
  }
  HWY_INLINE uint64_t KeyWord(int word, uint32_t round) const {
    return static_cast<uint32_t>(key_.words[word] + round * (word == 0 ? kPhiloxKeyStep0 : kPhiloxKeyStep1));
  }

  // The words after round 1, but for what depends on the low word of the counter.
  HWY_NOINLINE void Prepare(uint64_t high) {
    high_ = high;
    const uint64_t product = shardmesh::MulLow32(tensor_, kPhiloxMultiplier1);
    const uint64_t first = shardmesh::MulLow32((product >> 32) ^ high ^ KeyWord(0, 0), kPhiloxMultiplier0);
    Spread(step_ ^ KeyWord(1, 0), first_);
    Spread(product ^ KeyWord(0, 1), second_[0]);
    Spread((first >> 32) ^ KeyWord(1, 1), second_[1]);
    Spread(first, second_[2]);
  }

  // The words after round 1 of counters whose low words' product is `product`.
  HWY_INLINE void SecondRound(U64x4 product, U64x4 (&words)[4]) const {
    words[1] = MulLow32(ShiftRight<32>(product) ^ Wide(first_), kPhiloxMultiplier1);
    words[0] = ShiftRight<32>(words[1]) ^ Wide(second_[0]);
    words[2] = product ^ Wide(second_[1]);
    words[3] = Wide(second_[2]);
  }

  alignas(32) uint64_t keys_[kPhiloxRounds][2][4];
  alignas(32) uint64_t first_[4], second_[3][4];
  const PhiloxKey key_;
  const uint64_t tensor_, step_;
  uint64_t high_ = ~uint64_t{0};  // nothing is prepared yet
};

// As kernels/tile/draws.h keeps a group's.
HWY_INLINE void KeepDraws(const U32x8 (&words)[4], uint32_t (&to)[4][8]) {
  for (int w = 0; w < 4; ++w) hn::StoreU(words[w].lanes, Words(), to[w]);
}

}  // namespace shardmesh::simd8
HWY_AFTER_NAMESPACE();
