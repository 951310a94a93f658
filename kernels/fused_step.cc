// The choice between the implementations; compiled for any processor.
#include "kernels/fused_step.h"

#include <hwy/targets.h>

#include "kernels/fp_environment.h"
#include "kernels/fused_step_simd.h"

namespace shardmesh {

bool SimdSupported() {
#if defined(__x86_64__)
  static const bool supported = (hwy::SupportedTargets() & HWY_AVX2) != 0;
  return supported;
#else
  return false;
#endif
}

void FusedStepSimd(const StepContext& context, const FusedRun& run) {
#if defined(__x86_64__)
  const ScopedFpEnvironment environment;
  simd8::Step(context, run);
#else
  FusedStepReference(context, run);
#endif
}

void ReduceSimd(Format gradients, const ReduceRun& run) {
#if defined(__x86_64__)
  const ScopedFpEnvironment environment;
  simd8::Reduce(gradients, run);
#else
  ReduceReference(gradients, run);
#endif
}

FusedBackend BestFusedBackend() {
  if (SimdSupported()) return {"simd", FusedStepSimd, ReduceSimd};
  return {"reference", FusedStepReference, ReduceReference};
}

}  // namespace shardmesh
