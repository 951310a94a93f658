// The reference: the definition of the step's bits, one element after the other.
#include "kernels/cpu/fp_environment.h"
#include "kernels/optimizer_step.h"
#include "kernels/tile/run.h"

namespace shardmesh {
namespace {

WholeTilesFn NothingFaster(const OptimizerContext&, const OptimizerRun&) { return nullptr; }

}  // namespace

void OptimizerStepReference(const OptimizerContext& context, const OptimizerRun& run) {
  const ScopedFpEnvironment environment;
  RunStep<float>(context, run, NothingFaster);
}

void GradientSquaresReference(const OptimizerContext& context, const OptimizerRun& run) {
  const ScopedFpEnvironment environment;
  RunSquares<float>(context, run);
}

}  // namespace shardmesh
