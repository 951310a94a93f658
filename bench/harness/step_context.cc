#include "bench/harness/step_context.h"

namespace shardmesh::bench {

OptimizerContext AdamWContext(const StepFormats& formats, int64_t step) {
  OptimizerContext context;
  context.hyper = OptimizerHyper::Defaults(OptimizerKind::kAdamW);
  context.scalars = ComputeStepScalars(context.hyper, step).value();
  context.weights = formats.weights;
  context.states = formats.states;
  context.gradients = formats.gradients;
  context.seed = 1;
  context.step = step;
  return context;
}

}  // namespace shardmesh::bench
