// What a step publishes is what kernels/encode/encode.h gives for the weights that readers get.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/base/matchers.h"
#include "kernels/encode/encode.h"
#include "kernels/step/step_fixture.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr int64_t kElements = 1632;  // 6 tiles and 96 elements, 136 rows of 12

CodeSpec Spec(CodeFormat format) {
  CodeSpec spec;
  spec.format = format;
  return spec;
}

// Calls visit(tensor) for every weight format after steps by every implementation.
template <class Visit>
void ForEachStepped(const Visit& visit) {
  for (const StepCase& each : AllStepCases()) {
    if (each.states != StateFormat::kFp32 && each.states != StateFormat::kDyn8) continue;
    for (const OptimizerStepFn step : {OptimizerStepReference, BestOptimizerStep()}) {
      SCOPED_TRACE(each.ToString());
      StepTensor tensor(each, kElements);
      tensor.Step(step, 2);
      visit(tensor);
    }
  }
}

TEST(Published, Mx8_IsWhatEncodeGives) {
  ForEachStepped([](StepTensor& tensor) {
    std::vector<uint8_t> codes(kElements), scales(kElements / 32);
    ASSERT_OK(
        Encode(Spec(CodeFormat::kMx8), {kElements}, tensor.PublishedWeights().data(), {codes.data(), scales.data()}));
    ASSERT_EQ(tensor.mx8_codes().Bytes(), codes);
    ASSERT_EQ(tensor.mx8_scales().Bytes(), scales);
  });
}

// From the largest magnitudes follow the scales that Encode finds, and under them codes cut in any way are its codes.
TEST(Published, Fp8TensorFromTheLargest_IsWhatEncodeGives) {
  ForEachStepped([](StepTensor& tensor) {
    const std::vector<float> weights = tensor.PublishedWeights();
    const auto* largest = reinterpret_cast<const float*>(tensor.largest().data());
    for (const bool variant : {false, true}) {
      CodeSpec spec = Spec(CodeFormat::kFp8Tensor);
      spec.e5m2 = spec.power_of_two = variant;
      std::vector<uint8_t> codes(kElements), cast(kElements);
      float scale = 0;
      ASSERT_OK(Encode(spec, {kElements}, weights.data(), {codes.data(), &scale}));
      ASSERT_EQ(Fp8Scale(spec, *std::max_element(largest, largest + (kElements + 127) / 128)), scale);
      for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 500}, {500, kElements}}) {
        ASSERT_OK(CastFp8(spec, scale, Format::kFp32, weights.data() + begin, end - begin, cast.data() + begin));
      }
      ASSERT_EQ(cast, codes);
    }
  });
}

TEST(Published, Largest_IsOf128Elements) {
  ForEachStepped([](StepTensor& tensor) {
    const std::vector<float> weights = tensor.PublishedWeights();
    const auto* largest = reinterpret_cast<const float*>(tensor.largest().data());
    for (int64_t i = 0; i < kElements; i += 128) {
      float expected = 0;
      for (int64_t k = i; k < std::min(i + 128, kElements); ++k) expected = std::max(expected, std::abs(weights[k]));
      ASSERT_EQ(largest[i / 128], expected) << i;
    }
  });
}

// int8_row steps in fp32 and encodes: scales and codes are those that Encode gives for the same step's fp32 weights.
TEST(Published, Int8RowWeights_AreWhatEncodeGives) {
  for (const StepCase& each : AllStepCases()) {
    if (each.weights != WeightFormat::kInt8Row || each.states != StateFormat::kFp32) continue;
    for (const OptimizerStepFn step : {OptimizerStepReference, BestOptimizerStep()}) {
      SCOPED_TRACE(each.ToString());
      StepCase fp32 = each;
      fp32.weights = WeightFormat::kFp32;
      StepTensor rows(each, kElements), exact(fp32, kElements);
      std::memcpy(exact.parts()[0].data(), rows.PublishedWeights().data(), kElements * sizeof(float));
      rows.Step(step, 1);
      exact.Step(step, 1);
      CodeSpec spec = Spec(CodeFormat::kInt8Row);
      spec.stochastic = true;
      spec.seed = 7;
      spec.tensor = 3;
      std::vector<uint8_t> codes(kElements);
      std::vector<float> scales(kElements / 12);
      ASSERT_OK(Encode(spec, {kElements / 12, 12}, exact.PublishedWeights().data(), {codes.data(), scales.data()}));
      ASSERT_EQ(rows.parts()[0].Bytes(), codes);
      ASSERT_EQ(std::memcmp(rows.parts()[1].data(), scales.data(), 4 * scales.size()), 0);
    }
  }
}

TEST(CastFp8, Bf16_IsItsValue) {
  std::vector<uint16_t> halves;
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    if ((bits & 0x7F80) == 0x7F80) continue;
    halves.push_back(static_cast<uint16_t>(bits));
    values.push_back(Bf16ToFloat(static_cast<uint16_t>(bits)));
  }
  const auto n = static_cast<int64_t>(values.size());
  std::vector<uint8_t> from_bf16(n), from_fp32(n);
  const CodeSpec spec = Spec(CodeFormat::kFp8Tensor);
  ASSERT_OK(CastFp8(spec, 0.75f, Format::kBf16, halves.data(), n, from_bf16.data()));
  ASSERT_OK(CastFp8(spec, 0.75f, Format::kFp32, values.data(), n, from_fp32.data()));
  EXPECT_EQ(from_bf16, from_fp32);
}

TEST(CastFp8, WhatIsWrong_IsRefused) {
  const CodeSpec spec = Spec(CodeFormat::kFp8Tensor);
  float values[2] = {1, 2};
  uint8_t codes[2] = {7, 7};
  const auto expect = [&](const CodeSpec& given, float scale, const void* from, int64_t n, const char* words) {
    EXPECT_THAT(CastFp8(given, scale, Format::kFp32, from, n, codes),
                StatusIs(Code::kInvalidArgument, HasSubstr(words)));
  };
  expect(Spec(CodeFormat::kFp8Row), 1, values, 2, "fp8_row is not cast");
  for (const float scale : {0.0f, -1.0f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
    expect(spec, scale, values, 2, "the scale is");
  }
  expect(spec, 1, values, -1, "-1 elements");
  expect(spec, 1, nullptr, 2, "the values begins at address 0");
  expect(spec, 1, reinterpret_cast<uint8_t*>(values) + 1, 1, "multiple of 4");
  values[1] = std::nanf("");
  expect(spec, 1, values, 2, "element 1 is nan");
  EXPECT_EQ(codes[0], 7);
  EXPECT_OK(CastFp8(spec, 1, Format::kFp32, nullptr, 0, nullptr));
}

}  // namespace
}  // namespace shardmesh
