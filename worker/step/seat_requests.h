// SeatRequest: of a job on several hosts whose slots are pulled, what a trainer of this host has finished, until the
// leads have counted it. Plain values, for the lead's thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/ids.h"
#include "worker/step/pulled_slots.h"

namespace shardmesh {

// The result of a slot that a trainer took.
struct FinishedSlot {
  Slot slot;
  Step step;
  uint64_t digest = 0;                 // of its gradients
  std::vector<double> learning_rates;  // as Declaration's
  double loss_scale = 1;
  int64_t tokens = 0;             // of a job with token weights
  std::optional<int> non_finite;  // a tensor whose gradient is not finite
};

struct SeatRequest {
  std::optional<FinishedSlot> finished;                       // to be said in the next round
  std::optional<absl::StatusOr<PulledSlots::Result>> result;  // to be told the trainer
};

}  // namespace shardmesh
