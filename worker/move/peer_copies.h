// PeerCopies: what a worker keeps in memory of one epoch of a job with copies=2 (JobSpec::copies): its own shard, and that
// of the rank that it keeps a copy for (CopyKeeper, core/mesh/reform.h), as they were after whole steps. It is there
// when the epoch's members are gone, until a later epoch has copies of its own.
//
//   a round:   snapshot of the own shard after step k  ->  the keeper takes it  ->  all members have theirs: k is whole
//
// Of each shard there are at most two: of the step that is whole, and of the round that is under way. Their memory is
// used again. Thread-safe.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "core/base/ids.h"
#include "core/base/sync.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "proto/shardmesh/v1/coordinator.pb.h"
#include "proto/shardmesh/v1/shard.pb.h"
#include "worker/control/host_ranks.h"
#include "worker/pass/snapshot.h"

namespace shardmesh {

class PeerCopies {
 public:
  struct Copy {
    int64_t step = 0;
    int parity = 0;  // where its data lies
    std::shared_ptr<Snapshot> snapshot;
  };

  // REQUIRES: the job is on several hosts.
  PeerCopies(JobSpec spec, Plan plan, Epoch epoch, Rank rank, HostRanks ranks, std::string secret);

  const JobSpec& spec() const { return spec_; }
  const Plan& plan() const { return plan_; }
  Epoch epoch() const { return epoch_; }
  const std::string& secret() const { return secret_; }
  Rank own() const { return own_; }
  Rank other() const { return other_; }  // whose copy it keeps

  // Memory for the next copy of one of the two. ResourceExhausted: there is none.
  absl::StatusOr<std::shared_ptr<Snapshot>> Room(Rank rank);
  // It is filled. Of that rank this and the whole one stay.
  void Put(Rank rank, Copy copy);
  // Unset: it does not have that.
  std::optional<Copy> Find(Rank rank, int64_t step) const;
  // The step of the newest copy of that rank. Unset: it has none.
  std::optional<int64_t> NewestStep(Rank rank) const;

  // All members have their copies of that step; older ones go. False: this one has not, so it started anew since.
  bool SetWhole(const v1::WholeCopies& whole);
  // What the coordinator is told. Unset: no step is whole.
  std::optional<v1::KeptCopies> Told() const;

 private:
  struct Shelf {
    std::optional<Copy> whole, newest;
    std::shared_ptr<Snapshot> free;
  };
  Shelf& ShelfOf(Rank rank) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return shelves_[rank == own_ ? 0 : 1]; }
  static void Empty(Shelf& shelf, std::optional<Copy>& copy);

  const JobSpec spec_;
  const Plan plan_;
  const Epoch epoch_;
  const Rank own_, other_;
  const int hosts_;
  const std::string secret_;
  mutable Mutex mu_;
  mutable std::array<Shelf, 2> shelves_ ABSL_GUARDED_BY(mu_);
  std::optional<v1::WholeCopies> whole_ ABSL_GUARDED_BY(mu_);
};

}  // namespace shardmesh
