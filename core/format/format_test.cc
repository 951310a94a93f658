#include "core/format/format.h"

#include <cmath>
#include <limits>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

TEST(FormatTest, NamesRoundTrip) {
  for (Format format : {Format::kFp32, Format::kBf16, Format::kBf16Sr}) {
    ASSERT_OK_AND_ASSIGN(Format parsed, ParseFormat(FormatName(format)));
    EXPECT_EQ(parsed, format);
  }
  EXPECT_EQ(FormatName(static_cast<Format>(77)), "unknown");
}

TEST(FormatTest, Parse_UnknownName_ErrorListsTheKnownOnes) {
  for (const char* name : {"", "BF16", "bf16 ", "fp16", "unknown"}) {
    EXPECT_THAT(ParseFormat(name), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("fp32, bf16, bf16_sr")))
        << name;
  }
}

TEST(FormatTest, BytesPerElement) {
  EXPECT_EQ(BytesPerElement(Format::kFp32), 4);
  EXPECT_EQ(BytesPerElement(Format::kBf16), 2);
  EXPECT_EQ(BytesPerElement(Format::kBf16Sr), 2);
}

// Every bf16 value, all 65,536 of them, survives the way to fp32 and back in both rounding modes with any draw.
TEST(Bf16Test, EveryValueIsExact) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float x = Bf16ToFloat(half);
    const uint16_t want = std::isnan(x) ? kBf16Nan : half;
    ASSERT_EQ(FloatToBf16Rne(x), want) << bits;
    for (uint32_t draw : {0u, 1u, 0x8000u, 0xFFFFu})
      ASSERT_EQ(FloatToBf16Sr(x, draw), want) << bits << " draw " << draw;
  }
}

// Between any two neighbours: below the middle down, above it up, in the middle to the even one.
TEST(Bf16Test, RneRoundsToNearestEven) {
  for (uint32_t sign : {0u, 0x8000u}) {
    for (uint32_t low = 0; low < 0x7F80; ++low) {
      const uint32_t bits = (sign | low) << 16;
      const uint32_t even = low % 2 == 0 ? low : low + 1;
      ASSERT_EQ(FloatToBf16Rne(FloatOfBits(bits | 0x7FFF)), sign | low);
      ASSERT_EQ(FloatToBf16Rne(FloatOfBits(bits | 0x8000)), sign | even);
      ASSERT_EQ(FloatToBf16Rne(FloatOfBits(bits | 0x8001)), sign | (low + 1));
    }
  }
}

// Over all 65,536 draws, exactly `dropped` of them round away from zero: the expected value is exact.
TEST(Bf16Test, SrProbabilityIsTheDroppedFraction) {
  for (uint32_t base : {0x3F80u, 0xBF81u, 0x0001u, 0x7F7Fu, 0x8000u}) {
    for (uint32_t dropped : {0u, 1u, 0x1234u, 0x8000u, 0xFFFFu}) {
      uint32_t ups = 0;
      for (uint32_t draw = 0; draw < 0x10000; ++draw) {
        const uint32_t rounded = FloatToBf16Sr(FloatOfBits(base << 16 | dropped), draw);
        ASSERT_TRUE(rounded == base || rounded == base + 1) << base << " " << dropped << " " << draw;
        ups += rounded - base;
      }
      EXPECT_EQ(ups, dropped) << base;
    }
  }
}

TEST(Bf16Test, NansOfEverySignAndPayloadBecomeOne) {
  for (uint32_t bits : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0xFF800001u, 0x7FFFFFFFu, 0xFFFFFFFFu}) {
    EXPECT_EQ(FloatToBf16Rne(FloatOfBits(bits)), kBf16Nan);
    EXPECT_EQ(FloatToBf16Sr(FloatOfBits(bits), 0xFFFF), kBf16Nan);
  }
}

TEST(Bf16Test, OverflowGoesToInfinity) {
  EXPECT_EQ(FloatToBf16Rne(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(FloatToBf16Rne(-std::numeric_limits<float>::max()), 0xFF80);
  EXPECT_EQ(FloatToBf16Sr(std::numeric_limits<float>::max(), 0), 0x7F7F);
}

}  // namespace
}  // namespace shardmesh
