#include "core/format/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace shardmesh {
namespace {

TEST(HalfTest, EveryHalf_ComesBack) {
  for (uint32_t half = 0; half < 0x10000; ++half) {
    const float value = HalfToFloat(static_cast<uint16_t>(half));
    const bool nan = (half & 0x7C00) == 0x7C00 && (half & 0x3FF) != 0;
    ASSERT_EQ(std::isnan(value), nan) << half;
    ASSERT_EQ(FloatToHalf(value), nan ? half | 0x200 : half) << half;
  }
}

TEST(HalfTest, Values) {
  EXPECT_EQ(HalfToFloat(0x3C00), 1.0f);
  EXPECT_EQ(HalfToFloat(0xC000), -2.0f);
  EXPECT_EQ(HalfToFloat(0x7BFF), 65504.0f);
  EXPECT_EQ(HalfToFloat(0x0001), 0x1p-24f);
  EXPECT_EQ(HalfToFloat(0x0400), 0x1p-14f);
  EXPECT_EQ(HalfToFloat(0xFC00), -std::numeric_limits<float>::infinity());
}

// Between two neighbours: the nearer one, and of a tie the even one.
TEST(HalfTest, Rounds_ToNearestEven) {
  for (uint32_t half = 0; half < 0x7BFF; ++half) {
    const float low = HalfToFloat(static_cast<uint16_t>(half)), high = HalfToFloat(static_cast<uint16_t>(half + 1));
    const float middle = (low + high) / 2;
    ASSERT_EQ(FloatToHalf(middle), half + half % 2) << half;
    ASSERT_EQ(FloatToHalf(std::nextafter(middle, low)), half) << half;
    ASSERT_EQ(FloatToHalf(-std::nextafter(middle, high)), 0x8000 | (half + 1)) << half;
  }
  EXPECT_EQ(FloatToHalf(std::nextafter(65520.0f, 0.0f)), 0x7BFF);
  EXPECT_EQ(FloatToHalf(65520.0f), 0x7C00);
  EXPECT_EQ(FloatToHalf(-1e30f), 0xFC00);
}

}  // namespace
}  // namespace shardmesh
