#include "core/base/philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <utility>
#include <vector>

namespace shardmesh {
namespace {

struct KnownAnswer {
  uint32_t counter[4];
  PhiloxKey key;
  uint32_t output[4];
};

// The known-answer vectors of Random123 (kat_vectors, philox4x32 10).
TEST(PhiloxTest, KnownAnswersOfRandom123) {
  const KnownAnswer answers[] = {
      {{0, 0, 0, 0}, {{0, 0}}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
       {{0xffffffff, 0xffffffff}},
       {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {{0xa4093822, 0x299f31d0}},
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const KnownAnswer& answer : answers) {
    uint32_t words[4];
    std::copy(answer.counter, answer.counter + 4, words);
    Philox4x32(answer.key, words);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(words[i], answer.output[i]) << i;
  }
}

// The layout spelled out again from the header's table, independent of DrawCounter, DrawWord and DrawShift.
TEST(DrawTest, LayoutIsTheDocumentedOne) {
  const uint64_t seed = 0x0123456789abcdefu;
  const PhiloxKey key = MakePhiloxKey(seed, DrawPurpose::kWeightRounding);
  const uint64_t mixed = seed ^ Mix64(1) ^ Mix64(uint64_t{5} << 32);
  const int64_t step = (int64_t{5} << 32) + 7;
  for (uint64_t group : {uint64_t{0}, uint64_t{1}, uint64_t{1000}, (uint64_t{1} << 29) - 1, (uint64_t{1} << 29) + 3}) {
    for (uint64_t vector = 0; vector < 8; ++vector) {
      for (uint64_t lane = 0; lane < 8; ++lane) {
        const uint64_t number = 8 * group + lane;
        uint32_t words[4] = {static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32), 42, 7};
        Philox4x32({{static_cast<uint32_t>(mixed), static_cast<uint32_t>(mixed >> 32)}}, words);
        const uint32_t word = words[vector % 4];
        const uint32_t want = vector < 4 ? word & 0xFFFF : word >> 16;
        ASSERT_EQ(Draw16(key, step, 42, 64 * group + 8 * vector + lane), want) << group << " " << vector << " " << lane;
      }
    }
  }
}

// Results of every job depend on these bits: they may never change.
TEST(DrawTest, GoldenDraws) {
  const PhiloxKey key = MakePhiloxKey(1234, DrawPurpose::kWeightRounding);
  const uint64_t elements[] = {0, 7, 70, 101, 1u << 20, uint64_t{1} << 40};
  const uint32_t want[] = {62647, 17662, 9799, 43993, 29283, 10432};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(Draw16(key, 3, 9, elements[i]), want[i]) << i;
}

TEST(DrawTest, EveryInputChangesTheDraws) {
  const auto draws = [](uint64_t seed, int64_t step, uint32_t tensor, uint64_t first) {
    std::vector<uint32_t> all;
    for (uint64_t i = 0; i < 64; ++i) {
      all.push_back(Draw16(MakePhiloxKey(seed, DrawPurpose::kWeightRounding), step, tensor, first + i));
    }
    return all;
  };
  std::set<std::vector<uint32_t>> seen;
  for (uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32}) {
    for (int64_t step : {int64_t{0}, int64_t{1}, int64_t{1} << 32}) {
      for (uint32_t tensor : {0u, 1u}) {
        for (uint64_t first : {uint64_t{0}, uint64_t{64}, uint64_t{1} << 35})
          seen.insert(draws(seed, step, tensor, first));
      }
    }
  }
  EXPECT_EQ(seen.size(), 3u * 3 * 2 * 3);
}

// Mean, variance and every bit's balance of a million draws, each within 5 standard deviations.
TEST(DrawTest, IsUniform) {
  constexpr int kDraws = 1 << 20;
  const PhiloxKey key = MakePhiloxKey(99, DrawPurpose::kWeightRounding);
  double sum = 0;
  int ones[16] = {};
  for (int i = 0; i < kDraws; ++i) {
    const uint32_t draw = Draw16(key, 1, 0, i);
    ASSERT_LT(draw, 65536u);
    sum += draw;
    for (int bit = 0; bit < 16; ++bit) ones[bit] += (draw >> bit) & 1;
  }
  EXPECT_NEAR(sum / kDraws, 32767.5, 5 * 65536 / std::sqrt(12.0 * kDraws));
  for (int bit = 0; bit < 16; ++bit) EXPECT_NEAR(ones[bit], kDraws / 2, 5 * std::sqrt(kDraws / 4.0)) << bit;
}

}  // namespace
}  // namespace shardmesh
