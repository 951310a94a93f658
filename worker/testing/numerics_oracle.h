// NumericsOracle: training in any formats and with any optimizer of a job, every tensor a single run of the reference
// kernel: no mesh, no buckets, no chunks, no threads. Tests only.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "core/matchers.h"
#include "core/stream_digest.h"
#include "kernels/encode.h"
#include "kernels/optimizer_step.h"
#include "worker/testing/training_oracle.h"

namespace shardmesh {

// What a job is trained with. Gradients are as their format holds them.
struct OracleInput {
  std::function<float(int tensor, int64_t element)> initial = InitialValue;
  std::function<float(Format format, int slot, int64_t step, int tensor, int64_t element)> gradient = GradientValue;
  GroupRates rates;  // unset: the job's
};

class NumericsOracle {
 public:
  explicit NumericsOracle(const JobSpec& job, OracleInput input = {})
      : job_(job), input_(std::move(input)), tensors_(job.parameters.size()) {
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const ParameterSpec& p = job_.parameters[t];
      if (!p.tied_to.empty()) continue;
      std::vector<float> values(p.NumElements());
      for (size_t e = 0; e < values.size(); ++e) {
        values[e] = input_.initial(static_cast<int>(t), static_cast<int64_t>(e));
      }
      CodeSpec spec;
      spec.seed = job.seed;
      spec.step = 0;
      spec.tensor = static_cast<uint32_t>(t);
      spec.format = CodeFormatOf(p.format);
      tensors_[t].streams.emplace_back(spec, LayoutOf(p.format), values);
      values.assign(values.size(), 0);
      for (int s = 0; s < (p.frozen ? 0 : NumStates(job.optimizer)); ++s) {
        spec.format = CodeFormatOf(p.states);
        spec.is_signed = StateIsSigned(job.optimizer, s);
        tensors_[t].streams.emplace_back(spec, LayoutOf(p.states), values);
      }
    }
  }

  void RunStep(int64_t step) {
    norm_ = 0;
    clip_ = job_.clip_norm > 0 ? ClipFactor(job_.clip_norm, norm_ = NormOf(step)) : 1;
    for (size_t t = 0; t < tensors_.size(); ++t) {
      if (job_.parameters[t].tied_to.empty() && !job_.parameters[t].frozen) StepTensor(step, static_cast<int>(t));
    }
  }

  // Of the last step's gradients; 0 where the job does not clip them.
  double norm() const { return norm_; }

  // The bytes of a tensor's weights as windows hold them: coded ones as Encode gives them for the whole tensor, codes
  // and then scales.
  std::vector<char> Stored(int tensor) const {
    const ParameterSpec& p = job_.parameters[tensor];
    const auto* codes = reinterpret_cast<const char*>(tensors_[tensor].streams[0].codes.data());
    const int64_t n = p.NumElements();
    const Format format = GatheredFormat(p.format);
    if (p.gather == GatherFormat::kStored) return {codes, codes + n * BytesPerElement(format)};
    std::vector<float> values(n);
    for (int64_t e = 0; e < n; ++e) {
      uint32_t bits = 0;
      std::memcpy(reinterpret_cast<char*>(&bits) + 4 - BytesPerElement(format), codes + e * BytesPerElement(format),
                  BytesPerElement(format));
      values[e] = FloatOfBits(bits);
    }
    CodeSpec spec;
    spec.format = ParseCodeFormat(GatherFormatName(p.gather)).value();
    const std::vector<CodePart> parts = PartsOf(spec, p.shape).value();
    std::vector<float> memory[2];  // aligned
    std::vector<void*> pointers;
    for (size_t i = 0; i < 2; ++i) {
      memory[i].resize(parts[i].NumElements());
      pointers.push_back(memory[i].data());
    }
    EXPECT_OK(Encode(spec, p.shape, values.data(), pointers));
    std::vector<char> bytes;
    for (size_t i = 0; i < 2; ++i) {
      const auto* begin = static_cast<const char*>(pointers[i]);
      bytes.insert(bytes.end(), begin, begin + parts[i].NumElements() * BytesOf(parts[i].type));
    }
    return bytes;
  }

  uint64_t Digest() const {
    uint64_t digest = 0;
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const std::vector<Stream>& streams = tensors_[t].streams;
      for (size_t s = 0; s < streams.size(); ++s) {
        digest += DigestStream(static_cast<uint32_t>(t), static_cast<int>(s), streams[s].layout, 0,
                               streams[s].codes.data(), streams[s].extra.data(), job_.parameters[t].NumElements());
      }
    }
    return digest;
  }

 private:
  struct Stream {
    Stream(const CodeSpec& spec, const StoredLayout& stored, const std::vector<float>& values)
        : layout(stored),
          codes(layout.codes.BytesOf(static_cast<int64_t>(values.size())) / 8 + 1),
          extra(layout.extra.BytesOf(static_cast<int64_t>(values.size())) / 8 + 1) {
      const std::vector<void*> parts = {codes.data(), extra.data()};
      EXPECT_OK(Encode(spec, {static_cast<int64_t>(values.size())}, values.data(),
                       absl::MakeSpan(parts).first(layout.extra.bytes == 0 ? 1 : 2)));
    }
    StoredRun run() { return {codes.data(), layout.extra.bytes == 0 ? nullptr : extra.data()}; }

    StoredLayout layout;
    std::vector<uint64_t> codes, extra;
  };
  struct Tensor {
    std::vector<Stream> streams;  // the weights, then each state
  };

  // The gradients of a tensor, and a run that has nothing else yet.
  struct Slots {
    Slots(const JobSpec& job, const OracleInput& input, int64_t step, int t)
        : gradients(job.num_slots), elements(job.parameters[t].NumElements()) {
      for (int slot = 0; slot < job.num_slots; ++slot) {
        for (int64_t e = 0; e < elements; ++e) {
          gradients[slot].push_back(input.gradient(job.gradient_format, slot, step, t, e));
        }
        pointers.push_back(gradients[slot].data());
      }
    }
    OptimizerRun run() const {
      OptimizerRun run;
      run.gradients = pointers.data();
      run.num_slots = static_cast<int>(pointers.size());
      run.divide_scale = static_cast<float>(1.0 / run.num_slots);
      run.num_elements = elements;
      return run;
    }

    std::vector<std::vector<float>> gradients;
    std::vector<const void*> pointers;
    const int64_t elements;
  };

  double NormOf(int64_t step) const {
    std::vector<float> roots;
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const ParameterSpec& p = job_.parameters[t];
      if (!p.tied_to.empty() || p.frozen || p.NumElements() == 0) continue;
      const Slots slots(job_, input_, step, static_cast<int>(t));
      std::vector<float> sums((slots.elements + 255) / 256);
      OptimizerRun run = slots.run();
      run.square_sums = sums.data();
      OptimizerContext context;
      GradientSquaresReference(context, run);
      roots.push_back(TreeSum<float>(static_cast<int>(sums.size()), [&](int i) { return sums[i]; }));
    }
    return std::sqrt(double{TreeSum<float>(static_cast<int>(roots.size()), [&](int i) { return roots[i]; })});
  }

  void StepTensor(int64_t step, int t) {
    const ParameterSpec& p = job_.parameters[t];
    OptimizerContext context;
    context.hyper = job_.group(p.group);
    if (input_.rates) context.hyper.lr = input_.rates(p.group, step);
    context.scalars = ComputeStepScalars(context.hyper, step).value();
    context.weights = p.format;
    context.states = p.states;
    context.gradients = Format::kFp32;
    context.seed = job_.seed;
    context.step = step;
    const Slots slots(job_, input_, step, t);
    OptimizerRun run = slots.run();
    run.clip = clip_;
    std::vector<Stream>& streams = tensors_[t].streams;
    run.weights_in = run.weights_out = streams[0].run();
    for (size_t s = 1; s < streams.size(); ++s) run.states_in[s - 1] = run.states_out[s - 1] = streams[s].run();
    run.tensor = static_cast<uint32_t>(t);
    ASSERT_OK(CheckRun(context, run));
    OptimizerStepReference(context, run);
  }

  const JobSpec job_;
  const OracleInput input_;
  std::vector<Tensor> tensors_;
  double norm_ = 0;
  float clip_ = 1;
};

}  // namespace shardmesh
