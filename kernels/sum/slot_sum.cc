// The reference, and the choice between the implementations; compiled for any processor.
#include "kernels/sum/slot_sum.h"

#include "core/base/reduction.h"
#include "kernels/cpu/fp_environment.h"
#include "kernels/cpu/processor.h"
#include "kernels/sum/slot_sum_simd.h"

namespace shardmesh {
namespace {

float Number(const void* slot, Format format, int64_t i) {
  return format == Format::kFp32 ? static_cast<const float*>(slot)[i]
                                 : Bf16ToFloat(static_cast<const uint16_t*>(slot)[i]);
}

// The elements from `begin` on. Not inlined: kernels/cpu/fp_environment.h.
__attribute__((noinline)) void SumFrom(int64_t begin, Format format, const SlotSumRun& run) {
  for (int64_t i = begin; i < run.num_elements; ++i) {
    run.sum[i] =
        TreeSum<float>(run.num_slots, [&](int slot) { return Number(run.slots[slot], format, i); }) * run.scale;
  }
}

}  // namespace

void SlotSumReference(Format format, const SlotSumRun& run) {
  const ScopedFpEnvironment environment;
  SumFrom(0, format, run);
}

void SlotSumSimd(Format format, const SlotSumRun& run) {
#if defined(__x86_64__)
  const ScopedFpEnvironment environment;
  simd8::SumGroups(format, run);
  SumFrom(run.num_elements / kGroupElements * kGroupElements, format, run);
#else
  SlotSumReference(format, run);
#endif
}

SlotSumFn BestSlotSum() { return SimdSupported() ? SlotSumSimd : SlotSumReference; }

}  // namespace shardmesh
