// One element of the fused step, from memory to memory: the body of the reference's loop and of the CUDA kernel.
#pragma once

#include <cstdint>

#include "core/format.h"
#include "core/philox.h"
#include "core/reduction.h"
#include "kernels/fused_step.h"
#include "kernels/rules/adamw.h"

namespace shardmesh {

SHARDMESH_RULE float LoadElement(const void* stream, Format format, int64_t i) {
  return format == Format::kFp32 ? static_cast<const float*>(stream)[i]
                                 : Bf16ToFloat(static_cast<const uint16_t*>(stream)[i]);
}

// The mean gradient of element i of a run.
SHARDMESH_RULE float MeanGradient(const void* const* gradients, Format format, int num_slots, float divide_scale,
                                  int64_t i) {
  return TreeSum<float>(num_slots, [=](int slot) { return LoadElement(gradients[slot], format, i); }) * divide_scale;
}

// Writes a new weight to `stream` in the context's format.
SHARDMESH_RULE void StoreWeight(const StepContext& context, const FusedRun& run, int64_t i, float weight,
                                void* stream) {
  if (context.weights == Format::kFp32) {
    static_cast<float*>(stream)[i] = weight;
  } else if (context.weights == Format::kBf16) {
    static_cast<uint16_t*>(stream)[i] = FloatToBf16Rne(weight);
  } else {
    const uint32_t draw = Draw16(context.key, context.step, run.tensor, run.first_element + static_cast<uint64_t>(i));
    static_cast<uint16_t*>(stream)[i] = FloatToBf16Sr(weight, draw);
  }
}

// Element i of the run, 0 <= i < run.num_elements.
SHARDMESH_RULE void StepElement(const StepContext& context, const FusedRun& run, int64_t i) {
  const AdamWConstants<float> constants(context.scalars);
  const float gradient = MeanGradient(run.gradients, context.gradients, run.num_slots, run.divide_scale, i);
  float m = run.m_in[i];
  float v = run.v_in[i];
  const float weight = AdamWUpdate(constants, LoadElement(run.weights_in, context.weights, i), gradient, m, v);
  run.m_out[i] = m;
  run.v_out[i] = v;
  StoreWeight(context, run, i, weight, run.weights_out);
  for (int copy = 0; copy < run.num_copies; ++copy) StoreWeight(context, run, i, weight, run.copies[copy]);
}

}  // namespace shardmesh
