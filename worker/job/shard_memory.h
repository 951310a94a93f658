// ShardMemory: what one worker's shard of a job lies in on processors: its storage, and the sums that some jobs keep.
// Thread-safe, but Open.
#pragma once

#include <atomic>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "worker/memory/gradient_sums.h"
#include "worker/memory/host_capacity.h"
#include "worker/memory/host_memory.h"
#include "worker/memory/shard_storage.h"

namespace shardmesh {

class ShardMemory {
 public:
  // Borrowed arguments outlive the object. `threads`: that take memory at a time. `capacity`: what the host can give,
  // to so many ranks of the job.
  ShardMemory(const JobSpec& spec, const Plan& plan, HostMemory& host, int threads, const HostCapacity& capacity,
              int ranks_of_host)
      : spec_(spec), plan_(plan), host_(host), threads_(threads), capacity_(capacity), ranks_of_host_(ranks_of_host) {}

  // Before anything else, of a shard on processors. Errors of ShardStorage::Open and GradientSums::Open.
  absl::Status Open(Memory& memory, const std::string& name, int shard, const std::atomic<bool>* cancelled);

  // REQUIRES: opened.
  ShardStorage& storage() { return *storage_; }
  const ShardStorage& storage() const { return *storage_; }
  // Null: the job needs none.
  GradientSums* sums() { return GradientSums::Has(plan_) && sums_.has_value() ? &*sums_ : nullptr; }
  int64_t sum_bytes() const { return GradientSums::Has(plan_) && sums_.has_value() ? sums_->num_bytes() : 0; }

  // Takes the memory that the job's first command writes to from the system: the storage, and this shard's part of the
  // parameter window and of the first publication. For at most `patience`: the rest comes as it is written. Of a new
  // job, before it is used. Returns early when `cancelled` is set. No effect on a device.
  void TakeForFirstCommand(absl::Duration patience, const std::atomic<bool>& cancelled);
  // The same of what the first steps read and write beside that: slots and publications. REQUIRES: opened.
  void TakeForSteps(const std::atomic<bool>& cancelled) const;
  // ResourceExhausted: the host has no room for a checkpoint's copies beside the job.
  absl::Status CheckCopyFits() const {
    return shardmesh::CheckCopyFits(spec_, plan_, capacity_, ranks_of_host_, host_.device() != nullptr);
  }
  // Gives the memory of the shard and of the slots back: nobody needs them any more. Versions stay.
  void GiveBack();

 private:
  const JobSpec& spec_;
  const Plan& plan_;
  HostMemory& host_;
  const int threads_;
  const HostCapacity capacity_;
  const int ranks_of_host_;
  std::optional<ShardStorage> storage_;
  std::optional<GradientSums> sums_;
};

}  // namespace shardmesh
