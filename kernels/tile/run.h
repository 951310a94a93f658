// A whole run, tile by tile, for one number type.
#pragma once

#include "kernels/tile/step.h"
#include "kernels/tile/walk.h"

namespace shardmesh {

template <class Number>
__attribute__((noinline)) void RunTiles(const OptimizerContext& context, const OptimizerRun& run) {
  const StepPlan plan = PlanStep(context, run);
  TileStep<Number> step(plan);
  const int64_t whole = run.num_elements / kTileElements;
  for (int64_t i = 0; i < whole; ++i) step.Step(TileAt(plan, i), run.first_element + i * kTileElements);
  if (run.num_elements % kTileElements == 0) return;
  const ShortTile last(plan, whole);
  step.Step(last.tile(), run.first_element + whole * kTileElements);
  last.CopyBack();
}

}  // namespace shardmesh
