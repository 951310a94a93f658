// Entry point of the translation unit that is compiled for AVX2 and FMA; called only through kernels/sum/slot_sum.h,
// after the processor was asked and the floating-point environment set.
#pragma once

#include "kernels/sum/slot_sum.h"

namespace shardmesh::simd8 {

// Whole groups of kGroupElements elements; what is left of the run stays as it is.
void SumGroups(Format format, const SlotSumRun& run);

}  // namespace shardmesh::simd8
