// The reference: the definition of the fused step's bits, one element after the other.
#include "kernels/element.h"
#include "kernels/fp_environment.h"
#include "kernels/fused_step.h"

namespace shardmesh {

namespace {

__attribute__((noinline)) void StepAll(const StepContext& context, const FusedRun& run) {
  for (int64_t i = 0; i < run.num_elements; ++i) StepElement(context, run, i);
}

__attribute__((noinline)) void ReduceAll(Format gradients, const ReduceRun& run) {
  for (int64_t i = 0; i < run.num_elements; ++i) {
    run.sum[i] = MeanGradient(run.gradients, gradients, run.num_slots, run.divide_scale, i);
  }
}

}  // namespace

void FusedStepReference(const StepContext& context, const FusedRun& run) {
  const ScopedFpEnvironment environment;
  StepAll(context, run);
}

void ReduceReference(Format gradients, const ReduceRun& run) {
  const ScopedFpEnvironment environment;
  ReduceAll(gradients, run);
}

}  // namespace shardmesh
