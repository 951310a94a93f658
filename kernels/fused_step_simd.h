// Entry points of the translation unit that is compiled for AVX2 and FMA; called only through kernels/fused_step.h,
// which asks the processor first and sets the floating-point environment.
#pragma once

#include "kernels/fused_step.h"

namespace shardmesh {
namespace simd8 {

void Step(const StepContext& context, const FusedRun& run);
void Reduce(Format gradients, const ReduceRun& run);

}  // namespace simd8
}  // namespace shardmesh
