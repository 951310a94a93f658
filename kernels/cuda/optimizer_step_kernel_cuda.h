// What nvcc compiles and g++ calls: plain types only. Returns null on success, else the CUDA runtime's description of
// the error (static storage).
#pragma once

#include "kernels/cuda/step_list.h"

namespace shardmesh {

// What a launch steps: a list that lies in device memory, or (list.entries is null) one run that travels with the
// launch.
struct StepSource {
  StepList list;
  OptimizerContext context;
  StepListEntry entry;
  int64_t num_units = 0;
};

// `warp`: a context whose formats all runs have (SharedWarpContext), for the body that is compiled for them; null: the
// body that asks for formats as it runs.
const char* LaunchOptimizerStep(const StepSource& source, const OptimizerContext* warp, void* stream);

}  // namespace shardmesh
