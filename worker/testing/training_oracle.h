// TrainingOracle: training with AdamW as one plain loop over elements: no mesh, no chunks, no threads, no kernels.
// Weights in fp32, bf16 or bf16_sr, states in fp32; other formats: numerics_oracle.h. Its weights and gradients are
// pure functions of tensor and element. Tests only.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "core/base/philox.h"
#include "core/base/reduction.h"
#include "core/format/stream_digest.h"
#include "worker/testing/small_job.h"

namespace shardmesh {

inline float InitialValue(int tensor, int64_t e) { return RandomValue(1000, tensor, e) * 16; }
// A gradient as its format holds it.
inline float GradientValue(Format format, int slot, int64_t step, int tensor, int64_t e) {
  const float value = RandomValue(step * 128 + slot, tensor, e);
  return format == Format::kFp32 ? value : Bf16ToFloat(FloatToBf16Rne(value));
}

// The learning rate of a parameter group's step.
using GroupRates = std::function<double(int group, int64_t step)>;

class TrainingOracle {
 public:
  explicit TrainingOracle(const JobSpec& job) : job_(job), key_(MakePhiloxKey(job.seed, DrawPurpose::kWeightRounding)) {
    tensors_.resize(job.parameters.size());
    for (size_t t = 0; t < tensors_.size(); ++t) {
      if (!job.parameters[t].tied_to.empty()) continue;
      const int64_t elements = job.parameters[t].NumElements();
      tensors_[t].weights.assign(elements, 0);
      tensors_[t].m.assign(elements, 0);
      tensors_[t].v.assign(elements, 0);
      for (int64_t e = 0; e < job.parameters[t].NumElements(); ++e) {
        const float value = InitialValue(static_cast<int>(t), e);
        tensors_[t].weights[e] =
            job.parameters[t].format == WeightFormat::kFp32 ? value : Bf16ToFloat(FloatToBf16Rne(value));
      }
    }
  }

  void RunStep(int64_t step) {
    const StepScalars s = *ComputeStepScalars(job_.optimizer, step);
    const float scale = static_cast<float>(1.0 / job_.num_slots);
    for (size_t t = 0; t < tensors_.size(); ++t) {
      Tensor& x = tensors_[t];
      if (!job_.parameters[t].tied_to.empty()) continue;
      for (int64_t e = 0; e < job_.parameters[t].NumElements(); ++e) {
        const float g = TreeSum<float>(job_.num_slots,
                                       [&](int slot) {
                                         return GradientValue(job_.gradient_format, slot, step, static_cast<int>(t), e);
                                       }) *
                        scale;
        x.m[e] = std::fma(s.beta1, x.m[e], s.one_minus_beta1 * g);
        x.v[e] = std::fma(s.beta2, x.v[e], (s.one_minus_beta2 * g) * g);
        const float denominator = std::fma(std::sqrt(x.v[e]), s.inv_sqrt_bias2, s.eps);
        const float weight = std::fma(s.neg_step_size, x.m[e] / denominator, x.weights[e] * s.decay);
        x.weights[e] = Rounded(step, static_cast<int>(t), e, weight);
      }
    }
  }

  // The bytes of a tensor's weights as stored.
  std::vector<char> Stored(int tensor) const {
    const Tensor& x = tensors_[tensor];
    const int64_t bytes = BytesPerElement(GatheredFormat(job_.parameters[tensor].format));
    std::vector<char> stored(x.weights.size() * bytes);
    for (size_t e = 0; e < x.weights.size(); ++e) {
      const uint32_t bits = FloatBits(x.weights[e]);
      const uint16_t half = static_cast<uint16_t>(bits >> 16);
      if (bytes == 4) std::memcpy(&stored[e * 4], &bits, 4);
      if (bytes == 2) std::memcpy(&stored[e * 2], &half, 2);
    }
    return stored;
  }

  uint64_t Digest() const {
    uint64_t digest = 0;
    for (int t = 0; t < static_cast<int>(tensors_.size()); ++t) {
      const Tensor& x = tensors_[t];
      const int64_t n = static_cast<int64_t>(x.weights.size());
      const auto stream = [&](int number, const void* data, int64_t bytes) {
        return DigestPart(DigestKey(static_cast<uint32_t>(t), number, 0), {bytes}, 0, data, n);
      };
      digest += stream(0, Stored(t).data(), BytesPerElement(GatheredFormat(job_.parameters[t].format))) +
                stream(1, x.m.data(), 4) + stream(2, x.v.data(), 4);
    }
    return digest;
  }

 private:
  struct Tensor {
    std::vector<float> weights, m, v;
  };
  float Rounded(int64_t step, int tensor, int64_t e, float weight) const {
    switch (job_.parameters[tensor].format) {
      case WeightFormat::kFp32:
        return weight;
      case WeightFormat::kBf16:
        return Bf16ToFloat(FloatToBf16Rne(weight));
      case WeightFormat::kBf16Sr:
        return Bf16ToFloat(FloatToBf16Sr(weight, Draw16(key_, step, tensor, e)));
      default:
        return std::nanf("");
    }
  }

  const JobSpec job_;
  const PhiloxKey key_;
  std::vector<Tensor> tensors_;
};

}  // namespace shardmesh
