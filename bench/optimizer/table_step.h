// TableStep: AdamW with dyn8 states the way it is usually written, for comparison with the kernel's arithmetic: levels
// are read from a table of 256, codes are found by binary search in it, one element at a time.
#pragma once

#include "kernels/optimizer_step.h"

namespace shardmesh::bench {

// An OptimizerStepFn. Rounds to the nearest level; a value in the middle between two may get another code than the
// kernel gives it. REQUIRES: AdamW, fp32 weights and gradients, dyn8 states, one slot, no copies; SimdSupported() (it
// is compiled for the same processors).
void TableStep(const OptimizerContext& context, const OptimizerRun& run);

}  // namespace shardmesh::bench
