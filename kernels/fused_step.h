// The fused step: one pass over a run of a tensor's elements that sums the slots' gradients in tree order, applies the
// optimizer (AdamW), rounds the new weights to their format and writes weights, m, v and further copies of the weights.
//
// Two implementations, the same bits: the reference (plain C++, any processor) and SIMD (8 fixed lanes, processors with
// AVX2 and FMA). A third is kernels/fused_step_cuda.h. Element rules: kernels/rules/adamw.h.
//
// Nothing is checked: that the gradients are finite was checked when their slot was declared ready (core/finite.h), and
// a run comes from a validated plan.
//
// Thread-safe for runs that share no output. Memory is borrowed for the call. The processor's floating-point
// environment is set for the call and restored (kernels/fp_environment.h). All stores are ordinary ones, or ordered
// by a fence at the end: a release-store may follow.
#pragma once

#include <cstdint>

#include "core/adamw.h"
#include "core/format.h"
#include "core/philox.h"

namespace shardmesh {

// A run of one tensor's elements; every pointer is at the run's first element and aligned to an element at least.
// Streams of one pass should start at different multiples of 64 KiB + 4 KiB: congruent modulo 2 MiB they cost 1.7 times
// as much.
struct FusedRun {
  const void* const* gradients = nullptr;  // [num_slots], in slot order, in the gradient format
  int num_slots = 0;                       // at least 1
  float divide_scale = 1;                  // the sum is multiplied by it: 1 / V rounded once to fp32
  // The outputs may lie one chunk away from the inputs (rotating storage), or be the inputs themselves. An output never
  // overlaps an input in another way, or another output.
  const void* weights_in = nullptr;
  const float* m_in = nullptr;
  const float* v_in = nullptr;
  void* weights_out = nullptr;
  float* m_out = nullptr;
  float* v_out = nullptr;
  void* copies[2] = {nullptr, nullptr};  // further places that get the new weight bytes: parameter window, publication
  int num_copies = 0;                    // 0, 1 or 2
  int64_t num_elements = 0;              // multiple of kGroupElements; 0 does nothing
  uint64_t first_element = 0;            // the run's first index in its tensor, multiple of kGroupElements
  uint32_t tensor = 0;                   // the tensor's number in the job, for its draws
};

// What all runs of a step share.
struct StepContext {
  AdamWScalars scalars;
  Format weights = Format::kFp32;
  Format gradients = Format::kFp32;  // kFp32 or kBf16
  PhiloxKey key;                     // MakePhiloxKey(job seed, DrawPurpose::kWeightRounding)
  int64_t step = 0;
};

using FusedStepFn = void (*)(const StepContext& context, const FusedRun& run);

void FusedStepReference(const StepContext& context, const FusedRun& run);
// REQUIRES: SimdSupported().
void FusedStepSimd(const StepContext& context, const FusedRun& run);

// The reduction alone, for comparison with the unfused way: sum[i] = tree sum of the slots * divide_scale, in fp32. The
// step alone needs no code of its own: it is FusedStep with one fp32 slot, this sum, and divide_scale 1. Both after
// each other give the bits of the fused pass.
struct ReduceRun {
  const void* const* gradients = nullptr;  // as in FusedRun
  int num_slots = 0;
  float divide_scale = 1;
  float* sum = nullptr;      // overlaps no input
  int64_t num_elements = 0;  // multiple of kGroupElements
  // A wish: past the caches, which need not read first what is overwritten; for sums that are larger than they are.
  bool streamed = false;
};

using ReduceFn = void (*)(Format gradients, const ReduceRun& run);

void ReduceReference(Format gradients, const ReduceRun& run);
// REQUIRES: SimdSupported().
void ReduceSimd(Format gradients, const ReduceRun& run);

// Whether this processor, its operating system and this build have what the SIMD implementation needs.
bool SimdSupported();

// One implementation of the passes.
struct FusedBackend {
  const char* name;  // "simd" or "reference"
  FusedStepFn step;
  ReduceFn reduce;
};

// SIMD where it is supported, else the reference.
FusedBackend BestFusedBackend();
inline FusedStepFn BestFusedStep() { return BestFusedBackend().step; }

}  // namespace shardmesh
