// DevicePass: executes commands on one worker's shard on a CUDA device: the fused reduce -> step -> gather of pass.h as
// one kernel for all buckets of like formats (kernels/cuda/fused_pass.h). Slots, window and publications are in the
// device's memory, which all workers of the host map. Several workers may share a device. The bits are those of Pass.
//
// A command's launches are: the gate, which opens when the control block says that the command is decided and looks at
// the abort word first, with a time limit (kernels/cuda/pass_gate.h); the command's scalars, from pinned memory;
// kernels, a block a range, one for as many buckets in a row as have the same formats; the arrival. Nothing changes
// unless the gate opened. The calling thread sleeps for most of what the last command of the kind took, and then looks
// whether the stream is done, until a time limit of its own.
//
// Initial weights go through the host, some ranges at a time, and weights from the shard to windows and publications by
// copies on the device. Digests are made there, too (device_digest.h), as are the checks of a job with check_every
// (device_checks.h). Who wants a copy of the shard (snapshot.h) gets it with the next digest. Gradients are looked at a
// second time as on processors (device_pass_look.cc).
//
// Not here, and refused when a job is created (core/job/support_table.h): matrices of Muon, weights gathered in codes,
// bucket residency, several hosts.
//
// Run is for one thread at a time. A device that failed, or a kernel that does not end, is an error that names it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "kernels/cuda/fused_pass_kernels.h"
#include "local/device/device_runtime.h"
#include "local/device/device_segment.h"
#include "worker/control/group_table.h"
#include "worker/control/host_ranks.h"
#include "worker/memory/host_memory.h"
#include "worker/memory/shard_storage.h"
#include "worker/pass/device/device_checks.h"
#include "worker/pass/device/device_digest.h"
#include "worker/pass/device/pinned_block.h"
#include "worker/pass/snapshot.h"
#include "worker/pass/step_pass.h"

namespace shardmesh {

// The device of a worker: what all of its jobs share.
struct WorkerDevice {
  std::shared_ptr<DeviceRuntime> copies;  // a stream for copies alone
  const PassKernels* kernels = nullptr;

  // `number` as cudaSetDevice counts. `library`: the driver's, "" for the system's.
  //   Unimplemented: this build has no kernels, or the driver no virtual memory management. Unavailable: no driver or
  //   no such device; the driver's words are in the message.
  static absl::StatusOr<WorkerDevice> Open(int number, const PassKernels* kernels = BuiltPassKernels(),
                                           const std::string& library = "");
};

struct DevicePassOptions {
  absl::Duration gate_timeout = absl::Seconds(5);  // from a launch until the command is decided
  absl::Duration timeout = absl::Seconds(60);      // of a command
  absl::Duration end_timeout = absl::Seconds(10);  // for what is on the device when the pass goes
  const std::atomic<bool>* cancelled = nullptr;    // looked at while the pass is made
};

class DevicePass final : public StepPass {
 public:
  // Allocates the shard on the device. Borrowed arguments outlive the object.
  //   ResourceExhausted: the device has not enough memory. Cancelled: it is not wanted any more. Unavailable: the
  //   device failed.
  // REQUIRES: host.device() is not null, and of the same device.
  static absl::StatusOr<std::unique_ptr<DevicePass>> Create(const JobSpec& job, const Plan& plan, ShardPlace place,
                                                            HostMemory& host, const WorkerDevice& device,
                                                            ReplicaShare share, const DevicePassOptions& options);
  // Where a kernel still runs after `end_timeout`, the memory that it may touch stays until the process ends.
  ~DevicePass() override;

  //   Aborted: the job was aborted before the gate opened; nothing changed. DeadlineExceeded: the gate's time limit
  //   passed (nothing changed), or the command's. Unavailable: the device failed. DataLoss: the shard is damaged
  //   (worker/control/damage.h); the member's word says where.
  absl::StatusOr<uint64_t> Run(const Command& command, uint64_t seq, const float* initial, BucketGate* gate) override;
  absl::Status GiveBackGradients(const Command& command) override;
  absl::Status GiveBackWeights(int bucket) override;
  int64_t gathered_bytes() const override { return gathered_bytes_.load(std::memory_order_relaxed); }
  int64_t shard_bytes() const override {
    return storage_.allocated_bytes() + (checks_ != nullptr ? checks_->device_bytes() : 0);
  }
  int device() const override { return steps_->device(); }
  StorageCut cut() const override { return kDeviceCut; }
  bool staged() const override { return true; }
  //   DeadlineExceeded: a copy took longer than one may.
  absl::Status Fill(const ShardStorage& from) override;
  // Where a digest finds the copy of the shard that somebody wants, if any. It is cut as this shard.
  void TakeSnapshots(SnapshotPort* port) { snapshots_ = port; }

 private:
  // A bucket that this shard steps something of.
  struct BucketTables {
    int bucket = 0;
    int range = 0;                         // its first, of all of the shard's
    int first_range = 0, num_ranges = 0;   // of those that are stepped
    std::vector<int> groups;               // of its parameters
    std::optional<OptimizerContext> warp;  // of the formats of all of them, where a body is compiled for those
    int64_t step_at = 0;                   // bytes from where commands' scalars begin
  };
  // Ranges in a row that one kernel steps.
  struct PassLaunch {
    int first_range = 0, num_ranges = 0;
    std::optional<OptimizerContext> warp;
  };
  // What the shard's kernels read and no command changes: of what is stepped.
  struct Tables {
    std::vector<PassRange> ranges;
    std::vector<int> cut_ranges;  // which of the cut's each is
    std::vector<PassChunkRun> runs;
    std::vector<int32_t> first_runs;
  };

  DevicePass(const JobSpec& job, const Plan& plan, Rank rank, HostMemory& host, const PassKernels& kernels,
             ReplicaShare share, const DevicePassOptions& options, ShardStorage cut);
  absl::Status Open(const WorkerDevice& device);
  absl::Status UploadTables();
  void AddBucket(int bucket, Tables& all);
  void AddLaunch(const BucketTables& tables);
  OptimizerContext FormatsOf(const Bucket& bucket, int group) const;
  absl::Status Rehearse();
  // What else a step does.
  struct Watch {
    bool checks = false;   // of chunks that are drawn
    bool squares = false;  // of the gradients that it has read
  };
  // Steps, or sums squares: on the device.
  absl::Status Launch(const Command& command, uint64_t seq, const Watch& watch);
  // `again`: by the scalars that have no place that is written: steps what was drawn, in the scratch of the checks, and
  // squares into look_sums_.
  absl::Status LaunchBuckets(CommandKind kind, uint64_t seq, bool again = false);
  absl::Status RunStep(const Command& command, uint64_t seq);
  absl::Status RunNorm(const Command& command, uint64_t seq);
  char* Scalars() const;
  uint64_t* ResultOnDevice() const;
  absl::Status Launched(const char* error, absl::string_view what) const;
  void FillSteps(const Command& command, uint64_t seq, bool again);
  void FillStep(const Command& command, uint64_t seq, const BucketTables& bucket, PassStep& step,
                PassOptimizer* groups);
  absl::Status AwaitResult(CommandKind kind, uint64_t seq);
  // Of the last command that ended, where that is `seq`.
  GateVerdict Verdict(uint64_t seq) const;
  // Through the host (device_pass_host.cc).
  class HostRanges;
  absl::Status Upload(const HostRanges& ranges) const;
  absl::Status PlaceInitial(const Command& command, const float* initial);
  void EncodeRange(const Command& command, int range, const float* initial, const HostRanges& to) const;
  absl::Status CopyShard(Snapshot& to) const;
  absl::StatusOr<uint64_t> Digest(const Command& command);
  // The second look at gradients, by the sums of squares that the device told (device_pass_look.cc).
  absl::Status OpenLook();
  const float* LookSums(int bucket) const;
  // `sums`: by bucket, where the sum of its first block is, or would be.
  absl::Status LookAgain(const std::function<const float*(int bucket)>& sums);
  absl::StatusOr<std::optional<Damage>> LookAt(int range, int64_t chunk) const;
  absl::StatusOr<bool> AreNumbers(const Bucket& bucket, int64_t element, int64_t num_elements) const;
  // The first range behind as many, from `first` on, as one copy takes.
  int EndOfCopy(int first) const;
  // On the device: the shard's weights into the window and publications; the window into a publication.
  absl::Status PlaceWeights(const Command& command);
  absl::Status PlaceRange(const Command& command, int range);
  absl::Status PublishShare(const Command& command);
  std::vector<uint8_t*> Places(const Command& command, int bucket) const;

  const JobSpec& job_;
  const Plan& plan_;
  const Rank rank_;
  HostMemory& host_;
  const GroupTable groups_;
  const PassKernels& kernels_;
  const ReplicaShare share_;
  const DevicePassOptions options_;
  const ShardStorage cut_;
  std::shared_ptr<DeviceRuntime> steps_;  // a stream for kernels
  DeviceSegment storage_, tables_, block_;
  std::vector<BucketTables> buckets_;
  std::vector<PassLaunch> launches_;
  int64_t steps_bytes_ = 0;  // of a command's scalars, which are there twice: the second have no place that is written
  uint64_t begun_ = 0;       // the last step of which kernels may have done a part, or all; 0: no step
  absl::Duration usual_[2];  // how long the last step and the last norm took
  const PassChunkRun* runs_ = nullptr;
  const int32_t* first_runs_ = nullptr;
  const PassRange* ranges_ = nullptr;
  PinnedBlock host_block_;  // where the device tells the result, and behind it a command's scalars
  std::unique_ptr<DeviceDigest> digest_;
  std::unique_ptr<DeviceChecks> checks_;  // null: of a job without check_every
  // Of steps that look again: sums of squares of the shard's gradients, and by bucket how many are before its first
  // block's.
  PinnedBlock look_sums_;
  std::vector<int64_t> look_at_;
  std::vector<int64_t> initial_begin_;  // by range: elements before it in the shard of initial weights
  int64_t window_bytes_ = 0;            // that a step writes
  SnapshotPort* snapshots_ = nullptr;
  std::atomic<int64_t> gathered_bytes_{0};
};

}  // namespace shardmesh
