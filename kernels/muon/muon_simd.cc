// Muon's passes over tiles with 8 lanes. Compiled for AVX2 and FMA as a whole: nothing here may run before
// SimdSupported() was asked. The templates of kernels/tile/ are instantiated for 8 lanes alone, so none of their code
// is shared with the reference.
#include "kernels/muon/muon_simd.h"

#include "kernels/tile/simd8_lanes.h"

namespace shardmesh::simd8 {

float MuonGather(const StepPlan& plan, const MuonScalars& scalars, const TileRun& tile, uint64_t first_element,
                 int64_t elements, float* update) {
  return MuonTile<F32x8>::Gather(plan, scalars, tile, first_element, elements, update);
}

void MuonScatter(const StepPlan& plan, const MuonScalars& scalars, const TileRun& tile, uint64_t first_element,
                 int64_t elements, const float* update) {
  MuonTile<F32x8>::Scatter(plan, scalars, tile, first_element, elements, update);
}

}  // namespace shardmesh::simd8
