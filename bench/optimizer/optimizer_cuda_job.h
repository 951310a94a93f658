// OptimizerCudaJob: a list of tensors with gradients, weights and AdamW states on the current device, and their step as
// one launch; what bench/optimizer_cuda measures as ours. Only in builds with --config=cuda. For one thread.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/harness/step_formats.h"
#include "kernels/cuda/device_memory_cuda.h"
#include "kernels/cuda/device_table_cuda.h"
#include "kernels/cuda/optimizer_step_cuda.h"

namespace shardmesh::bench {

class OptimizerCudaJob {
 public:
  // One entry of `sizes` a tensor, in elements. Weights and gradients begin as StartWeight and StartGradient of their
  // place in the list. ResourceExhausted: no memory on the device. Internal: the device refused to fill it.
  static absl::StatusOr<std::unique_ptr<OptimizerCudaJob>> Create(const std::vector<int64_t>& sizes,
                                                                  const StepFormats& formats);

  // The next step, from 1 on, of all tensors; asynchronous, in the default stream. Errors as OptimizerStepListCuda.
  absl::Status Step();

  // Compares `samples` tiles, spread over the list, with those of as many steps of the reference. Internal: the first
  // tile and stream that differ.
  absl::Status Verify(int samples) const;

 private:
  // Weights, their remainder, then two states, each with its scales.
  static constexpr int kStreams = 6;

  explicit OptimizerCudaJob(const StepFormats& formats) : formats_(formats) {}
  absl::Status Allocate(const std::vector<int64_t>& sizes);
  absl::Status Fill() const;
  absl::Status MakeItems();
  absl::Status VerifyTile(size_t tensor, int64_t tile) const;

  const StepFormats formats_;
  std::vector<int64_t> sizes_, first_elements_;  // [tensor]; of the list
  std::vector<PartLayout> parts_;                // of the streams; the last is the gradients'
  std::vector<std::vector<int64_t>> offsets_;    // [stream][tensor], in bytes
  std::vector<std::unique_ptr<DeviceBlock>> streams_;
  std::unique_ptr<DeviceBlock> slots_;  // each tensor's pointer to its gradient
  std::vector<OptimizerItem> items_;
  DeviceTable tables_[2];  // in turns, so that a step is given out while the one before runs
  int64_t steps_ = 0;
};

}  // namespace shardmesh::bench
