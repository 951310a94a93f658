// The job of bench/step and bench/step_rivals: as a rule 4 ranks, 4 slots of bf16 gradients, bf16_sr weights, fp32
// states, all of it in shared memory that is mapped before the workers are forked, so that every process (and the
// parent, which compares) sees all.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/harness/step_formats.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "worker/memory/host_memory.h"
#include "worker/memory/memory.h"
#include "worker/memory/shard_storage.h"

namespace shardmesh::bench {

inline constexpr int kRanks = 4;
inline constexpr int kStepSlots = 4;
inline constexpr int kStepPublishEvery = 3;  // odd, so that published steps walk up and down in turns

struct StepShape {
  int ranks = kRanks, slots = kStepSlots;
  StepFormats formats = {WeightFormat::kBf16Sr, StateFormat::kFp32, Format::kBf16};
  int publish_every = kStepPublishEvery;
};

struct StepJob {
  static constexpr int64_t kTensorElements = int64_t{4} << 20;  // of each parameter

  JobSpec spec;
  Plan plan;
  HostMemory host;
  std::vector<ShardStorage> shards;  // by rank

  // Fills the gradient slots with random finite numbers. ResourceExhausted: not enough memory.
  static absl::StatusOr<std::unique_ptr<StepJob>> Create(Memory& memory, int64_t num_elements, const StepShape& = {});

  // One rank's piece of the initial weights, a function of their place alone.
  std::vector<float> InitialShard(int rank) const;

  // Bytes that a fused step has to move, for all ranks: every input read once, every output written once. REQUIRES: the
  // formats are those of the rule.
  int64_t FusedBytes(bool published) const;
};

}  // namespace shardmesh::bench
