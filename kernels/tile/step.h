// The optimizer step of one tile after the other, for every number type: everything but how gradients, weights and
// states are stored happens on fp32 numbers that lie in the first-level cache.
//
// A tensor's last tile may be short: its streams are copied into whole tiles, filled up with zeros, and back.
#pragma once

#include "kernels/rules/optimizers.h"
#include "kernels/tile/emit.h"
#include "kernels/tile/gradients.h"
#include "kernels/tile/plan.h"
#include "kernels/tile/states.h"

namespace shardmesh {

template <class Number>
class TileStep {
 public:
  using L = Lanes<Number>;

  explicit TileStep(const StepPlan& plan) : plan_(plan), constants_(plan.context->scalars) {}

  // `first_element`: of the tile in its tensor. `elements`: how many there are; what lies behind them counts as 0, as
  // it has to where a block's scale is theirs alone.
  void Step(const TileRun& tile, uint64_t first_element, int64_t elements = kTileElements) {
    const OptimizerContext& context = *plan_.context;
    SumGradients<Number>(plan_, tile, gradient_, elements);
    const float* weights = Weights(tile);
    if (tile.square_sum != nullptr) *tile.square_sum = SumSquares<Number>(gradient_);
    ClipGradients<Number>(plan_, gradient_);
    if (context.scalars.coupled_decay != 0) AddDecay(weights);
    const float* states[3] = {nullptr, nullptr, nullptr};
    float* moved[3] = {nullptr, nullptr, nullptr};
    for (int s = 0; s < plan_.num_states; ++s) {
      const bool direct = context.states == StateFormat::kFp32;
      if (!direct) Decode(s, tile, elements);
      states[s] = direct ? reinterpret_cast<const float*>(tile.states_in[s].codes) : states_[s];
      moved[s] = direct ? reinterpret_cast<float*>(tile.states_out[s].codes) : states_[s];
    }
    Update(weights, states, moved);
    Store(tile, first_element, elements);
  }

 private:
  const float* Weights(const TileRun& tile) {
    if (plan_.context->weights == WeightFormat::kFp32) return reinterpret_cast<const float*>(tile.weights_in.codes);
    DecodeWeights<Number>(plan_.context->weights, tile.weights_in, weights_);
    return weights_;
  }

  void AddDecay(const float* weights) {
    const Number decay(plan_.context->scalars.coupled_decay);
    for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
      L::Store(MulAdd(decay, L::Load(weights + i), L::Load(gradient_ + i)), gradient_ + i);
    }
  }

  void Decode(int state, const TileRun& tile, int64_t elements) {
    const StateFormat format = plan_.context->states;
    if (state == 0) {
      DecodeStates<Number, true>(format, tile.states_in[0], states_[0]);
    } else {
      DecodeStates<Number, false>(format, tile.states_in[state], states_[state]);
    }
    for (int64_t i = elements; i < kTileElements; ++i) states_[state][i] = 0;
  }

  // new weights -> weights_.
  void Update(const float* weights, const float* const (&states)[3], float* const (&moved)[3]) {
    WithOptimizer(plan_.context->hyper, [&](auto rule) { Move<decltype(rule)>(weights, states, moved); });
  }

  template <class Rule>
  void Move(const float* weights, const float* const (&states)[3], float* const (&moved)[3]) {
    for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
      Number values[3] = {Number(0.0f), Number(0.0f), Number(0.0f)};
      for (int s = 0; s < Rule::kStates; ++s) values[s] = L::Load(states[s] + i);
      const Number weight = Rule::Update(constants_, L::Load(weights + i), L::Load(gradient_ + i), values);
      for (int s = 0; s < Rule::kStates; ++s) L::Store(values[s], moved[s] + i);
      L::Store(weight, weights_ + i);
    }
  }

  void Store(const TileRun& tile, uint64_t first_element, int64_t elements) {
    const OptimizerContext& context = *plan_.context;
    TileDraws draws;
    if (NeedsDraws(context.weights) || NeedsDraws(context.states)) {
      DrawFiller<Number>::Fill(plan_.weight_draws, first_element, draws);
    }
    alignas(64) uint8_t memory[4 * kTileElements];
    uint8_t* codes = NewCodes(tile, memory);
    EncodeWeights<Number>(context.weights, weights_, draws, {codes, tile.weights_out.extra});
    StoreStates(tile, first_element, draws);
    EmitTile<Number>(plan_, tile, first_element, elements, codes);
  }

  void StoreStates(const TileRun& tile, uint64_t first_element, TileDraws& draws) {
    const OptimizerContext& context = *plan_.context;
    if (context.states == StateFormat::kFp32) return;
    for (int s = 0; s < plan_.num_states; ++s) {
      if (context.states == StateFormat::kBf16Sr) DrawFiller<Number>::Fill(plan_.state_draws[s], first_element, draws);
      if (s == 0) {
        EncodeStates<Number, true>(context.states, states_[s], draws, tile.states_out[s]);
      } else {
        EncodeStates<Number, false>(context.states, states_[s], draws, tile.states_out[s]);
      }
    }
  }

  const StepPlan& plan_;
  const StepConstants<Number> constants_;
  alignas(64) float gradient_[kTileElements];
  alignas(64) float weights_[kTileElements];
  alignas(64) float states_[3][kTileElements];
};

}  // namespace shardmesh
