// StepPass: what executes commands on one worker's shard. Two implementations, the same bits: Pass on the host's
// processors (pass.h) and DevicePass on a CUDA device (worker/pass/device/device_pass.h).
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/control/control_block.h"
#include "worker/memory/shard_storage.h"

namespace shardmesh {

// What the pass tells, and is told, of buckets while it executes a command. Thread-safe.
class BucketGate {
 public:
  virtual ~BucketGate() = default;
  // Waits until the gradients of a bucket are there. False: they will not come, and the command has no result.
  virtual bool AwaitGradients(const Command& command, int bucket) = 0;
  // The first `buckets` are done.
  virtual void Done(uint64_t seq, int buckets) = 0;
};

class StepPass {
 public:
  virtual ~StepPass() = default;

  // Executes a command; running it again gives the same bytes. `initial` is this shard's part of the initial
  // weights (shard.proto), needed by kInit only. Returns the shard's digest for kDigest, else 0.
  // `gate`, if any, is asked before and told after the ranges of each bucket, in their order.
  // An error: the command has no result, and the job cannot go on. Aborted: the job was aborted meanwhile. DataLoss:
  // the shard is damaged, as the control block's word says.
  virtual absl::StatusOr<uint64_t> Run(const Command& command, uint64_t seq, const float* initial,
                                       BucketGate* gate = nullptr) = 0;

  // Of bucket residency, for the lead. Internal: the system refuses.
  // Gives back the pages of gradients that a command has summed, behind it and before it is committed: of kReduceBucket
  // the bucket's in all slots; with pulled slots of kMerge those of the windows whose results it has, and of kStep
  // those of all windows, since results that did not count lie there still. No effect of other commands and jobs.
  virtual absl::Status GiveBackGradients(const Command& command) = 0;
  // Between commands: the pages of a bucket that nobody uses, in the window, which then shows what
  // core/job/absent_weights.h says.
  virtual absl::Status GiveBackWeights(int bucket) = 0;

  // Bytes of weights, without their scales, that steps and kGatherBucket wrote into the parameter window since
  // construction. Thread-safe.
  virtual int64_t gathered_bytes() const = 0;
  // Bytes of weights and states, with what rotation and matrices take beside them.
  virtual int64_t shard_bytes() const = 0;
  // The CUDA device that it runs on; -1: the host's processors.
  virtual int device() const { return -1; }
  // How its shard is cut. Copies of it in memory of the host are cut the same way.
  virtual StorageCut cut() const { return {}; }
  // Whether the shard is not memory of the host: what is read for it is read into such a copy.
  virtual bool staged() const { return false; }
  // Of a job that has no weights yet, if it is staged: takes weights and states from such a copy, of parity 0, and kRestore
  // places them. For any thread, while Run is not called. Unavailable: the device failed.
  virtual absl::Status Fill(const ShardStorage&) {
    return absl::UnimplementedError("the shard is in memory of the host");
  }
};

}  // namespace shardmesh
