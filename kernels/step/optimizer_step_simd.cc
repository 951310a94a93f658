// The step with 8 lanes. Compiled for AVX2 and FMA as a whole: nothing here may run before SimdSupported() was asked.
// The templates of kernels/tile/ are instantiated for 8 lanes alone, so none of their code is shared with the
// reference.
#include "kernels/step/optimizer_step_simd.h"

#include "kernels/step/adam_simd.h"

namespace shardmesh::simd8 {
namespace {

// How gradients come: in which format, from how many slots. Where memory bounds the step, the usual numbers of slots
// are summed as they are loaded.
struct Slots {
  Format format;
  int number;
};

template <class Weights, class States, int kSlots>
WholeTilesFn OfSlots(Format gradients) {
  return gradients == Format::kFp32 ? AdamTiles<Weights, States, SlotGradients<float, kSlots>>
                                    : AdamTiles<Weights, States, SlotGradients<uint16_t, kSlots>>;
}

template <class Weights, class States>
WholeTilesFn OfGradients(const Slots& slots) {
  if (slots.number == 1) return OfSlots<Weights, States, 1>(slots.format);
  if constexpr (std::is_same_v<States, Fp32States>) {
    if (slots.number == 2) return OfSlots<Weights, States, 2>(slots.format);
    if (slots.number == 4) return OfSlots<Weights, States, 4>(slots.format);
  }
  return AdamTiles<Weights, States, SummedGradients>;
}

template <StateFormat kFormat>
using QuantizedStates =
    BlockStates<typename StateCode<F32x8, kFormat, true>::Type, typename StateCode<F32x8, kFormat, false>::Type>;

template <class Weights>
WholeTilesFn OfStates(StateFormat states, const Slots& gradients) {
  switch (states) {
    case StateFormat::kFp32:
      return OfGradients<Weights, Fp32States>(gradients);
    case StateFormat::kDyn8:
      return OfGradients<Weights, QuantizedStates<StateFormat::kDyn8>>(gradients);
    case StateFormat::kDyn4:
      return OfGradients<Weights, QuantizedStates<StateFormat::kDyn4>>(gradients);
    case StateFormat::kFp8:
      return OfGradients<Weights, QuantizedStates<StateFormat::kFp8>>(gradients);
    case StateFormat::kFp8x32:
      return OfGradients<Weights, QuantizedStates<StateFormat::kFp8x32>>(gradients);
    default:
      return nullptr;
  }
}

// The loop for this step, null when there is none: then tiles do it.
WholeTilesFn FindTiles(const OptimizerContext& context, const OptimizerRun& run) {
  const bool adam = context.hyper.kind == OptimizerKind::kAdamW || context.hyper.kind == OptimizerKind::kAdam;
  if (!adam || context.hyper.amsgrad || context.scalars.coupled_decay != 0) return nullptr;
  const Slots gradients = {context.gradients, run.num_slots};
  switch (context.weights) {
    case WeightFormat::kFp32:
      return OfStates<Fp32Weights>(context.states, gradients);
    case WeightFormat::kBf16:
      return OfStates<Bf16Weights<false>>(context.states, gradients);
    case WeightFormat::kBf16Sr:
      return OfStates<Bf16Weights<true>>(context.states, gradients);
    case WeightFormat::kBf16Plus8Sr:
      return OfStates<SplitWeights8>(context.states, gradients);
    default:
      return nullptr;
  }
}

}  // namespace

void OptimizerStep(const OptimizerContext& context, const OptimizerRun& run) {
  RunStep<F32x8>(context, run, FindTiles);
}

void GradientSquares(const OptimizerContext& context, const OptimizerRun& run) { RunSquares<F32x8>(context, run); }

}  // namespace shardmesh::simd8
