// A whole run, tile by tile, for one number type.
#pragma once

#include <cstring>

#include "kernels/tile/rows.h"
#include "kernels/tile/step.h"
#include "kernels/tile/walk.h"

namespace shardmesh {

// Steps tiles [0, num_tiles) of a run, which are whole.
using WholeTilesFn = void (*)(const StepPlan& plan, int64_t num_tiles);

// `find`: gives a faster way for whole tiles, or null.
template <class Number>
__attribute__((noinline)) void RunTiles(const OptimizerContext& context, const OptimizerRun& run,
                                        WholeTilesFn (*find)(const OptimizerContext&, const OptimizerRun&)) {
  const StepPlan plan = PlanStep(context, run);
  TileStep<Number> step(plan);
  const int64_t whole = run.num_elements / kTileElements;
  const WholeTilesFn fast = find(context, run);
  if (fast != nullptr) fast(plan, whole);
  for (int64_t i = 0; fast == nullptr && i < whole; ++i) {
    step.Step(TileAt(plan, i), run.first_element + static_cast<uint64_t>(i * kTileElements));
  }
  if (run.num_elements % kTileElements == 0) return;
  const ShortTile last(plan, whole);
  step.Step(last.tile(), run.first_element + static_cast<uint64_t>(whole * kTileElements),
            run.num_elements % kTileElements);
  last.CopyBack();
}

// Row formats: a row's new scale is known when all of it was stepped. So a few rows at a time, as many as fill whole
// tiles, are decoded, stepped in fp32 and encoded.
template <class Number>
__attribute__((noinline)) void RunRows(const OptimizerContext& context, const OptimizerRun& run,
                                       WholeTilesFn (*find)(const OptimizerContext&, const OptimizerRun&)) {
  OptimizerContext fp32 = context;
  fp32.weights = WeightFormat::kFp32;
  const StepPlan plan = PlanStep(context, run);
  RowUnit unit(run);
  for (int64_t begin = 0; begin < run.num_elements; begin += unit.elements()) {
    const int64_t left = run.num_elements - begin, n = left < unit.elements() ? left : unit.elements();
    const int64_t scales = begin / run.row_elements * static_cast<int64_t>(sizeof(float));
    const TileRun tile = TileAt(plan, begin / kTileElements);
    const GradientsAt gradients(context, run, begin);
    DecodeRows<Number>({tile.weights_in.codes, static_cast<const uint8_t*>(run.weights_in.extra) + scales},
                       run.row_elements, n, unit.weights());
    RunTiles<Number>(fp32, PartOf(plan, tile, begin, n, gradients.slots(), unit.weights()), find);
    EncodeRows<Number>(unit.weights(), run.row_elements, n, plan.weight_draws,
                       run.first_element + static_cast<uint64_t>(begin),
                       {unit.codes(), static_cast<uint8_t*>(run.weights_out.extra) + scales});
    unit.NoteChanges(tile, n);
    std::memcpy(tile.weights_out.codes, unit.codes(), static_cast<size_t>(n));
    for (int c = 0; c < run.num_copies; ++c)
      std::memcpy(tile.copies[c], tile.weights_out.codes, static_cast<size_t>(n));
  }
}

template <class Number>
void RunStep(const OptimizerContext& context, const OptimizerRun& run,
             WholeTilesFn (*find)(const OptimizerContext&, const OptimizerRun&)) {
  if (context.weights == WeightFormat::kInt8Row) return RunRows<Number>(context, run, find);
  RunTiles<Number>(context, run, find);
}

}  // namespace shardmesh
