// What kernels/step/optimizer_step.cc calls of the translation unit that is compiled for AVX2 and FMA. REQUIRES: the
// processor has both, and the floating-point environment is set.
#pragma once

#include "kernels/optimizer_step.h"

namespace shardmesh::simd8 {

void OptimizerStep(const OptimizerContext& context, const OptimizerRun& run);
void GradientSquares(const OptimizerContext& context, const OptimizerRun& run);

}  // namespace shardmesh::simd8
