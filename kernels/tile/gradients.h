// The gradient of one tile: the slots' tree sum (core/reduction.h), scaled and clipped, for every number type.
#pragma once

#include "core/reduction.h"
#include "kernels/tile/lanes.h"
#include "kernels/tile/plan.h"

namespace shardmesh {

template <class Number>
SHARDMESH_RULE Number LoadGradient(const float* from) {
  return Lanes<Number>::Load(from);
}
template <class Number>
SHARDMESH_RULE Number LoadGradient(const uint16_t* from) {
  return Lanes<Number>::LoadBf16(from);
}

// kSlots: their number, or 0 where it is known at run time only.
template <class Number, class Element, int kSlots>
void SumSlots(const StepPlan& plan, const TileRun& tile, float* to) {
  const Number divide(plan.run->divide_scale), scale(plan.gradient_scale);
  const int num_slots = plan.run->num_slots;
  for (int64_t i = 0; i < kTileElements; i += Lanes<Number>::kWidth) {
    const auto leaf = [&](int slot) {
      return LoadGradient<Number>(static_cast<const Element*>(tile.gradients[slot]) + tile.gradient_offset + i);
    };
    Number sum(0.0f);
    if constexpr (kSlots > 0) {
      sum = TreeSumFixed<kSlots>(leaf);
    } else {
      sum = TreeSum<Number>(num_slots, leaf);
    }
    Lanes<Number>::Store(sum * divide * scale, to + i);
  }
}

template <class Number, class Element>
void SumElements(const StepPlan& plan, const TileRun& tile, float* to) {
  switch (plan.run->num_slots) {
    case 1:
      return SumSlots<Number, Element, 1>(plan, tile, to);
    case 2:
      return SumSlots<Number, Element, 2>(plan, tile, to);
    case 4:
      return SumSlots<Number, Element, 4>(plan, tile, to);
    case 8:
      return SumSlots<Number, Element, 8>(plan, tile, to);
    default:
      return SumSlots<Number, Element, 0>(plan, tile, to);
  }
}

// kTileElements numbers.
template <class Number>
void SumGradients(const StepPlan& plan, const TileRun& tile, float* to) {
  if (plan.context->gradients == Format::kFp32) return SumElements<Number, float>(plan, tile, to);
  return SumElements<Number, uint16_t>(plan, tile, to);
}

}  // namespace shardmesh
