#include "kernels/encode/torchao_codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/format/format.h"

namespace shardmesh {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A tile of states as stored.
struct Tile {
  uint8_t codes[kTileElements] = {};
  float scales[2] = {};

  // dyn4's codes one by one.
  uint32_t Nibble(int i) const { return i % 2 == 0 ? codes[i / 2] >> 4 : codes[i / 2] & 15; }
};

Tile Encode(StateFormat format, bool is_signed, const std::vector<float>& values) {
  Tile tile;
  EncodeTorchaoStates(format, is_signed, values.data(), {tile.codes, reinterpret_cast<uint8_t*>(tile.scales)});
  return tile;
}

std::vector<float> Decode(StateFormat format, bool is_signed, const Tile& tile) {
  std::vector<float> values(kTileElements);
  DecodeTorchaoStates(format, is_signed, {tile.codes, reinterpret_cast<const uint8_t*>(tile.scales)}, values.data());
  return values;
}

// What the codes 0, 1, ... stand for, beside a scale of 1.
std::vector<float> Levels(StateFormat format, bool is_signed) {
  Tile tile;
  tile.scales[0] = tile.scales[1] = 1;
  for (int i = 0; i < kTileElements; ++i) tile.codes[i] = static_cast<uint8_t>(i);
  std::vector<float> levels = Decode(format, is_signed, tile);
  if (format == StateFormat::kDyn4) {  // byte b is the codes b / 16 and b % 16
    for (int i = 0; i < 16; ++i) levels[i] = levels[2 * i + 1];
    levels.resize(16);
  }
  return levels;
}

// torchao's quantize_8bit_with_qmap and quantize_4bit_with_qmap, as they are written.
uint32_t SearchedCode(const std::vector<float>& levels, float y) {
  const uint32_t last = static_cast<uint32_t>(levels.size()) - 1;
  uint32_t code = 0;
  for (uint32_t step = (last + 1) / 2; step > 0; step /= 2) code += y >= levels[code + step] ? step : 0;
  const uint32_t up = std::min(code + 1, last);
  return y - levels[code] >= (levels[up] - levels[code]) * 0.5f ? up : code;
}

// The neighbours of every middle between two levels, and random numbers; all of magnitude 1 at most.
std::vector<float> Probes(const std::vector<float>& levels) {
  std::vector<float> probes;
  for (size_t i = 0; i + 1 < levels.size(); ++i) {
    float y = levels[i] + (levels[i + 1] - levels[i]) / 2;
    for (int k = 0; k < 4; ++k) y = std::nextafter(y, -1.0f);
    for (int k = 0; k < 9; ++k, y = std::nextafter(y, 1.0f)) probes.push_back(y);
    probes.push_back(levels[i]);
  }
  std::mt19937 random(5);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (int i = 0; i < 20000; ++i) probes.push_back(std::ldexp(uniform(random), -static_cast<int>(random() % 24)));
  return probes;
}

// A scale of 3 tells a division from a product with the reciprocal.
TEST(TorchaoCodec, LevelsAndBorders_CodesAreThoseOfTheSearch) {
  for (StateFormat format : {StateFormat::kDyn8, StateFormat::kDyn4}) {
    for (bool is_signed : {true, false}) {
      for (float scale : {1.0f, 3.0f}) {
        const std::vector<float> levels = Levels(format, is_signed);
        std::vector<float> block(kTileElements, scale);  // the first of each half stays
        const std::vector<float> probes = Probes(levels);
        for (size_t begin = 0; begin < probes.size(); begin += 127) {
          const int n = static_cast<int>(std::min<size_t>(127, probes.size() - begin));
          for (int i = 0; i < n; ++i) {
            block[1 + i] = (is_signed ? probes[begin + i] : std::fabs(probes[begin + i])) * scale;
          }
          const Tile tile = Encode(format, is_signed, block);
          for (int i = 1; i <= n; ++i) {
            const uint32_t code = format == StateFormat::kDyn8 ? tile.codes[i] : tile.Nibble(i);
            ASSERT_EQ(code, SearchedCode(levels, block[i] / scale)) << StateFormatName(format) << " " << block[i];
          }
        }
      }
    }
  }
}

TEST(TorchaoCodec, EightBitLevels_AscendBySevenDecades) {
  const std::vector<float> first = Levels(StateFormat::kDyn8, true), second = Levels(StateFormat::kDyn8, false);
  for (int i = 0; i + 1 < 256; ++i) {
    EXPECT_LT(first[i], first[i + 1]);
    EXPECT_LT(second[i], second[i + 1]);
  }
  EXPECT_EQ(first[127], 0);
  EXPECT_EQ(second[0], 0);
  EXPECT_EQ(first[255], 1);
  EXPECT_EQ(second[255], 1);
  for (int i = 1; i <= 127; ++i) EXPECT_EQ(first[127 - i], -first[127 + i]);
  // The middles of a tenth to one in as many steps, and of a millionth of that.
  EXPECT_FLOAT_EQ(first[254], 1 - 0.9f / 128);
  EXPECT_FLOAT_EQ(first[128], 0.55e-6f);
  EXPECT_FLOAT_EQ(second[1], 0.325e-6f);
}

TEST(TorchaoCodec, Zeros_SmallestScaleAndTheCodeNearestToZero) {
  const std::vector<float> zeros(kTileElements, 0.0f);
  EXPECT_EQ(Encode(StateFormat::kDyn8, true, zeros).scales[0], 1e-12f);
  EXPECT_EQ(Encode(StateFormat::kDyn8, true, zeros).codes[9], 127);
  EXPECT_EQ(Encode(StateFormat::kDyn8, false, zeros).codes[9], 0);
  EXPECT_EQ(Encode(StateFormat::kDyn4, true, zeros).codes[9], 0x77);
  EXPECT_EQ(Encode(StateFormat::kDyn4, false, zeros).codes[9], 0x00);  // a sixteenth: there is no zero
  EXPECT_EQ(Encode(StateFormat::kFp8, true, zeros).scales[0], 1e-12f / 448);
  EXPECT_EQ(Encode(StateFormat::kFp8, true, std::vector<float>(kTileElements, -0.0f)).codes[9], 0x80);
}

TEST(TorchaoCodec, BelowTheSmallestScale_IsDividedByIt) {
  const std::vector<float> tiny(kTileElements, 5e-13f);
  EXPECT_EQ(Encode(StateFormat::kDyn8, false, tiny).scales[0], 1e-12f);
  EXPECT_NEAR(Decode(StateFormat::kDyn8, false, Encode(StateFormat::kDyn8, false, tiny))[0], 5e-13, 5e-15);
}

TEST(TorchaoCodec, SecondMomentFarBelowTheLargest_BecomesZero) {
  std::vector<float> values(kTileElements, 1e-7f);
  values[200] = 1;
  EXPECT_EQ(Encode(StateFormat::kDyn8, false, values).codes[0], 0);
  values[0] = 1e-4f;
  values[200] = 448;
  EXPECT_EQ(Encode(StateFormat::kFp8, false, values).codes[0], 0);
}

TEST(TorchaoCodec, NegativeLargest_Shrinks) {
  std::vector<float> values(kTileElements, 0.5f);
  values[3] = -2;
  const Tile tile = Encode(StateFormat::kDyn8, true, values);
  EXPECT_EQ(tile.scales[0], 2);
  EXPECT_EQ(tile.codes[3], 0);  // there is no -1
}

TEST(TorchaoCodec, Fp8_QuotientsAreRoundedToNearest) {
  std::mt19937 random(6);
  std::uniform_real_distribution<float> uniform(-3, 3);
  std::vector<float> values(kTileElements);
  for (float& x : values) x = std::ldexp(uniform(random), -static_cast<int>(random() % 20));
  values[0] = 3;
  const Tile tile = Encode(StateFormat::kFp8, true, values);
  ASSERT_EQ(tile.scales[0], 3.0f / 448);
  const std::vector<float> back = Decode(StateFormat::kFp8, true, tile);
  for (int i = 0; i < kTileElements; ++i) {
    const float y = values[i] / tile.scales[0];
    const float unit = std::ldexp(1.0f, std::max(std::ilogb(y), -6) - 3);
    ASSERT_EQ(back[i], std::nearbyint(y / unit) * unit * tile.scales[0]) << values[i];
  }
}

TEST(TorchaoCodec, FourBits_EvenElementsInTheUpperHalfAndTwoBlocksInATile) {
  std::vector<float> values(kTileElements, 0.0f);
  values[0] = 1;
  values[129] = 4;
  const Tile tile = Encode(StateFormat::kDyn4, true, values);
  EXPECT_EQ(tile.scales[0], 1);
  EXPECT_EQ(tile.scales[1], 4);
  EXPECT_EQ(tile.codes[0], 0xF7);
  EXPECT_EQ(tile.codes[64], 0x7F);
  EXPECT_EQ(Decode(StateFormat::kDyn4, true, tile), values);
}

TEST(TorchaoCodec, NanInABlock_TheWholeBlockIsNan) {
  for (StateFormat format : {StateFormat::kDyn8, StateFormat::kDyn4, StateFormat::kFp8}) {
    std::vector<float> values(kTileElements, 2.0f);
    values[100] = std::nanf("");
    const Tile tile = Encode(format, false, values);
    const std::vector<float> back = Decode(format, false, tile);
    const int block = format == StateFormat::kDyn4 ? 128 : 256;
    for (int i = 0; i < block; ++i) ASSERT_TRUE(std::isnan(back[i])) << StateFormatName(format) << " " << i;
    for (int i = block; i < kTileElements; ++i) ASSERT_EQ(back[i], 2);
    EXPECT_EQ(tile.codes[7], format == StateFormat::kFp8 ? 0x7F : 0);
  }
}

TEST(TorchaoCodec, InfinityInABlock_OthersBecomeZero) {
  std::vector<float> values(kTileElements, 2.0f);
  values[100] = kInfinity;
  const Tile tile = Encode(StateFormat::kDyn8, true, values);
  EXPECT_EQ(tile.scales[0], kInfinity);
  EXPECT_EQ(tile.codes[0], 127);
  EXPECT_EQ(tile.codes[100], 0);
}

TEST(TorchaoCodec, Fp32_IsCopied) {
  std::vector<float> values(kTileElements), copy(kTileElements), back(kTileElements);
  for (int i = 0; i < kTileElements; ++i) values[i] = 1.0f / static_cast<float>(i - 7);
  EncodeTorchaoStates(StateFormat::kFp32, true, values.data(), {reinterpret_cast<uint8_t*>(copy.data()), nullptr});
  EXPECT_EQ(copy, values);
  DecodeTorchaoStates(StateFormat::kFp32, true, {reinterpret_cast<uint8_t*>(copy.data()), nullptr}, back.data());
  EXPECT_EQ(back, values);
}

}  // namespace
}  // namespace shardmesh
