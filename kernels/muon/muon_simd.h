// What kernels/muon/muon.cc calls of the translation unit that is compiled for AVX2 and FMA. REQUIRES: the processor
// has both, and the floating-point environment is set.
#pragma once

#include "kernels/tile/muon.h"

namespace shardmesh::simd8 {

float MuonGather(const StepPlan& plan, const MuonScalars& scalars, const TileRun& tile, uint64_t first_element,
                 int64_t elements, float* update);
void MuonScatter(const StepPlan& plan, const MuonScalars& scalars, const TileRun& tile, uint64_t first_element,
                 int64_t elements, const float* update);

}  // namespace shardmesh::simd8
