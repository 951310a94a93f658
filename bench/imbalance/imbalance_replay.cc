#include "bench/imbalance/imbalance_replay.h"

#include <algorithm>

#include "bench/harness/step_context.h"
#include "bench/harness/step_formats.h"
#include "kernels/optimizer_step.h"

namespace shardmesh::bench {
namespace {

constexpr int64_t kShifts = 4096;  // different samples begin at different places of the same numbers

std::vector<float> Numbers() {
  std::vector<float> numbers;
  for (int64_t i = 0; i < kModelElements + kShifts; ++i) numbers.push_back(StartGradient(static_cast<uint32_t>(i)));
  return numbers;
}

}  // namespace

std::vector<float> InitialWeights() {
  std::vector<float> weights;
  for (int64_t i = 0; i < kModelElements; ++i) weights.push_back(StartWeight(static_cast<uint32_t>(i)));
  return weights;
}

void AddGradient(int64_t sample, bool first, float* to) {
  static const std::vector<float>& numbers = *new std::vector<float>(Numbers());
  const float* const from = numbers.data() + sample * 61 % kShifts;
  const float factor = 1.1f + 0.3f * static_cast<float>(sample % 7);  // no sum is exact: its order matters
  if (first) {
    for (int64_t e = 0; e < kModelElements; ++e) to[e] = from[e] * factor;
  } else {
    for (int64_t e = 0; e < kModelElements; ++e) to[e] += from[e] * factor;
  }
}

Replay::Replay(const JobSpec& job)
    : job_(job),
      weights_(InitialWeights()),
      m_(kModelElements),
      v_(kModelElements),
      gradients_(job.num_slots, std::vector<float>(kModelElements)) {}

void Replay::Step(const std::vector<std::vector<int64_t>>& slots, int64_t tokens) {
  std::vector<const void*> gradients;
  for (size_t s = 0; s < slots.size(); ++s) {
    std::fill(gradients_[s].begin(), gradients_[s].end(), 0.0f);
    for (size_t i = 0; i < slots[s].size(); ++i) AddGradient(slots[s][i], i == 0, gradients_[s].data());
    gradients.push_back(gradients_[s].data());
  }
  OptimizerContext context = AdamWContext({}, ++step_);
  context.hyper = job_.optimizer;
  context.scalars = ComputeStepScalars(job_.optimizer, step_).value();
  context.seed = job_.seed;
  OptimizerRun run;
  run.gradients = gradients.data();
  run.num_slots = static_cast<int>(slots.size());
  run.divide_scale = static_cast<float>(1 / static_cast<double>(tokens));
  run.weights_in = run.weights_out = {weights_.data(), nullptr};
  run.states_in[0] = run.states_out[0] = {m_.data(), nullptr};
  run.states_in[1] = run.states_out[1] = {v_.data(), nullptr};
  run.num_elements = kModelElements;
  OptimizerStepReference(context, run);
}

}  // namespace shardmesh::bench
