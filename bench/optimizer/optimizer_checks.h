// What bench/optimizer verifies before it measures. Internal, with the first difference: a result is wrong.
#pragma once

#include "absl/status/status.h"
#include "bench/harness/rival.h"
#include "bench/optimizer/optimizer_job.h"

namespace shardmesh::bench {

// The fastest step on two threads has the reference's bits on one, in weights and states, after three steps of a list
// of tensors with lengths that are no multiples of anything.
absl::Status CheckAgainstReference(const StepFormats& formats);

// The loop of table_step.h does what the kernel does: of a thousand elements at most one has other codes or a weight
// more than 1e-6 away, because a value lay in the middle between two levels. REQUIRES: SimdSupported().
absl::Status CheckTableStep();

// fp32 AdamW after 20 steps with changing gradients agrees with torch's: within 1e-6, where each step moves by 1e-3.
// Returns the largest difference. Errors of the rival's process as Rival::Ask.
absl::StatusOr<double> CheckAgainstTorch(Rival& rival);

}  // namespace shardmesh::bench
