// How a warp of a CUDA device takes a tile (kernels/cuda/warp_step_body.h). For nvcc.
#pragma once

#include <type_traits>

#include "kernels/cuda/warp_step_body.h"

namespace shardmesh {

template <class Body>
__device__ __forceinline__ void WalkPhases(const OptimizerContext& context, const OptimizerRun& run,
                                           const StepPlan& plan, int64_t tile, typename Body::Memory* memory,
                                           int lane) {
  Body body(context, run, plan, tile, memory, lane);
#pragma unroll
  for (int phase = 0; phase < Body::kPhases; ++phase) {
    body.Phase(phase);
    __syncwarp();
  }
}

// A call, so that tiles that are not whole, which are few, take no registers of those that are.
template <class Body>
__device__ __noinline__
void WalkPartTile(const OptimizerContext& context, const OptimizerRun& run,
                                          const StepPlan& plan, int64_t tile, typename Body::Memory* memory, int lane) {
  WalkPhases<Body>(context, run, plan, tile, memory, lane);
}

// By all lanes of a warp.
template <class Body>
__device__ __forceinline__ void WalkTile(const OptimizerContext& context, const OptimizerRun& run, const StepPlan& plan,
                                         int64_t tile, typename Body::Memory* memory, int lane) {
  if (Body::IsWhole(run, tile)) {
    WalkPhases<typename Body::Whole>(context, run, plan, tile, memory, lane);
  } else {
    WalkPartTile<Body>(context, run, plan, tile, memory, lane);
  }
}

}  // namespace shardmesh
