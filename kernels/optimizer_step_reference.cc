// The reference: the definition of the step's bits, one element after the other.
#include "kernels/fp_environment.h"
#include "kernels/optimizer_step.h"
#include "kernels/tile/run.h"

namespace shardmesh {

void OptimizerStepReference(const OptimizerContext& context, const OptimizerRun& run) {
  const ScopedFpEnvironment environment;
  RunTiles<float>(context, run);
}

}  // namespace shardmesh
