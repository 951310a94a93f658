// The sum of slots with 8 lanes. Compiled for AVX2 and FMA as a whole: nothing here may run before SimdSupported() was
// asked, and nothing but the entry point at the end is visible outside.
#include "kernels/sum/slot_sum_simd.h"

#include <xmmintrin.h>

#include <type_traits>

#include "core/base/reduction.h"
#include "kernels/cpu/simd8.h"

HWY_BEFORE_NAMESPACE();
namespace shardmesh::simd8 {
namespace {

// How far ahead of its use memory is asked for: kernels/step/adam_simd.h says why.
constexpr int kPrefetchElements = 256;

template <class Element>
HWY_INLINE void PrefetchGroup(const Element* from) {
  for (int i = 0; i < kGroupElements; i += 64 / static_cast<int>(sizeof(Element))) {
    _mm_prefetch(reinterpret_cast<const char*>(from + kPrefetchElements + i), _MM_HINT_T0);
  }
}

// The slots of a run: kSlots is their number, or 0 where it is known at run time only.
template <class Element, int kSlots>
class Slots {
 public:
  HWY_INLINE explicit Slots(const SlotSumRun& run) : slots_(run.slots), num_slots_(run.num_slots), scale_(run.scale) {
    for (int slot = 0; slot < kSlots; ++slot) fixed_[slot] = static_cast<const Element*>(slots_[slot]);
  }
  HWY_INLINE F32x8 Sum(int64_t i) const {
    if constexpr (kSlots > 0) {
      return TreeSumFixed<kSlots>([&](int slot) HWY_ATTR { return Load8(fixed_[slot] + i); }) * scale_;
    } else {
      const auto leaf = [&](int slot) HWY_ATTR { return Load8(static_cast<const Element*>(slots_[slot]) + i); };
      return TreeSum<F32x8>(num_slots_, leaf) * scale_;
    }
  }
  HWY_INLINE void Prefetch(int64_t i) const {
    for (int slot = 0; slot < kSlots; ++slot) PrefetchGroup(fixed_[slot] + i);
  }

 private:
  const void* const* const slots_;
  const int num_slots_;
  const F32x8 scale_;
  const Element* fixed_[kSlots > 0 ? kSlots : 1];
};

template <class Element, int kSlots, bool kStreamed>
HWY_NOINLINE void SumAll(const SlotSumRun& run) {
  const Slots<Element, kSlots> slots(run);
  for (int64_t i = 0; i + kGroupElements <= run.num_elements; i += kGroupElements) {
    slots.Prefetch(i);
#pragma GCC unroll 8
    for (int64_t k = i; k < i + kGroupElements; k += 8) {
      if constexpr (kStreamed) {
        hn::Stream(slots.Sum(k).lanes, Floats(), run.sum + k);
      } else {
        Store8(slots.Sum(k), run.sum + k);
      }
    }
  }
  if constexpr (kStreamed) _mm_sfence();
}

// The number of slots becomes a constant of the compiler where it is common.
template <class Element, bool kStreamed>
void WithSlots(const SlotSumRun& run) {
  switch (run.num_slots) {
    case 1:
      return SumAll<Element, 1, kStreamed>(run);
    case 2:
      return SumAll<Element, 2, kStreamed>(run);
    case 3:
      return SumAll<Element, 3, kStreamed>(run);
    case 4:
      return SumAll<Element, 4, kStreamed>(run);
    case 6:
      return SumAll<Element, 6, kStreamed>(run);
    case 8:
      return SumAll<Element, 8, kStreamed>(run);
    default:
      return SumAll<Element, 0, kStreamed>(run);
  }
}

template <class Element>
void SumOf(const SlotSumRun& run) {
  const bool aligned = reinterpret_cast<uintptr_t>(run.sum) % 32 == 0;
  return run.streamed && aligned ? WithSlots<Element, true>(run) : WithSlots<Element, false>(run);
}

}  // namespace

void SumGroups(Format format, const SlotSumRun& run) {
  return format == Format::kFp32 ? SumOf<float>(run) : SumOf<uint16_t>(run);
}

}  // namespace shardmesh::simd8
HWY_AFTER_NAMESPACE();
