// What kernels/muon/gemm.cc calls of the translation unit that is compiled for AVX2 and FMA. REQUIRES: the processor
// has both, and the floating-point environment is set.
#pragma once

#include "kernels/muon/gemm.h"

namespace shardmesh::simd8 {

void GemmOneBlock(const Gemm& gemm, const GemmBlock& block, GemmScratch& scratch);

}  // namespace shardmesh::simd8
