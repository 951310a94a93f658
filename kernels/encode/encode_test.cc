#include "kernels/encode/encode.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "core/format/format.h"
#include "gtest/gtest.h"
#include "kernels/encode/quantized_fixture.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The parts of `format` are those that `layout` stores, and its name is that of what they are of.
void ExpectStored(CodeFormat format, const StoredLayout& layout, absl::string_view name, int64_t elements) {
  SCOPED_TRACE(std::string(name));
  EXPECT_EQ(CodeFormatName(format), name == "bf16_sr" ? "bf16" : name);
  ASSERT_OK_AND_ASSIGN(const std::vector<CodePart> parts, PartsOf(Spec(format), {1, elements}));
  const PartLayout* stored[] = {&layout.codes, &layout.extra};
  ASSERT_EQ(parts.size(), layout.extra.bytes == 0 ? 1 : 2);
  for (size_t i = 0; i < parts.size(); ++i) {
    EXPECT_EQ(parts[i].NumElements() * BytesOf(parts[i].type), stored[i]->BytesOf(elements)) << parts[i].name;
  }
}

TEST(CodeFormatOf, HasThePartsThatAreStored) {
  for (const int64_t elements : {1, 255, 300}) {
    for (int i = 0; i <= static_cast<int>(WeightFormat::kInt8Row); ++i) {
      const auto format = static_cast<WeightFormat>(i);
      ExpectStored(CodeFormatOf(format), LayoutOf(format, elements), WeightFormatName(format), elements);
    }
    for (int i = 0; i <= static_cast<int>(StateFormat::kFp8x32); ++i) {
      const auto format = static_cast<StateFormat>(i);
      ExpectStored(CodeFormatOf(format), LayoutOf(format), StateFormatName(format), elements);
    }
  }
}

TEST(Encode, Bf16_EveryValueStays) {
  for (const CodeFormat format :
       {CodeFormat::kBf16, CodeFormat::kBf16Sr, CodeFormat::kBf16Plus16, CodeFormat::kBf16Plus8Sr}) {
    SCOPED_TRACE(std::string(CodeFormatName(format)));
    std::vector<float> values(65536);
    for (uint32_t i = 0; i < 65536; ++i) values[i] = Bf16ToFloat(static_cast<uint16_t>(i));
    Quantized quantized = Encoded(Spec(format), {256, 256}, values);
    const std::vector<float> decoded = Decoded(Spec(format), quantized);
    for (uint32_t i = 0; i < 65536; ++i) {
      const uint32_t expected = std::isnan(values[i]) ? kBf16Nan : i;
      ASSERT_EQ(quantized.halves()[i], expected);
      ASSERT_EQ(FloatBits(decoded[i]), expected << 16);
    }
  }
}

std::vector<float> EdgeValues() {
  std::vector<float> values = Numbers(100000);
  for (uint32_t exponent = 0; exponent < 256; ++exponent) {
    for (const uint32_t mantissa :
         {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu, 0x10000u, 0x17FFFu, 0x18000u, 0x7FFFFFu}) {
      if (exponent == 255 && mantissa > 0) continue;
      values.push_back(FloatOfBits(exponent << 23 | mantissa));
      values.push_back(FloatOfBits(0x80000000u | exponent << 23 | mantissa));
    }
  }
  return values;
}

TEST(Encode, Fp32AndBf16Plus16_AreExact) {
  const std::vector<float> values = EdgeValues();
  for (const CodeFormat format : {CodeFormat::kFp32, CodeFormat::kBf16Plus16}) {
    Quantized quantized = Encoded(Spec(format), {static_cast<int64_t>(values.size())}, values);
    const std::vector<float> decoded = Decoded(Spec(format), quantized);
    EXPECT_EQ(std::memcmp(decoded.data(), values.data(), 4 * values.size()), 0);
  }
}

TEST(Encode, Bf16_IsTheNearest) {
  const std::vector<float> values = EdgeValues();
  Quantized quantized = Encoded(Spec(CodeFormat::kBf16), {static_cast<int64_t>(values.size())}, values);
  for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(quantized.halves()[i], FloatToBf16Rne(values[i])) << values[i];
}

TEST(Encode, StochasticFormats_TakeTheDrawsOfTheirElements) {
  CodeSpec spec = Spec(CodeFormat::kBf16Sr);
  spec.seed = 5;
  spec.step = 3;
  spec.tensor = 2;
  spec.first_element = 512;
  spec.purpose = DrawPurpose::kSecondState;
  const std::vector<float> values = Numbers(300);
  Quantized quantized = Encoded(spec, {300}, values);
  const PhiloxKey key = MakePhiloxKey(5, DrawPurpose::kSecondState);
  for (int i = 0; i < 300; ++i) ASSERT_EQ(quantized.halves()[i], FloatToBf16Sr(values[i], Draw16(key, 3, 2, 512 + i)));
}

// Up as often as the fraction is large.
TEST(Encode, StochasticInt8_IsUnbiased) {
  CodeSpec spec = Spec(CodeFormat::kInt8Row);
  spec.stochastic = true;
  constexpr int64_t kElements = 1 << 18;
  for (const float target : {3.25f, -3.25f, 0.0078125f, -0.9921875f, 126.5f, 5.0f, -127.0f}) {
    std::vector<float> values(kElements, target);
    values[0] = 127;
    Quantized quantized = Encoded(spec, {kElements}, values);
    double sum = 0;
    for (int64_t i = 1; i < kElements; ++i) sum += static_cast<int8_t>(quantized.codes()[i]);
    const double fraction = target - std::floor(target);
    const double deviation = std::sqrt(fraction * (1 - fraction) / (kElements - 1));
    EXPECT_NEAR(sum / (kElements - 1), target, 5 * deviation + 1e-12) << target;
  }
}

TEST(Encode, Float8_EveryCodeIsTheCodeOfItsValue) {
  for (const bool e5m2 : {false, true}) {
    CodeSpec spec = Spec(CodeFormat::kFp8Tensor);
    spec.e5m2 = e5m2;
    Quantized all(spec, {256});
    for (int i = 0; i < 256; ++i) all.codes()[i] = static_cast<uint8_t>(i);
    all.scales()[0] = 1;
    const std::vector<float> levels = Decoded(spec, all);
    for (int i = 0; i < 256; ++i) {
      const int magnitude = i & 0x7F;
      if (e5m2) {
        EXPECT_EQ(std::isnan(levels[i]), magnitude > 0x7C) << i;
        EXPECT_EQ(std::isinf(levels[i]), magnitude == 0x7C) << i;
      } else {
        EXPECT_EQ(std::isnan(levels[i]), magnitude == 0x7F) << i;
      }
      if (!std::isfinite(levels[i])) continue;
      Quantized quantized = Encoded(spec, {2}, {levels[i], e5m2 ? 57344.0f : 448.0f});
      EXPECT_EQ(quantized.scales()[0], 1.0f);
      EXPECT_EQ(quantized.codes()[0], i);
    }
  }
}

TEST(Encode, Float8_EveryBf16IsTheNearestCode) {
  CodeSpec spec = Spec(CodeFormat::kFp8Tensor);
  std::vector<float> values;
  for (uint32_t i = 0; i < 0x8000u; ++i) {
    const float x = Bf16ToFloat(static_cast<uint16_t>(i));
    if (x <= 448) values.push_back(x);
  }
  values.push_back(448);
  Quantized quantized = Encoded(spec, {static_cast<int64_t>(values.size())}, values);
  const std::vector<float> decoded = Decoded(spec, quantized);
  for (size_t i = 0; i < values.size(); ++i) {
    const double unit = std::ldexp(1.0, std::max(std::ilogb(std::max(values[i], 1e-30f)), -6) - 3);
    ASSERT_LE(std::fabs(double{decoded[i]} - values[i]), unit / 2) << values[i];
    ASSERT_EQ(std::fmod(decoded[i], unit), 0) << values[i];
    if (i > 0) {
      ASSERT_LE(decoded[i - 1], decoded[i] + (values[i] < values[i - 1] ? 448 : 0));
    }
  }
}

TEST(Encode, Float8Row_HasAScaleForEachRow_AndBlockForEachBlock) {
  const std::vector<float> values = Numbers(130 * 200);
  CodeSpec spec = Spec(CodeFormat::kFp8Row);
  Quantized rows = Encoded(spec, {130, 200}, values);
  for (int row = 0; row < 130; ++row) {
    float largest = 0;
    for (int i = 0; i < 200; ++i) largest = std::max(largest, std::fabs(values[row * 200 + i]));
    ASSERT_EQ(rows.scales()[row], static_cast<float>(448.0 / double{largest}));
  }
  Quantized blocks = Encoded(Spec(CodeFormat::kFp8Block), {130, 200}, values);
  for (int b = 0; b < 4; ++b) {
    float largest = 0;
    for (int row = b / 2 * 128; row < std::min(130, b / 2 * 128 + 128); ++row) {
      for (int i = b % 2 * 128; i < std::min(200, b % 2 * 128 + 128); ++i) {
        largest = std::max(largest, std::fabs(values[row * 200 + i]));
      }
    }
    ASSERT_EQ(blocks.scales()[b], static_cast<float>(448.0 / double{largest}));
  }
}

TEST(Encode, PowersOfTwo_AreTheLargestBelow) {
  CodeSpec spec = Spec(CodeFormat::kFp8Tensor);
  spec.power_of_two = true;
  for (const float largest : {448.0f, 447.99997f, 448.00003f, 1.0f, 1e-20f, 0.0f, 3e38f}) {
    Quantized quantized = Encoded(spec, {1}, {largest});
    const double exact = 448.0 / std::max<double>(largest, 1e-12);
    const float scale = quantized.scales()[0];
    int exponent;
    EXPECT_EQ(std::frexp(scale, &exponent), 0.5f);
    EXPECT_LE(scale, static_cast<float>(exact));
    EXPECT_GT(2.0 * scale, static_cast<float>(exact));
  }
}

TEST(Encode, Mx8_ScaleIsTheRightPowerOfTwo) {
  for (const bool floor : {false, true}) {
    CodeSpec spec = Spec(CodeFormat::kMx8);
    spec.floor = floor;
    for (const float largest : {0.0f, 1e-45f, 1e-40f, 1.17549435e-38f, 1e-36f, 255.99998f, 256.0f, 447.99997f, 448.0f,
                                448.00003f, 511.99997f, 1.0f, 1e30f, 3.4028235e38f}) {
      std::vector<float> values(32, 0.0f);
      values[5] = -largest;
      Quantized quantized = Encoded(spec, {32}, values);
      const uint8_t code = *reinterpret_cast<uint8_t*>(quantized.pointers[1]);
      int expected = 0;
      if (largest > 0) {
        const double ratio = floor ? double{largest} / 256 : static_cast<float>(largest / 448.0f);
        int exponent = std::ilogb(ratio);
        if (!floor && std::ldexp(1.0, exponent) < ratio) ++exponent;
        expected = std::max(exponent + 127, 0);
      }
      EXPECT_EQ(code, expected) << largest << (floor ? " floor" : " rceil");
      const float value = Decoded(spec, quantized)[5];
      // FLOOR saturates what lies between 448 and 512 times the power of two; 448 over 2^120 rounds to infinity.
      if (largest > 1e-33f && largest < 3e38f) {
        EXPECT_NEAR(value, -largest, floor ? largest / 8 : largest / 16) << largest;
      }
    }
  }
}

TEST(Encode, Nf4_ZerosAndEqualScales_AreExactlyDecoded) {
  std::vector<float> values(192, 0.0f);
  std::fill_n(values.begin() + 64, 64, 5.0f);
  Quantized zeros = Encoded(Spec(CodeFormat::kNf4), {192}, values);
  const std::vector<float> decoded = Decoded(Spec(CodeFormat::kNf4), zeros);
  for (int i = 0; i < 192; ++i) ASSERT_EQ(decoded[i] == 0, values[i] == 0) << i;
  for (size_t i = 0; i < values.size(); ++i) values[i] = i % 2 == 0 ? 3.0f : -3.0f;
  Quantized equal = Encoded(Spec(CodeFormat::kNf4), {192}, values);
  EXPECT_EQ(Decoded(Spec(CodeFormat::kNf4), equal), values);
  EXPECT_EQ(*reinterpret_cast<float*>(equal.pointers[2]), 1.0f);
}

TEST(Encode, EveryFormat_StaysNearForAllShapes) {
  for (const CodeFormat format : kAll) {
    for (const std::vector<int64_t>& dims :
         std::vector<std::vector<int64_t>>{{3, 32}, {1, 1024}, {130, 160}, {7, 96}, {256, 64}}) {
      SCOPED_TRACE(absl::StrCat(CodeFormatName(format), " ", dims[0], " x ", dims[1]));
      std::vector<float> values = Numbers(dims[0] * dims[1]);
      for (float& x : values) x = std::fabs(x) < 0.01f ? 0.5f : x;
      Quantized quantized = Encoded(Spec(format), dims, values);
      const std::vector<float> decoded = Decoded(Spec(format), quantized);
      double error = 0, sum = 0;
      for (size_t i = 0; i < values.size(); ++i) {
        error += (double{decoded[i]} - values[i]) * (double{decoded[i]} - values[i]);
        sum += double{values[i]} * values[i];
      }
      const bool four_bit = format == CodeFormat::kNf4 || format == CodeFormat::kDyn4;
      EXPECT_LT(error, sum * (four_bit ? 0.05 : 0.002));
    }
  }
}

TEST(Encode, ScaledFormats_RefuseWhatIsNotFinite_AndWriteNothing) {
  for (const CodeFormat format : kAll) {
    for (const float bad : {kNan, kInfinity, -kInfinity}) {
      SCOPED_TRACE(absl::StrCat(CodeFormatName(format), " ", bad));
      std::vector<float> values(64, 1.0f);
      values[17] = bad;
      Quantized quantized(Spec(format), {2, 32});
      const auto before = quantized.parts;
      const absl::Status status = Encode(Spec(format), quantized.dims, values.data(), quantized.pointers);
      if (format <= CodeFormat::kBf16Plus8Sr) {
        EXPECT_OK(status);
        continue;
      }
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()), HasSubstr("element 17"));
      EXPECT_EQ(quantized.parts, before);
    }
  }
}

TEST(Encode, SecondMoments_RefuseNegativeOnes) {
  CodeSpec spec = Spec(CodeFormat::kDyn8);
  spec.is_signed = false;
  Quantized quantized(spec, {3});
  const float values[] = {1, 0, -1};
  EXPECT_THAT(std::string(Encode(spec, {3}, values, quantized.pointers).message()), HasSubstr("element 2 is -1"));
}

TEST(Encode, EmptyArrays_AreQuantized) {
  for (const CodeFormat format : kAll) {
    for (const std::vector<int64_t>& dims : std::vector<std::vector<int64_t>>{{0, 32}, {4, 0}, {0, 0}}) {
      SCOPED_TRACE(absl::StrCat(CodeFormatName(format), " ", dims[0], " x ", dims[1]));
      Quantized quantized(Spec(format), dims);
      EXPECT_OK(Encode(Spec(format), dims, nullptr, quantized.pointers));
      std::vector<const void*> parts(quantized.pointers.begin(), quantized.pointers.end());
      EXPECT_OK(Decode(Spec(format), dims, parts, nullptr));
    }
  }
}

TEST(Encode, ShapesThatDoNotFit_AreRefused) {
  EXPECT_FALSE(PartsOf(Spec(CodeFormat::kMx8), {4, 33}).ok());
  EXPECT_FALSE(PartsOf(Spec(CodeFormat::kFp8Block), {4, 4, 4}).ok());
  EXPECT_FALSE(PartsOf(Spec(CodeFormat::kFp32), {4, -1}).ok());
  EXPECT_FALSE(PartsOf(Spec(CodeFormat::kFp32), {int64_t{1} << 40, int64_t{1} << 40}).ok());
  EXPECT_EQ(PartsOf(Spec(CodeFormat::kNf4), {16385}).value()[2].NumElements(), 2);
}

TEST(Encode, WrongMemoryAndPlaces_AreRefused) {
  const std::vector<float> values = Numbers(8);
  CodeSpec spec = Spec(CodeFormat::kDyn8);
  Quantized quantized(spec, {8});
  EXPECT_FALSE(Encode(spec, {8}, values.data(), {quantized.pointers[0]}).ok());
  EXPECT_FALSE(Encode(spec, {8}, values.data(), {quantized.pointers[0], nullptr}).ok());
  EXPECT_FALSE(Encode(spec, {8}, values.data(), {quantized.pointers[0], quantized.codes() + 1}).ok());
  EXPECT_FALSE(Encode(spec, {8}, nullptr, quantized.pointers).ok());
  spec = Spec(CodeFormat::kBf16Sr);
  Quantized bf16(spec, {8});
  spec.first_element = 64;
  EXPECT_FALSE(Encode(spec, {8}, values.data(), bf16.pointers).ok());
  spec.first_element = 0;
  spec.step = -1;
  EXPECT_FALSE(Encode(spec, {8}, values.data(), bf16.pointers).ok());
}

TEST(Encode, NamesOfFormats_AreParsed) {
  for (const CodeFormat format : kAll) EXPECT_EQ(ParseCodeFormat(CodeFormatName(format)).value(), format);
  EXPECT_THAT(std::string(ParseCodeFormat("fp9").status().message()), HasSubstr("there are fp32, bf16"));
}

}  // namespace
}  // namespace shardmesh
