// The view of a stored plan's tensor, beside views by placements: so copies between a plan and what FSDP2 or tensor
// parallelism holds can be planned, in either direction (core/view/reshard.h). Pure and thread-safe.
//
//   PlanReshard({ViewOf(plan, "w").value()}, {TensorView::Placed(shape, mesh, placements).value()}, rank)
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/layout/stored_plan.h"
#include "core/view/view.h"

namespace shardmesh {

inline constexpr int64_t kMaxStoredViewBoxes = int64_t{1} << 20;

// Which rank of the plan's mesh holds which boxes of a tensor; a tied one has its owner's. A rank that holds none
// of it has no box, but a part in it. In a rank's memory, offsets count from the start of its shard of the tensor's
// bucket. The cost is that of the ranks and the tensor's boxes, whatever the number of tensors.
// NotFound: no such name. ResourceExhausted: more than kMaxStoredViewBoxes boxes on all ranks together (replicas count;
// each block of a `block` granule is a box).
absl::StatusOr<TensorView> ViewOf(const StoredPlan& plan, absl::string_view name);

}  // namespace shardmesh
