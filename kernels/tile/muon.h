// Muon's two passes over one tile, for every number type: before the Newton-Schulz iterations and after them.
#pragma once

#include "core/base/reduction.h"
#include "core/job/muon.h"
#include "kernels/tile/emit.h"
#include "kernels/tile/gradients.h"
#include "kernels/tile/plan.h"
#include "kernels/tile/states.h"

namespace shardmesh {

// What kernels/muon/muon.cc calls of an implementation, tile by tile. `first_element`: of the tile in its tensor.
// Moves the buffer on, writes the tile's update and returns the sum of its squares. `elements`: how many there are;
// what lies behind them counts as 0.
using MuonGatherFn = float (*)(const StepPlan& plan, const MuonScalars& scalars, const TileRun& tile,
                               uint64_t first_element, int64_t elements, float* update);
// Moves the weights on by the orthogonalized update.
using MuonScatterFn = void (*)(const StepPlan& plan, const MuonScalars& scalars, const TileRun& tile,
                               uint64_t first_element, int64_t elements, const float* update);

template <class Number>
class MuonTile {
 public:
  using L = Lanes<Number>;

  __attribute__((noinline)) static float Gather(const StepPlan& plan, const MuonScalars& scalars, const TileRun& tile,
                                                uint64_t first_element, int64_t elements, float* update) {
    const StateFormat format = plan.context->states;
    alignas(64) float gradients[kTileElements], buffer[kTileElements];
    SumGradients<Number>(plan, tile, gradients, elements);
    if (tile.square_sum != nullptr) *tile.square_sum = SumSquares<Number>(gradients);
    ClipGradients<Number>(plan, gradients);
    DecodeStates<Number, true>(format, tile.states_in[0], buffer);
    for (int64_t i = elements; i < kTileElements; ++i) buffer[i] = 0;
    for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
      const Number gradient = L::Load(gradients + i);
      const Number moved = Lerp(scalars.buffer, L::Load(buffer + i), gradient);
      L::Store(moved, buffer + i);
      L::Store(scalars.is_nesterov ? Lerp(scalars.nesterov, gradient, moved) : moved, update + i);
    }
    TileDraws draws;
    if (format == StateFormat::kBf16Sr) DrawFiller<Number>::Fill(plan.state_draws[0], first_element, draws);
    EncodeStates<Number, true>(format, buffer, draws, tile.states_out[0]);
    if (plan.run->digests != nullptr) EmitDigest<Number>(plan, tile, 1, first_element, elements);
    return SumSquares<Number>(update);
  }

  __attribute__((noinline)) static void Scatter(const StepPlan& plan, const MuonScalars& scalars, const TileRun& tile,
                                                uint64_t first_element, int64_t elements, const float* update) {
    const WeightFormat format = plan.context->weights;
    alignas(64) float weights[kTileElements];
    DecodeWeights<Number>(format, tile.weights_in, weights);
    const Number decay(scalars.decay), neg_step_size(scalars.neg_step_size);
    for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
      L::Store(MulAdd(neg_step_size, L::Load(update + i), L::Load(weights + i) * decay), weights + i);
    }
    TileDraws draws;
    if (NeedsDraws(format)) DrawFiller<Number>::Fill(plan.weight_draws, first_element, draws);
    alignas(64) uint8_t memory[4 * kTileElements];
    uint8_t* codes = NewCodes(tile, memory);
    EncodeWeights<Number>(format, weights, draws, {codes, tile.weights_out.extra});
    EmitCodes<Number>(plan, tile, elements, codes);
    if (plan.run->digests != nullptr) EmitDigest<Number>(plan, tile, 0, first_element, elements);
  }

 private:
  SHARDMESH_RULE static Number Lerp(const LerpScalars& lerp, Number start, Number end) {
    return MulAdd(Number(lerp.coefficient), end - start, lerp.from_end ? end : start);
  }
};

}  // namespace shardmesh
