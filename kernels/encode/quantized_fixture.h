// What the tests of kernels/encode/encode.h share: quantized arrays in memory of their own.
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/base/matchers.h"
#include "gtest/gtest.h"
#include "kernels/encode/encode.h"

namespace shardmesh {

inline constexpr CodeFormat kAll[] = {CodeFormat::kFp32,       CodeFormat::kBf16,        CodeFormat::kBf16Sr,
                                      CodeFormat::kBf16Plus16, CodeFormat::kBf16Plus8Sr, CodeFormat::kInt8Row,
                                      CodeFormat::kNf4,        CodeFormat::kDyn8,        CodeFormat::kDyn4,
                                      CodeFormat::kFp8,        CodeFormat::kFp8x32,      CodeFormat::kFp8Tensor,
                                      CodeFormat::kFp8Row,     CodeFormat::kFp8Block,    CodeFormat::kMx8};

// The parts of a quantized array, in memory of their own.
struct Quantized {
  Quantized(const CodeSpec& spec, std::vector<int64_t> shape) : dims(std::move(shape)) {
    const std::vector<CodePart> layout = PartsOf(spec, dims).value();
    for (const CodePart& part : layout) {
      parts.emplace_back((part.NumElements() * BytesOf(part.type) + 7) / 8 * 2, 0xFFFFFFFFu);
    }
    for (auto& part : parts) pointers.push_back(part.data());
  }
  uint8_t* codes() { return reinterpret_cast<uint8_t*>(pointers[0]); }
  uint16_t* halves() { return reinterpret_cast<uint16_t*>(pointers[0]); }
  float* scales() { return reinterpret_cast<float*>(pointers[1]); }
  uint16_t* short_scales() { return reinterpret_cast<uint16_t*>(pointers[1]); }  // bf16: of fp8x32

  std::vector<int64_t> dims;
  std::vector<std::vector<uint32_t>> parts;
  std::vector<void*> pointers;
};

inline std::vector<float> Decoded(const CodeSpec& spec, Quantized& quantized) {
  int64_t elements = 1;
  for (const int64_t size : quantized.dims) elements *= size;
  std::vector<float> values(elements);
  EXPECT_OK(Decode(spec, quantized.dims, std::vector<const void*>(quantized.pointers.begin(), quantized.pointers.end()),
                   values.data()));
  return values;
}

inline Quantized Encoded(const CodeSpec& spec, std::vector<int64_t> dims, const std::vector<float>& values) {
  Quantized quantized(spec, std::move(dims));
  EXPECT_OK(Encode(spec, quantized.dims, values.data(), quantized.pointers));
  return quantized;
}

inline CodeSpec Spec(CodeFormat format) {
  CodeSpec spec;
  spec.format = format;
  return spec;
}

inline std::vector<float> Numbers(int64_t n, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(n);
  for (float& x : numbers) x = normal(random) * std::ldexp(1.0f, static_cast<int>(random() % 12) - 10);
  return numbers;
}

}  // namespace shardmesh
