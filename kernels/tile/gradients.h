// The gradient of one tile: the slots' tree sum (core/base/reduction.h), divided, for every number type; and its
// squares.
#pragma once

#include <cstring>

#include "core/base/reduction.h"
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

// A vector of which only `elements` lie in memory; the others are 0.
template <class Number, class Element>
SHARDMESH_RULE Number LoadLastGradients(const Element* from, int64_t elements) {
  Element padded[Lanes<Number>::kWidth] = {};
  std::memcpy(padded, from, static_cast<size_t>(elements) * sizeof(Element));
  return LoadGradient<Number>(padded);
}

// kSlots: their number, or 0 where it is known at run time only.
template <class Number, class Element, int kSlots>
void SumSlots(const StepPlan& plan, const TileRun& tile, float* to, int64_t elements) {
  const Number divide(plan.run->divide_scale);
  const int num_slots = plan.run->num_slots;
  const auto sum_at = [&](int64_t i, const auto& load) {
    const auto leaf = [&](int slot) {
      return load(static_cast<const Element*>(tile.gradients[slot]) + tile.gradient_offset + i);
    };
    Number sum(0.0f);
    if constexpr (kSlots > 0) {
      sum = TreeSumFixed<kSlots>(leaf);
    } else {
      sum = TreeSum<Number>(num_slots, leaf);
    }
    Lanes<Number>::Store(sum * divide, to + i);
  };
  constexpr int64_t kLine = 64 / sizeof(Element);  // elements
  int64_t i = 0;
  for (; i + Lanes<Number>::kWidth <= elements; i += Lanes<Number>::kWidth) {
    // Of the next tile, while this one is summed: more streams than the processor follows by itself.
    for (int slot = 0; i % kLine == 0 && slot < (kSlots > 0 ? kSlots : num_slots); ++slot) {
      Lanes<Number>::Prefetch(static_cast<const Element*>(tile.gradients[slot]) + tile.gradient_offset + i +
                              kTileElements);
    }
    sum_at(i, [](const Element* from) { return LoadGradient<Number>(from); });
  }
  if (i < elements) sum_at(i, [&](const Element* from) { return LoadLastGradients<Number>(from, elements - i); });
}

template <class Number, class Element>
void SumElements(const StepPlan& plan, const TileRun& tile, float* to, int64_t elements) {
  switch (plan.run->num_slots) {
    case 1:
      return SumSlots<Number, Element, 1>(plan, tile, to, elements);
    case 2:
      return SumSlots<Number, Element, 2>(plan, tile, to, elements);
    case 4:
      return SumSlots<Number, Element, 4>(plan, tile, to, elements);
    case 8:
      return SumSlots<Number, Element, 8>(plan, tile, to, elements);
    default:
      return SumSlots<Number, Element, 0>(plan, tile, to, elements);
  }
}

// kTileElements numbers, of which those behind `elements` are 0: there is no gradient.
template <class Number>
void SumGradients(const StepPlan& plan, const TileRun& tile, float* to, int64_t elements = kTileElements) {
  for (int64_t i = elements; i < kTileElements; ++i) to[i] = 0;
  if (plan.context->gradients == Format::kFp32) return SumElements<Number, float>(plan, tile, to, elements);
  return SumElements<Number, uint16_t>(plan, tile, to, elements);
}

// Clips a tile, and turns its sign where the optimizer maximizes.
template <class Number>
void ClipGradients(const StepPlan& plan, float* gradients) {
  if (plan.gradient_scale == 1) return;
  const Number scale(plan.gradient_scale);
  for (int64_t i = 0; i < kTileElements; i += Lanes<Number>::kWidth) {
    Lanes<Number>::Store(Lanes<Number>::Load(gradients + i) * scale, gradients + i);
  }
}

// The sum of squares of a tile: 8 sums take every eighth element each, fma(g, g, sum) from +0, and are added as a tree.
// The norm of all gradients is the square root of a tree sum (core/base/reduction.h) over tiles.
template <class Number>
float SumSquares(const float* gradient) {
  using L = Lanes<Number>;
  constexpr int kSums = 8;
  Number sums[kSums / L::kWidth];
  for (Number& sum : sums) sum = Number(0.0f);
  for (int64_t i = 0; i < kTileElements; i += kSums) {
    for (int k = 0; k < kSums / L::kWidth; ++k) {
      const Number g = L::Load(gradient + i + k * L::kWidth);
      sums[k] = MulAdd(g, g, sums[k]);
    }
  }
  alignas(32) float lanes[kSums];
  for (int k = 0; k < kSums / L::kWidth; ++k) L::Store(sums[k], lanes + k * L::kWidth);
  return TreeSumFixed<kSums>([&](int lane) { return lanes[lane]; });
}

}  // namespace shardmesh
