// The formats of optimizer states: every code, order, nearest levels.
#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/format/format.h"
#include "kernels/encode/quantized_fixture.h"
#include "kernels/rules/minifloat.h"

namespace shardmesh {
namespace {

// The values of all codes of a state format, with the scale 1; NaN where no value has that code.
std::vector<float> Levels(const CodeSpec& spec, int codes) {
  const bool four_bit = codes == 16;
  Quantized quantized(spec, {four_bit ? 16 : 256});
  for (int i = 0; i < (four_bit ? 8 : 256); ++i) {
    quantized.codes()[i] = static_cast<uint8_t>(four_bit ? (2 * i) << 4 | (2 * i + 1) : i);
  }
  if (spec.format == CodeFormat::kFp8x32) {
    std::fill_n(quantized.short_scales(), 8, uint16_t{0x3F80});
  } else {
    quantized.scales()[0] = 1;
  }
  std::vector<float> levels = Decoded(spec, quantized);
  const float largest = spec.format == CodeFormat::kFp8x32 && !spec.is_signed ? UE5M3::kLargest : E4M3::kLargest;
  for (float& level : levels) {
    if (std::fabs(level) > largest) level = std::nanf("");  // codes that are not used
  }
  return levels;
}

struct Case {
  CodeFormat format;
  bool is_signed, torchao;
};
constexpr Case kStates[] = {
    {CodeFormat::kDyn8, true, false},   {CodeFormat::kDyn8, false, false},  {CodeFormat::kDyn8, true, true},
    {CodeFormat::kDyn8, false, true},   {CodeFormat::kDyn4, true, false},   {CodeFormat::kDyn4, false, false},
    {CodeFormat::kDyn4, true, true},    {CodeFormat::kDyn4, false, true},   {CodeFormat::kFp8, true, false},
    {CodeFormat::kFp8, false, false},   {CodeFormat::kFp8, true, true},     {CodeFormat::kFp8, false, true},
    {CodeFormat::kFp8x32, true, false}, {CodeFormat::kFp8x32, false, false}};

template <class Visit>
void ForEachState(Visit visit) {
  for (const Case& each : kStates) {
    CodeSpec spec = Spec(each.format);
    spec.is_signed = each.is_signed;
    spec.torchao = each.torchao;
    SCOPED_TRACE(
        absl::StrCat(CodeFormatName(each.format), each.is_signed ? " signed" : "", each.torchao ? " torchao" : ""));
    visit(spec);
  }
}

int CodesOf(const CodeSpec& spec) { return spec.format == CodeFormat::kDyn4 ? 16 : 256; }

// Every code that encode may write is what its own value becomes.
TEST(EncodeStates, EveryCodeOfAState_IsTheCodeOfItsValue) {
  ForEachState([](const CodeSpec& spec) {
    const std::vector<float> levels = Levels(spec, CodesOf(spec));
    float largest = 0;
    for (const float level : levels) {
      if (std::isfinite(level)) largest = std::max(largest, std::fabs(level));
    }
    for (int code = 0; code < CodesOf(spec); ++code) {
      const float level = levels[code];
      if (!std::isfinite(level) || (!spec.is_signed && std::signbit(level))) continue;
      if (code > 0xF7 && spec.format == CodeFormat::kFp8x32 && !spec.is_signed) {  // UE5M3: never written
        EXPECT_EQ(level, largest);
        continue;
      }
      if (code > 0x7F && spec.format == CodeFormat::kFp8 && !spec.is_signed &&
          !spec.torchao) {  // read without the sign
        EXPECT_EQ(level, levels[code - 0x80]);
        continue;
      }
      // The block's largest value makes the scale 1.
      Quantized quantized = Encoded(spec, {4}, {level, largest, 0, 0});
      const bool is_short = spec.format == CodeFormat::kFp8x32;
      ASSERT_EQ(is_short ? Bf16ToFloat(quantized.short_scales()[0]) : quantized.scales()[0], 1.0f);
      const uint32_t found = spec.format == CodeFormat::kDyn4 ? quantized.codes()[0] >> 4 : quantized.codes()[0];
      EXPECT_EQ(found, static_cast<uint32_t>(code)) << level;
    }
  });
}

// For values all over a block's range: the level that was chosen is no further away than any other.
TEST(EncodeStates, States_BecomeTheNearestLevel) {
  ForEachState([](const CodeSpec& spec) {
    std::vector<float> levels;
    for (const float level : Levels(spec, CodesOf(spec))) {
      if (std::isfinite(level) && (spec.is_signed || !std::signbit(level))) levels.push_back(level);
    }
    std::sort(levels.begin(), levels.end());
    levels.erase(std::unique(levels.begin(), levels.end()), levels.end());
    const float largest = levels.back();
    std::vector<float> values = Numbers(20000, 7);
    for (float& x : values) x = spec.is_signed ? std::remainder(x, 1.9f * largest) : std::fmod(std::fabs(x), largest);
    for (size_t i = 0; i < values.size(); i += 32) values[i] = largest;
    Quantized quantized = Encoded(spec, {static_cast<int64_t>(values.size())}, values);
    const std::vector<float> decoded = Decoded(spec, quantized);
    for (size_t i = 0; i < values.size(); ++i) {
      const auto above = std::lower_bound(levels.begin(), levels.end(), values[i]);
      double best = std::fabs(double{*above} - values[i]);
      if (above != levels.begin()) best = std::min(best, std::fabs(double{*(above - 1)} - values[i]));
      // Ours keep second moments above 0; dyn8's borders are exact to 2^-20 (kernels/rules/dynamic_map.h).
      if (!spec.is_signed && !spec.torchao && values[i] > 0) best = std::max(best, double{levels[1]} - values[i]);
      ASSERT_LE(std::fabs(double{decoded[i]} - values[i]), best + 2e-6 * std::fabs(values[i])) << values[i];
      if (!spec.is_signed && !spec.torchao && values[i] > 0) {
        ASSERT_GT(decoded[i], 0) << values[i];
      }
    }
  });
}

TEST(EncodeStates, States_KeepTheOrder) {
  ForEachState([](const CodeSpec& spec) {
    std::vector<float> values(256);
    for (int i = 0; i < 256; ++i) values[i] = spec.is_signed ? (i - 127.5f) / 127.5f : i / 255.0f;
    Quantized quantized = Encoded(spec, {256}, values);
    const std::vector<float> decoded = Decoded(spec, quantized);
    // Blocks of fewer elements have a scale each: the order holds inside them.
    const int block = spec.format == CodeFormat::kFp8x32 ? 32 : spec.format == CodeFormat::kDyn4 ? 128 : 256;
    for (int i = 1; i < 256; ++i) {
      if (i % block != 0) {
        ASSERT_LE(decoded[i - 1], decoded[i]) << i;
      }
    }
  });
}

// The smallest power of two with which the largest magnitude is no more than the largest level.
TEST(EncodeStates, Fp8x32_HasPowersOfTwoAsScales) {
  for (const bool is_signed : {true, false}) {
    CodeSpec spec = Spec(CodeFormat::kFp8x32);
    spec.is_signed = is_signed;
    const float largest = is_signed ? E4M3::kLargest : UE5M3::kLargest;
    for (int exponent = -100; exponent <= 126 - std::ilogb(largest); ++exponent) {
      const float scale = std::ldexp(1.0f, exponent), most = scale * largest;
      std::vector<float> values(96, most / 100);
      values[3] = most;
      values[40] = std::nextafter(most, INFINITY);
      values[70] = std::nextafter(most / 2, INFINITY);
      Quantized quantized = Encoded(spec, {96}, values);
      const auto found = [&](int block) { return Bf16ToFloat(quantized.short_scales()[block]); };
      ASSERT_EQ(found(0), scale);
      ASSERT_EQ(found(1), 2 * scale);
      ASSERT_EQ(found(2), scale);
    }
  }
}

// Between two levels: the upper one as often as the value is near it. Below the smallest normal one, too.
TEST(EncodeStates, StochasticFp8x32_IsOneOfTwoLevelsAndUnbiased) {
  CodeSpec spec = Spec(CodeFormat::kFp8x32);
  spec.is_signed = false;
  spec.stochastic = true;
  constexpr int64_t kElements = 1 << 16;
  const float smallest = std::ldexp(1.0f, -17);
  for (const float target : {1.0f, 1.01f, 1.125f, 1.93f, 1.9999f, 60000.0f, 3.3f * smallest, 7.5f * smallest,
                             7.99f * smallest, 8.0f * smallest, 8.3f * smallest, 16.7f * smallest, 1.25f * smallest}) {
    std::vector<float> values(kElements, target);
    for (int64_t i = 0; i < kElements; i += 32) values[i] = UE5M3::kLargest;  // the scale is 1
    Quantized quantized = Encoded(spec, {kElements}, values);
    const std::vector<float> decoded = Decoded(spec, quantized);
    const float step = std::ldexp(1.0f, std::max(std::ilogb(target), -14) - 3);
    const double below = std::floor(target / step) * step, fraction = (target - below) / step;
    double sum = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < kElements; ++i) {
      if (i % 32 == 0) continue;
      ASSERT_TRUE(decoded[i] == below || (fraction > 0 && decoded[i] == below + step)) << target << " " << decoded[i];
      sum += (decoded[i] - below) / step;
      ++count;
    }
    EXPECT_NEAR(sum / count, fraction, 5 * std::sqrt(fraction * (1 - fraction) / count) + 1e-12) << target;
  }
}

TEST(EncodeStates, StochasticFp8x32_TakesTheDrawsOfOtherWeights) {
  CodeSpec spec = Spec(CodeFormat::kFp8x32);
  spec.is_signed = false;
  spec.stochastic = true;
  spec.seed = 5;
  spec.step = 3;
  spec.tensor = 2;
  spec.first_element = 512;
  std::vector<float> values(300, 1.0f + 1.0f / 16);
  Quantized quantized = Encoded(spec, {300}, values);
  const PhiloxKey key = MakePhiloxKey(5, DrawPurpose::kWeightRounding);
  const std::vector<float> decoded = Decoded(spec, quantized);
  for (int i = 0; i < 300; ++i) {
    ASSERT_EQ(decoded[i], Draw16(key, 3, 2, 512 + (i ^ 32)) >= 0x8000 ? 1.125f : 1.0f) << i;
  }
}

}  // namespace
}  // namespace shardmesh
