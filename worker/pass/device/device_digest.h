// DeviceDigest: the digest of a shard where it lies, on a CUDA device. A kernel digests every stretch of it, and the
// host adds what they tell. The stream is the caller's; the runtime, its memory and the kernels outlive the object. Not
// thread-safe.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/cuda/fused_pass_kernels.h"
#include "local/device/device_segment.h"
#include "worker/memory/shard_storage.h"
#include "worker/pass/device/pinned_block.h"

namespace shardmesh {

class DeviceDigest {
 public:
  // Of the shard that is cut so, at `storage`. The tables are on their way when it returns.
  //   ResourceExhausted: there is not enough memory. Unavailable: the device failed.
  static absl::StatusOr<std::unique_ptr<DeviceDigest>> Create(const ShardStorage& cut, const uint8_t* storage,
                                                              const std::shared_ptr<DeviceRuntime>& device);

  // Into the stream: digests what the shard is as placed by `parity`. Null, or the device's words.
  const char* Launch(const PassKernels& kernels, int parity, void* stream) const;
  // REQUIRES: what was launched is done.
  uint64_t Sum() const;

 private:
  int32_t num_stretches_ = 0;
  DeviceSegment table_;
  PinnedBlock block_;  // a digest a stretch, and behind them the table while it is copied
};

}  // namespace shardmesh
