// Snapshot: a worker's shard as it was at one committed step, in memory of its own, so that it can be written to files
// while training goes on. SnapshotPort: where a pass finds the one that is wanted.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/sync.h"
#include "core/job/plan.h"
#include "worker/memory/shard_storage.h"

namespace shardmesh {

class Snapshot {
 public:
  // Takes all the memory that it will need from the system, so that a pass that copies does not wait for pages. `cut`:
  // StepPass::cut of that pass. ResourceExhausted: there is not so much.
  static absl::StatusOr<std::shared_ptr<Snapshot>> Create(const Plan& plan, int shard, const StorageCut& cut = {});

  // The copy. Different ranges may be written by different threads.
  const ShardStorage& storage() const { return storage_; }

  // These bytes of it are not needed any more: their memory, but for parts of a page, goes back to the system.
  static void GiveBack(char* data, int64_t bytes);

 private:
  explicit Snapshot(ShardStorage storage) : storage_(std::move(storage)) {}

  const ShardStorage storage_;
};

// One snapshot at a time, between who wants it and the pass. Thread-safe.
class SnapshotPort {
 public:
  struct Copied {
    int64_t step = 0;
    int parity = 0;  // where its data lies
  };

  // The next digest of the shard fills it. Aborted: another one was asked for, and not taken away yet.
  absl::Status Ask(std::shared_ptr<Snapshot> snapshot);
  // Waits until it is filled. Unset: it is not, yet.
  std::optional<Copied> Await(absl::Duration timeout);
  void TakeAway();

  // The pass's. What is to be filled, or null; and that it is, unless it was taken away meanwhile.
  std::shared_ptr<Snapshot> Wanted() const;
  void Filled(const Snapshot* snapshot, Copied copied);

 private:
  mutable Mutex mu_;
  CondVar filled_;
  std::shared_ptr<Snapshot> snapshot_ ABSL_GUARDED_BY(mu_);
  std::optional<Copied> copied_ ABSL_GUARDED_BY(mu_);
};

}  // namespace shardmesh
