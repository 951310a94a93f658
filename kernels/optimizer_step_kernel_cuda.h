// What nvcc compiles and g++ calls: plain types only. Returns null on success, else the CUDA runtime's description of
// the error (static storage).
#pragma once

#include "kernels/tile/plan.h"

namespace shardmesh {

// `plan` is PlanStep's of the same context and run.
const char* LaunchOptimizerStep(const OptimizerContext& context, const OptimizerRun& run, const StepPlan& plan,
                                void* stream);

}  // namespace shardmesh
