// What kernels/encode/gathered.cc calls of the translation unit that is compiled for AVX2 and FMA. REQUIRES: the
// processor has both, and the floating-point environment is set.
#pragma once

#include "kernels/encode/gathered.h"

namespace shardmesh::simd8 {

void RaiseMaxima(const GatheredRun& run, std::atomic<uint32_t>* maxima);
void EncodeGathered(const GatheredRun& run, const std::atomic<uint32_t>* maxima, const GatheredPlace* places,
                    int count);
void StoreNf4(const float* values, int64_t num_elements, uint8_t* codes, float* scales);

}  // namespace shardmesh::simd8
