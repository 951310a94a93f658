// The sum of slots, element by element in tree order (core/base/reduction.h), times a factor: a reduction without a
// step. (The optimizer step sums for itself: kernels/tile/gradients.h.)
//
// Two implementations, the same bits (a NaN's payload aside): the reference (plain C++, any processor) and SIMD (8
// lanes, processors with AVX2 and FMA). A third is kernels/sum/slot_sum_cuda.h.
//
// Thread-safe for runs that share no output. Memory is borrowed for the call; nothing is checked. The processor's
// floating-point environment is set for the call and restored (kernels/cpu/fp_environment.h). All stores are ordinary
// ones, or ordered by a fence at the end: a release-store may follow.
#pragma once

#include <cstdint>

#include "core/format/format.h"

namespace shardmesh {

struct SlotSumRun {
  const void* const* slots = nullptr;  // [num_slots], aligned to their elements
  int num_slots = 0;                   // at least 1
  float scale = 1;
  float* sum = nullptr;  // overlaps no slot
  int64_t num_elements = 0;
  // A wish: past the caches, which need not read first what is overwritten; for sums that are larger than they are.
  bool streamed = false;
};

// sum[i] = (the tree sum over slots of slots[s][i]) * scale, in fp32. `format`: of the slots, kFp32 or kBf16.
using SlotSumFn = void (*)(Format format, const SlotSumRun& run);

void SlotSumReference(Format format, const SlotSumRun& run);
// REQUIRES: SimdSupported() (kernels/cpu/processor.h).
void SlotSumSimd(Format format, const SlotSumRun& run);
// SIMD where it is supported, else the reference.
SlotSumFn BestSlotSum();

}  // namespace shardmesh
