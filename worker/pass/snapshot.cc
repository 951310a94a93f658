#include "worker/pass/snapshot.h"

#include <sys/mman.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "worker/memory/memory.h"

namespace shardmesh {

absl::StatusOr<std::shared_ptr<Snapshot>> Snapshot::Create(const Plan& plan, int shard, const StorageCut& cut) {
  ASSIGN_OR_RETURN(ShardStorage storage,
                   ShardStorage::Open(*NewPrivateMemory(), absl::StrCat("shardmesh-snapshot-", shard), plan, shard,
                                      /*cancelled=*/nullptr, cut));
  return std::shared_ptr<Snapshot>(new Snapshot(std::move(storage)));
}

void Snapshot::GiveBack(char* data, int64_t bytes) {
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kSegmentPage - 1) & -uintptr_t{kSegmentPage};
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) & -uintptr_t{kSegmentPage};
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
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
