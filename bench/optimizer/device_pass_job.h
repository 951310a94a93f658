// DevicePassJob: a job of one worker on a CUDA device, with the memory of its host, that takes steps; what
// bench/device_pass measures as ours. With it the same job on processors, to compare the bits. For one thread.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "worker/memory/host_memory.h"
#include "worker/memory/memory.h"
#include "worker/pass/device/device_pass.h"
#include "worker/pass/step_pass.h"

namespace shardmesh::bench {

class DevicePassJob {
 public:
  // `device`: null: on processors, with `threads`. Errors as the passes'.
  static absl::StatusOr<std::unique_ptr<DevicePassJob>> Create(const JobSpec& spec, const WorkerDevice* device,
                                                               int threads = 1);

  // Places weights and writes gradients, both made of `seed`.
  absl::Status Begin(uint64_t seed);
  // The next step, published in turns; until it is done.
  absl::Status Step();
  absl::StatusOr<uint64_t> Digest();
  // Bytes of the window, digested.
  absl::StatusOr<uint64_t> WindowDigest();

  // Read and written by a step: the shard, the gradients, the window and one publication.
  int64_t MovedBytes() const;

 private:
  explicit DevicePassJob(const JobSpec& spec, Plan plan) : spec_(spec), plan_(std::move(plan)) {}
  absl::Status Execute(Command& command, const float* initial = nullptr);

  const JobSpec spec_;
  const Plan plan_;
  std::unique_ptr<Memory> memory_;
  std::unique_ptr<HostMemory> host_;
  std::unique_ptr<ShardStorage> storage_;
  std::unique_ptr<StepPass> pass_;
  uint64_t seq_ = 0, digest_ = 0;
  int64_t step_ = 0;
  int parity_ = 0;
};

}  // namespace shardmesh::bench
