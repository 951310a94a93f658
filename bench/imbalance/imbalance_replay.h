// The model of bench/imbalance: gradients that are a pure function of the sample, and a job's steps over them in one
// process, by the kernels' reference, for comparing. For one thread.
#pragma once

#include <cstdint>
#include <vector>

#include "core/job/job.h"

namespace shardmesh::bench {

inline constexpr int64_t kModelElements = int64_t{1} << 18;
inline constexpr char kModelTensor[] = "weight";

std::vector<float> InitialWeights();

// Of the sample with this number in the run: added to kModelElements at `to`, or, of the first one, written there.
// Thread-safe.
void AddGradient(int64_t sample, bool first, float* to);

class Replay {
 public:
  // `job`: of one parameter, kModelTensor, in fp32, with gradients in fp32 and AdamW; it outlives the object.
  explicit Replay(const JobSpec& job);

  // The next step: of each slot, the samples whose gradients it adds up, in their order. `tokens`: of all.
  void Step(const std::vector<std::vector<int64_t>>& slots, int64_t tokens);

  const std::vector<float>& weights() const { return weights_; }
  int64_t step() const { return step_; }

 private:
  const JobSpec& job_;
  std::vector<float> weights_, m_, v_;
  std::vector<std::vector<float>> gradients_;  // by slot
  int64_t step_ = 0;
};

}  // namespace shardmesh::bench
