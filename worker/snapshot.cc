#include "worker/snapshot.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/status.h"
#include "worker/memory.h"

namespace shardmesh {

absl::StatusOr<std::shared_ptr<Snapshot>> Snapshot::Create(const Plan& plan, int shard) {
  ASSIGN_OR_RETURN(ShardStorage storage,
                   ShardStorage::Open(*NewProcessMemory(), absl::StrCat("shardmesh-snapshot-", shard), plan, shard));
  for (int range = 0; range < static_cast<int>(storage.ranges().size()); ++range) {
    for (int stream = 0; stream < kStreams; ++stream) {
      std::memset(storage.StreamBegin(range, stream), 0, storage.StreamBytes(range, stream));
    }
  }
  return std::shared_ptr<Snapshot>(new Snapshot(std::move(storage)));
}

absl::Status SnapshotPort::Ask(std::shared_ptr<Snapshot> snapshot) {
  MutexLock lock(mu_);
  if (snapshot_ != nullptr) return absl::AbortedError("another checkpoint of this shard is being written; try again");
  snapshot_ = std::move(snapshot);
  return absl::OkStatus();
}

std::optional<SnapshotPort::Copied> SnapshotPort::Await(absl::Duration timeout) {
  MutexLock lock(mu_);
  if (!copied_.has_value()) filled_.WaitFor(mu_, timeout);
  return copied_;
}

void SnapshotPort::TakeAway() {
  MutexLock lock(mu_);
  snapshot_ = nullptr;
  copied_.reset();
}

std::shared_ptr<Snapshot> SnapshotPort::Wanted() const {
  MutexLock lock(mu_);
  return copied_.has_value() ? nullptr : snapshot_;
}

void SnapshotPort::Filled(const Snapshot* snapshot, Copied copied) {
  MutexLock lock(mu_);
  if (snapshot_.get() == snapshot) copied_ = copied;
  filled_.SignalAll();
}

}  // namespace shardmesh
