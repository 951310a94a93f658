// A whole run, tile by tile, for one number type.
#pragma once

#include "kernels/tile/rows.h"
#include "kernels/tile/step.h"
#include "kernels/tile/walk.h"

namespace shardmesh {

// Steps tiles [0, num_tiles) of a run, which are whole.
using WholeTilesFn = void (*)(const StepPlan& plan, int64_t num_tiles);

// Gives a faster way for whole tiles, or null.
using FindTilesFn = WholeTilesFn (*)(const OptimizerContext&, const OptimizerRun&);

template <class Number>
__attribute__((noinline)) void RunTiles(const StepPlan& plan, FindTilesFn find) {
  const OptimizerRun& run = *plan.run;
  TileStep<Number> step(plan);
  const int64_t whole = run.num_elements / kTileElements;
  const WholeTilesFn fast = find(*plan.context, run);
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

// Rows [begin, begin + n) elements of a row format: decoded, stepped in fp32 and encoded.
template <class Number>
void StepRows(const StepPlan& plan, int64_t begin, int64_t n, float* weights, FindTilesFn find) {
  const OptimizerRun& run = *plan.run;
  OptimizerContext fp32 = *plan.context;
  fp32.weights = WeightFormat::kFp32;
  const uint64_t first_element = run.first_element + static_cast<uint64_t>(begin);
  const int64_t row = begin / run.row_elements;
  const TileRun tile = TileAt(plan, begin / kTileElements);
  const auto* scales_in = reinterpret_cast<const uint8_t*>(static_cast<const float*>(run.weights_in.extra) + row);
  float* scales_out = static_cast<float*>(run.weights_out.extra) + row;
  DecodeRows<Number>({tile.weights_in.codes, scales_in}, run.row_elements, n, weights);
  uint64_t digests[4] = {0, 0, 0, 0};
  const OptimizerRun part = PartOf(plan, tile, begin, n, weights, digests);
  StepPlan part_plan = PlanStep(fp32, part);
  part_plan.gradient_begin = begin;
  RunTiles<Number>(part_plan, find);
  EncodeRows<Number>(weights, run.row_elements, n, plan.weight_draws, first_element, scales_out,
                     [&](int64_t at, int64_t elements, const uint8_t* codes, const float* values) {
                       const TileRun stored = TileAt(plan, (begin + at) / kTileElements);
                       EmitCodes<Number>(plan, stored, elements, codes);
                       if (IsPublished(stored)) EmitPublished<Number>(stored, values, elements);
                     });
  if (run.digests == nullptr) return;
  AddDigest(run.digests,
            DigestPart(plan.digests[0][0].key, plan.weights.codes, first_element, tile.weights_out.codes, n));
  AddDigest(run.digests, DigestPart(plan.digests[0][1].key, plan.weights.extra, first_element, scales_out, n));
  for (int s = 1; s <= plan.num_states; ++s) AddDigest(run.digests + s, digests[s]);
}

// Row formats: a row's new scale is known when all of it was stepped. So a few rows at a time, as many as fill whole
// tiles.
template <class Number>
__attribute__((noinline)) void RunRows(const StepPlan& plan, FindTilesFn find) {
  const OptimizerRun& run = *plan.run;
  const int64_t unit = RowUnitElements(run);
  for (int64_t begin = 0; begin < run.num_elements; begin += unit) {
    const int64_t left = run.num_elements - begin, n = left < unit ? left : unit;
    StepRows<Number>(plan, begin, n, RowMemory(unit), find);
  }
}

template <class Number>
void RunSquares(const OptimizerContext& context, const OptimizerRun& run) {
  StepPlan plan;
  plan.context = &context;
  plan.run = &run;
  alignas(64) float gradient[kTileElements];
  TileRun tile;
  tile.gradients = run.gradients;
  for (int64_t i = 0; i * kTileElements < run.num_elements; ++i) {
    const int64_t left = run.num_elements - i * kTileElements;
    tile.gradient_offset = i * kTileElements;
    SumGradients<Number>(plan, tile, gradient, left < kTileElements ? left : kTileElements);
    run.square_sums[i] = SumSquares<Number>(gradient);
  }
}

template <class Number>
void RunStep(const OptimizerContext& context, const OptimizerRun& run, FindTilesFn find) {
  const StepPlan plan = PlanStep(context, run);
  if (context.weights == WeightFormat::kInt8Row) return RunRows<Number>(plan, find);
  RunTiles<Number>(plan, find);
}

}  // namespace shardmesh
