#include "core/format/finite.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/base/reduction.h"

namespace shardmesh {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

int64_t FirstOffender(const std::vector<float>& gradients, int num_slots) {
  int64_t first = -1;
  const bool ok = AllFiniteBelow(gradients.data(), Format::kFp32, gradients.size(), num_slots, &first);
  EXPECT_EQ(ok, first == -1);
  return first;
}

int64_t FirstOffender16(const std::vector<uint16_t>& gradients, int num_slots) {
  int64_t first = -1;
  const bool ok = AllFiniteBelow(gradients.data(), Format::kBf16, gradients.size(), num_slots, &first);
  EXPECT_EQ(ok, first == -1);
  return first;
}

TEST(FiniteTest, FindsEveryOffenderAtEveryPlace) {
  for (size_t length : {1u, 2u, 255u, 256u, 257u, 600u}) {
    for (size_t place = 0; place < length; ++place) {
      for (float bad : {kInf, -kInf, kNan, -kNan, FLT_MAX, -FLT_MAX}) {
        std::vector<float> gradients(length, -1.5f);
        gradients[place] = bad;
        ASSERT_EQ(FirstOffender(gradients, 1), static_cast<int64_t>(place)) << length << " " << bad;
        std::vector<uint16_t> halves(length, 0xBFC0);
        halves[place] = static_cast<uint16_t>(FloatBits(bad) >> 16 | 0x40);
        if (std::abs(bad) == FLT_MAX) halves[place] = 0xFF80;
        ASSERT_EQ(FirstOffender16(halves, 1), static_cast<int64_t>(place)) << length << " " << bad;
      }
    }
  }
}

TEST(FiniteTest, ReportsTheFirstOfSeveral) {
  std::vector<float> gradients(1000, 0.25f);
  gradients[999] = gradients[700] = gradients[513] = kNan;
  EXPECT_EQ(FirstOffender(gradients, 2), 513);
}

TEST(FiniteTest, EmptyRunPasses) { EXPECT_EQ(FirstOffender({}, 4), -1); }

TEST(FiniteTest, OrdinaryExtremesPass) {
  EXPECT_EQ(FirstOffender({0.0f, -0.0f, FLT_MIN, -FLT_TRUE_MIN, 1e30f, -1e30f}, 64), -1);
}

// Exactly the bound is refused, one ulp below passes; in bf16 the neighbours of the bound.
TEST(FiniteTest, BoundIsSharp) {
  for (int slots = 1; slots <= 64; ++slots) {
    const float bound = FLT_MAX / static_cast<float>(slots);
    const float below = std::nextafter(bound, 0.0f);
    EXPECT_EQ(FirstOffender({below, -below, bound}, slots), 2) << slots;
    EXPECT_EQ(FirstOffender({below, -bound, bound}, slots), 1) << slots;
    for (uint32_t half = 0x7C00; half < 0x7F80; ++half) {
      const bool passes = Bf16ToFloat(static_cast<uint16_t>(half)) < bound;
      ASSERT_EQ(FirstOffender16({static_cast<uint16_t>(half | 0x8000)}, slots) == -1, passes) << slots << " " << half;
    }
  }
}

// What the check promises: the sum of the largest accepted gradients is finite for every number of slots. The tree is
// monotonic in every slot, so this is the worst case.
TEST(FiniteTest, LargestAcceptedGradientsDoNotOverflow) {
  for (int slots = 1; slots <= 4096; ++slots) {
    const float largest = FloatOfBits(RefusedMagnitudeBits(slots) - 1);
    ASSERT_TRUE(std::isfinite(TreeSum<float>(slots, [&](int) { return largest; }))) << slots;
  }
}

}  // namespace
}  // namespace shardmesh
