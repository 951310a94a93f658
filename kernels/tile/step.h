// The optimizer step of one tile after the other, for every number type: everything but how gradients, weights and
// states are stored happens on fp32 numbers that lie in the first-level cache.
//
// A tensor's last tile may be short: its streams are copied into whole tiles, filled up with zeros, and back.
#pragma once

#include <cstring>

#include "kernels/rules/optimizers.h"
#include "kernels/tile/gradients.h"
#include "kernels/tile/plan.h"
#include "kernels/tile/states.h"

namespace shardmesh {

template <class Number>
class TileStep {
 public:
  using L = Lanes<Number>;

  explicit TileStep(const StepPlan& plan) : plan_(plan), constants_(plan.context->scalars) {}

  // `first_element`: of the tile in its tensor.
  void Step(const TileRun& tile, uint64_t first_element) {
    const OptimizerContext& context = *plan_.context;
    SumGradients<Number>(plan_, tile, gradient_);
    const float* weights = Weights(tile);
    if (context.scalars.coupled_decay != 0) AddDecay(weights);
    const float* states[3] = {nullptr, nullptr, nullptr};
    float* moved[3] = {nullptr, nullptr, nullptr};
    for (int s = 0; s < plan_.num_states; ++s) {
      const bool direct = context.states == StateFormat::kFp32;
      if (!direct) Decode(s, tile);
      states[s] = direct ? reinterpret_cast<const float*>(tile.states_in[s].codes) : states_[s];
      moved[s] = direct ? reinterpret_cast<float*>(tile.states_out[s].codes) : states_[s];
    }
    Update(weights, states, moved);
    Store(tile, first_element);
  }

 private:
  const float* Weights(const TileRun& tile) {
    if (plan_.context->weights == WeightFormat::kFp32) return reinterpret_cast<const float*>(tile.weights_in.codes);
    WeightCodec<Number>::Decode(plan_.context->weights, tile.weights_in, weights_);
    return weights_;
  }

  void AddDecay(const float* weights) {
    const Number decay(plan_.context->scalars.coupled_decay);
    for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
      L::Store(MulAdd(decay, L::Load(weights + i), L::Load(gradient_ + i)), gradient_ + i);
    }
  }

  void Decode(int state, const TileRun& tile) {
    const StateFormat format = plan_.context->states;
    if (state == 0) {
      StateCodec<Number>::template Decode<true>(format, tile.states_in[0], states_[0]);
    } else {
      StateCodec<Number>::template Decode<false>(format, tile.states_in[state], states_[state]);
    }
  }

  // new weights -> weights_.
  void Update(const float* weights, const float* const (&states)[3], float* const (&moved)[3]) {
    const OptimizerHyper& hyper = plan_.context->hyper;
    switch (hyper.kind) {
      case OptimizerKind::kSgd:
        if (plan_.num_states == 0) {
          return ForEach(
              [&](int64_t i) { return SgdUpdate(constants_, L::Load(weights + i), L::Load(gradient_ + i)); });
        }
        return hyper.nesterov ? Momentum<true>(weights, states, moved) : Momentum<false>(weights, states, moved);
      case OptimizerKind::kAdam:
      case OptimizerKind::kAdamW:
        return plan_.num_states == 3 ? Amsgrad(weights, states, moved) : Adam(weights, states, moved);
      case OptimizerKind::kLion:
        return ForEach([&](int64_t i) {
          Number m = L::Load(states[0] + i);
          const Number weight = LionUpdate(constants_, L::Load(weights + i), L::Load(gradient_ + i), m);
          L::Store(m, moved[0] + i);
          return weight;
        });
      case OptimizerKind::kMuon:
        return;
    }
  }

  template <class Element>
  SHARDMESH_RULE void ForEach(const Element& element) {
    for (int64_t i = 0; i < kTileElements; i += L::kWidth) L::Store(element(i), weights_ + i);
  }

  template <bool kNesterov>
  void Momentum(const float* weights, const float* const (&states)[3], float* const (&moved)[3]) {
    const Number nesterov(plan_.context->scalars.nesterov);
    ForEach([&](int64_t i) {
      Number buffer = L::Load(states[0] + i);
      const Number weight =
          MomentumUpdate<kNesterov>(constants_, L::Load(weights + i), L::Load(gradient_ + i), buffer, nesterov);
      L::Store(buffer, moved[0] + i);
      return weight;
    });
  }

  void Adam(const float* weights, const float* const (&states)[3], float* const (&moved)[3]) {
    ForEach([&](int64_t i) {
      Number m = L::Load(states[0] + i), v = L::Load(states[1] + i);
      const Number weight = AdamUpdate(constants_, L::Load(weights + i), L::Load(gradient_ + i), m, v);
      L::Store(m, moved[0] + i);
      L::Store(v, moved[1] + i);
      return weight;
    });
  }

  void Amsgrad(const float* weights, const float* const (&states)[3], float* const (&moved)[3]) {
    ForEach([&](int64_t i) {
      Number m = L::Load(states[0] + i), v = L::Load(states[1] + i), largest = L::Load(states[2] + i);
      const Number weight = AmsgradUpdate(constants_, L::Load(weights + i), L::Load(gradient_ + i), m, v, largest);
      L::Store(m, moved[0] + i);
      L::Store(v, moved[1] + i);
      L::Store(largest, moved[2] + i);
      return weight;
    });
  }

  void Store(const TileRun& tile, uint64_t first_element) {
    const OptimizerContext& context = *plan_.context;
    TileDraws draws;
    if (NeedsDraws(context.weights)) DrawFiller<Number>::Fill(plan_.weight_draws, first_element, draws);
    WeightCodec<Number>::Encode(context.weights, weights_, draws, tile.weights_out);
    for (int copy = 0; copy < plan_.run->num_copies; ++copy) {
      std::memcpy(tile.copies[copy], tile.weights_out.codes, kTileElements * plan_.weights.codes.bytes);
    }
    if (context.states == StateFormat::kFp32) return;
    for (int s = 0; s < plan_.num_states; ++s) {
      if (context.states == StateFormat::kBf16Sr) DrawFiller<Number>::Fill(plan_.state_draws[s], first_element, draws);
      if (s == 0) {
        StateCodec<Number>::template Encode<true>(context.states, states_[s], draws, tile.states_out[s]);
      } else {
        StateCodec<Number>::template Encode<false>(context.states, states_[s], draws, tile.states_out[s]);
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
