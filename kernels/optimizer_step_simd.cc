// The step with 8 lanes. Compiled for AVX2 and FMA as a whole: nothing here may run before SimdSupported() was asked.
// The templates of kernels/tile/ are instantiated for 8 lanes alone, so none of their code is shared with the
// reference.
#include "kernels/optimizer_step_simd.h"

#include "kernels/tile/simd8_lanes.h"
// The lanes come first: what follows is instantiated with them.
#include "kernels/tile/run.h"

namespace shardmesh::simd8 {

void OptimizerStep(const OptimizerContext& context, const OptimizerRun& run) { RunTiles<F32x8>(context, run); }

}  // namespace shardmesh::simd8
