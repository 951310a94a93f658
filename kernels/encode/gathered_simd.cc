// Gathered weights with 8 lanes. Compiled for AVX2 and FMA as a whole: nothing here may run before SimdSupported() was
// asked. The templates are instantiated for 8 lanes alone, so none of their code is shared with the reference.
#include "kernels/encode/gathered_simd.h"

#include "kernels/encode/gathered_body.h"
#include "kernels/tile/simd8_lanes.h"

namespace shardmesh::simd8 {

void RaiseMaxima(const GatheredRun& run, std::atomic<uint32_t>* maxima) { RaiseMaximaOf<F32x8>(run, maxima); }

void EncodeGathered(const GatheredRun& run, const std::atomic<uint32_t>* maxima, const GatheredPlace* places,
                    int count) {
  EncodeGatheredOf<F32x8>(run, maxima, places, count);
}

void StoreNf4(const float* values, int64_t num_elements, uint8_t* codes, float* scales) {
  StoreNf4As<F32x8>(values, num_elements, codes, scales);
}

}  // namespace shardmesh::simd8
