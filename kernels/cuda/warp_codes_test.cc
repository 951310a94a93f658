// What warps do in another way than other implementations gives the same bits: the codes of 8-bit floats, draws, and
// sums of slots. Walked on the CPU; what a device does otherwise is in kernels/cuda/warp_numbers_cuda_test.cc.
#include "kernels/cuda/warp_codes.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "kernels/cpu/fp_environment.h"
#include "kernels/cuda/warp_pieces.h"

namespace shardmesh {
namespace {

using First = Fp8<float, /*kSigned=*/true, 32, /*kWide=*/true>;
using Second = Fp8<float, /*kSigned=*/false, 32, /*kWide=*/true>;
using SecondOf256 = Fp8<float, /*kSigned=*/false, 256, /*kWide=*/false>;

TEST(WarpCodes, EveryCode_IsDecodedAsByTheRule) {
  const ScopedFpEnvironment environment;
  for (uint32_t code = 0; code < 256; ++code) {
    for (int k = 0; k < 4; ++k) {
      const uint32_t others = 0x5A3C96F1u & ~(0xFFu << (8 * k));
      const uint32_t word = others | code << (8 * k);
      const auto first = DecodeFp8At<E4M3, true>(word, k), second = DecodeFp8At<UE5M3, false>(word, k);
      const auto of_256 = DecodeFp8At<E4M3, false>(word, k);
      EXPECT_EQ(FloatBits(first), FloatBits(First::Decode(code))) << "code " << code << " at " << k;
      EXPECT_EQ(FloatBits(second), FloatBits(Second::Decode(code))) << "code " << code << " at " << k;
      EXPECT_EQ(FloatBits(of_256), FloatBits(SecondOf256::Decode(code))) << "code " << code << " at " << k;
    }
  }
}

// Every exponent, with the mantissas around those at which the next code begins, and with any.
TEST(WarpCodes, SecondMoments_AreEncodedAsByTheRule) {
  const ScopedFpEnvironment environment;
  const uint64_t seed = std::random_device()();
  std::mt19937_64 random(seed);
  for (uint32_t exponent = 0; exponent < 256; ++exponent) {
    std::vector<uint32_t> mantissas = {0, 1, 0x7FFFFF, 0x7FFFFE};
    for (uint32_t step = 1; step < 16; ++step) {
      for (const uint32_t off : {0u, 1u, ~0u}) mantissas.push_back(((step << 19) + off) & 0x7FFFFF);
    }
    for (int i = 0; i < 2000; ++i) mantissas.push_back(static_cast<uint32_t>(random()) & 0x7FFFFF);
    for (const uint32_t mantissa : mantissas) {
      const float y = FloatOfBits(exponent << 23 | mantissa);
      for (const auto draw : {0u, 1u, 0x8000u, 0xFFFFu, static_cast<uint32_t>(random()) & 0xFFFFu}) {
        ASSERT_EQ(EncodeFp8Sr<UE5M3>(y, static_cast<float>(draw)), Second::Encode(y, draw))
            << "bits " << FloatBits(y) << ", draw " << draw << ", seed " << seed;
      }
    }
  }
}

TEST(WarpCodes, Philox_IsPhilox) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 1000; ++i) {
    const PhiloxKey key = {{static_cast<uint32_t>(random()), static_cast<uint32_t>(random())}};
    uint32_t expected[4], words[4];
    for (int w = 0; w < 4; ++w) expected[w] = words[w] = static_cast<uint32_t>(random());
    Philox4x32(key, expected);
    WarpPhilox(key, words);
    for (int w = 0; w < 4; ++w) ASSERT_EQ(words[w], expected[w]) << "word " << w;
  }
}

template <bool kInARow>
void ExpectTreeSums(bool wide, bool aligned) {
  constexpr int64_t kTile = 256, kFirst = 2 * kTile;
  std::mt19937 random(9);
  for (const int num_slots : {1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 31, 64}) {
    for (const int elements : {1, 6, 255, 256}) {
      // Elements that are not there are behind the end of the memory.
      const int64_t bytes = (kFirst + elements) * (wide ? 4 : 2), begin = aligned ? 0 : wide ? 4 : 2;
      std::vector<std::vector<uint8_t>> memory;
      std::vector<const void*> slots;
      for (int s = 0; s < num_slots; ++s) {
        std::vector<uint8_t>& slot = memory.emplace_back(begin + bytes);
        for (int64_t i = 0; i < kFirst + elements; ++i) {
          const float x = static_cast<float>(static_cast<int32_t>(random())) * 1e-7f;
          const uint16_t half = FloatToBf16Rne(x);
          if (wide) std::memcpy(slot.data() + begin + 4 * i, &x, 4);
          if (!wide) std::memcpy(slot.data() + begin + 2 * i, &half, 2);
        }
        slots.push_back(slot.data() + begin);
      }
      alignas(16) float sums[kTile];
      std::memset(sums, 0xFF, sizeof(sums));
      for (int lane = 0; lane < 32; ++lane) {
        SumSlots<kInARow>(slots.data(), num_slots, wide, kFirst, elements, lane, sums);
      }
      for (int i = 0; i < kTile; ++i) {
        const float expected = i >= elements ? 0 : TreeSum<float>(num_slots, [&](int s) {
          return wide ? static_cast<const float*>(slots[s])[kFirst + i]
                      : Bf16ToFloat(static_cast<const uint16_t*>(slots[s])[kFirst + i]);
        });
        ASSERT_EQ(FloatBits(sums[i]), FloatBits(expected))
            << num_slots << " slots, element " << i << " of " << elements;
      }
    }
  }
}

TEST(WarpCodes, SumsOfSlots_AreTreeSums) {
  for (const bool wide : {false, true}) {
    for (const bool aligned : {false, true}) {
      ExpectTreeSums<true>(wide, aligned);
      ExpectTreeSums<false>(wide, aligned);
    }
  }
}

}  // namespace
}  // namespace shardmesh
