// What CheckRun of kernels/optimizer_step.h does not look at: the numbers that a step is given. For callers whose
// gradients and states come from anywhere; the service checks gradients as they arrive. Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "kernels/optimizer_step.h"

namespace shardmesh {

// InvalidArgument, naming the stream, the index and the value: a clip factor that is negative or not finite; a divide
// scale that is not positive and finite; a stored scale that is negative, not finite, 0 (unless `zero_scales`, for
// torchao's states, where a state that has not been stepped has them), or in fp8 and fp8x32 2^120 or more. REQUIRES:
// CheckRun(context, run) is OK.
absl::Status CheckStepValues(const OptimizerContext& context, const OptimizerRun& run, bool zero_scales = false);

struct RefusedGradient {
  int slot = 0;
  int64_t element = 0;  // of the run
  float value = 0;
};

// The first gradient, slot by slot, that is NaN, infinite, or at least FLT_MAX / slots (their sum might then not be
// finite). REQUIRES: CheckRun(context, run) is OK.
std::optional<RefusedGradient> FindRefusedGradient(const OptimizerContext& context, const OptimizerRun& run);

}  // namespace shardmesh
