// OptimizerJob: a list of tensors with their gradients, weights and AdamW states in given formats, and their step on
// one or more threads; what bench/optimizer measures as ours.
//
// Each stream (gradients, weights, states and their parts) lies in one mapping for all tensors, in huge pages where the
// kernel gives them, as a worker's shards do (worker/memory/shard_storage.h); the streams begin at different multiples
// of 64 KiB + 4 KiB, because streams congruent modulo 2 MiB are slower. A step is one pass over the list: every thread
// of the team takes an equal share of the elements, cut at multiples of kStepAlignment inside a tensor. For one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/harness/step_formats.h"
#include "bench/harness/thread_team.h"
#include "kernels/optimizer_step.h"

namespace shardmesh::bench {

// Zeros at an address that is `phase` times 68 KiB beyond a multiple of 2 MiB, in pages that were all touched.
class Mapping {
 public:
  // ResourceExhausted: no memory.
  static absl::StatusOr<Mapping> Create(int64_t num_bytes, int phase);
  Mapping(Mapping&& other) noexcept;
  ~Mapping();

  uint8_t* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  Mapping() = default;
  void* mapped_ = nullptr;
  int64_t mapped_bytes_ = 0, num_bytes_ = 0;
  uint8_t* data_ = nullptr;
};

class OptimizerJob {
 public:
  // Fills weights and gradients (StartWeight, StartGradient below), touches everything and checks the runs. One entry
  // of `sizes` a tensor, in elements; `team` outlives the job. ResourceExhausted: no memory. InvalidArgument: as
  // CheckRun.
  static absl::StatusOr<std::unique_ptr<OptimizerJob>> Create(const std::vector<int64_t>& sizes,
                                                              const StepFormats& formats, ThreadTeam& team,
                                                              OptimizerStepFn step = BestOptimizerStep());

  // The next step, from 1 on, of all tensors.
  void Step();
  // Gradients of another draw: those that element i + shift would have had.
  void FillGradients(int64_t shift);

  int64_t num_elements() const { return num_elements_; }
  // Of weights and states as they lie in memory, without what pads a tensor to cache lines, over the elements.
  double StoredBytes() const;
  // Gradients, weights, their remainder, then two states, each with its scales; empty where a format has no such part.
  const std::vector<Mapping>& streams() const { return streams_; }

 private:
  OptimizerJob(const StepFormats& formats, ThreadTeam& team, OptimizerStepFn step)
      : formats_(formats), team_(team), step_fn_(step), runs_(team.size()) {}
  absl::Status Allocate(const std::vector<int64_t>& sizes);
  void FillWeights();
  absl::Status CutRuns(const std::vector<int64_t>& sizes);
  absl::Status AddRun(int thread, int tensor, int64_t begin, int64_t end);

  const StepFormats formats_;
  ThreadTeam& team_;
  const OptimizerStepFn step_fn_;
  std::vector<PartLayout> parts_;  // of the streams
  std::vector<Mapping> streams_;
  std::vector<std::vector<int64_t>> offsets_;    // [stream][tensor], in bytes
  std::vector<int64_t> first_elements_;          // [tensor], of the list
  std::vector<const void*> gradients_;           // one a run
  std::vector<std::vector<OptimizerRun>> runs_;  // [thread]
  int64_t num_elements_ = 0, stored_bytes_ = 0, steps_ = 0;
};

}  // namespace shardmesh::bench
