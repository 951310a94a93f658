// PushClaims: one push of the same bytes at a time: of a gradient shard, at any replica of the shard; of initial
// weights, at this worker. Thread-safe.
#pragma once

#include <utility>

#include "core/base/sync.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

class PushClaims {
 public:
  static constexpr int kInitialWeights = -1;  // in place of a slot

  // `protocol` outlives the object. `shard`, `rank`: whose worker this is.
  PushClaims(StepProtocol& protocol, int shard, Rank rank) : protocol_(protocol), shard_(shard), rank_(rank) {}

  // False: one is under way. REQUIRES: a slot of the job, or kInitialWeights.
  bool Begin(int slot) {
    if (slot != kInitialWeights) return protocol_.slots().ClaimPush(Slot(slot), shard_, rank_);
    MutexLock lock(mu_);
    return !std::exchange(initial_, true);
  }
  void End(int slot) {
    if (slot != kInitialWeights) return protocol_.slots().ReleasePush(Slot(slot), shard_);
    MutexLock lock(mu_);
    initial_ = false;
  }

 private:
  StepProtocol& protocol_;
  const int shard_;
  const Rank rank_;
  Mutex mu_;
  bool initial_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace shardmesh
