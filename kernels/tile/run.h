// A whole run, tile by tile, for one number type.
#pragma once

#include "kernels/tile/step.h"
#include "kernels/tile/walk.h"

namespace shardmesh {

// `whole_tiles`, where it is given, steps the whole ones.
template <class Number>
__attribute__((noinline)) void RunTiles(const OptimizerContext& context, const OptimizerRun& run,
                                        void (*whole_tiles)(const StepPlan&, int64_t num_tiles) = nullptr) {
  const StepPlan plan = PlanStep(context, run);
  TileStep<Number> step(plan);
  const int64_t whole = run.num_elements / kTileElements;
  if (whole_tiles != nullptr) whole_tiles(plan, whole);
  for (int64_t i = whole_tiles != nullptr ? whole : 0; i < whole; ++i)
    step.Step(TileAt(plan, i), run.first_element + i * kTileElements);
  if (run.num_elements % kTileElements == 0) return;
  const ShortTile last(plan, whole);
  step.Step(last.tile(), run.first_element + whole * kTileElements, run.num_elements % kTileElements);
  last.CopyBack();
}

}  // namespace shardmesh
