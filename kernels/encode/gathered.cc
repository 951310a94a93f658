#include "kernels/encode/gathered.h"

#include "kernels/cpu/fp_environment.h"
#include "kernels/cpu/processor.h"
#include "kernels/encode/gathered_body.h"
#include "kernels/encode/gathered_simd.h"

namespace shardmesh {
namespace {

// Not inlined: kernels/cpu/fp_environment.h.
__attribute__((noinline)) void RaiseReference(const GatheredRun& run, std::atomic<uint32_t>* maxima) {
  RaiseMaximaOf<float>(run, maxima);
}
__attribute__((noinline)) void EncodeReference(const GatheredRun& run, const std::atomic<uint32_t>* maxima,
                                               const GatheredPlace* places, int count) {
  EncodeGatheredOf<float>(run, maxima, places, count);
}

__attribute__((noinline)) void StoreReference(const float* values, int64_t num_elements, uint8_t* codes,
                                              float* scales) {
  StoreNf4As<float>(values, num_elements, codes, scales);
}

__attribute__((noinline)) float MeanOf(const std::atomic<uint32_t>* maxima, int64_t num_blocks) {
  double sum = 0;
  bool finite = true;
  for (int64_t b = 0; b < num_blocks; ++b) {
    const uint32_t bits = maxima[b].load(std::memory_order_relaxed);
    finite = finite && bits < kInfinityBits;
    sum += FloatOfBits(bits);
  }
  return finite ? static_cast<float>(sum / static_cast<double>(num_blocks)) : FloatOfBits(kNanBits);
}

}  // namespace

float Nf4Mean(const std::atomic<uint32_t>* maxima, int64_t num_blocks) {
  const ScopedFpEnvironment environment;
  return MeanOf(maxima, num_blocks);
}

void RaiseMaximaReference(const GatheredRun& run, std::atomic<uint32_t>* maxima) {
  if (run.gather == GatherFormat::kMx8) return;
  const ScopedFpEnvironment environment;
  RaiseReference(run, maxima);
}

void EncodeGatheredReference(const GatheredRun& run, const std::atomic<uint32_t>* maxima, const GatheredPlace* places,
                             int count) {
  const ScopedFpEnvironment environment;
  EncodeReference(run, maxima, places, count);
}

void StoreNf4Reference(const float* values, int64_t num_elements, uint8_t* codes, float* scales) {
  const ScopedFpEnvironment environment;
  StoreReference(values, num_elements, codes, scales);
}

void StoreNf4(const float* values, int64_t num_elements, uint8_t* codes, float* scales) {
#if defined(__x86_64__)
  if (SimdSupported()) {
    const ScopedFpEnvironment environment;
    return simd8::StoreNf4(values, num_elements, codes, scales);
  }
#endif
  StoreNf4Reference(values, num_elements, codes, scales);
}

void RaiseMaxima(const GatheredRun& run, std::atomic<uint32_t>* maxima) {
#if defined(__x86_64__)
  if (run.gather == GatherFormat::kMx8) return;
  if (SimdSupported()) {
    const ScopedFpEnvironment environment;
    return simd8::RaiseMaxima(run, maxima);
  }
#endif
  RaiseMaximaReference(run, maxima);
}

void EncodeGathered(const GatheredRun& run, const std::atomic<uint32_t>* maxima, const GatheredPlace* places,
                    int count) {
#if defined(__x86_64__)
  if (SimdSupported()) {
    const ScopedFpEnvironment environment;
    return simd8::EncodeGathered(run, maxima, places, count);
  }
#endif
  EncodeGatheredReference(run, maxima, places, count);
}

}  // namespace shardmesh
