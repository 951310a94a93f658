// The fused step and the reduction with 8 lanes. The element rules are those of the reference; here stands only how
// memory is walked. Compiled for AVX2 and FMA as a whole: nothing here may run before SimdSupported() was asked, and
// nothing but the entry points at the end is visible outside.
#include "kernels/fused_step_simd.h"

#include <xmmintrin.h>

#include <type_traits>

#include "core/reduction.h"
#include "kernels/draws_simd.h"
#include "kernels/rules/adamw.h"
#include "kernels/simd8.h"

HWY_BEFORE_NAMESPACE();
namespace shardmesh {
namespace simd8 {
namespace {

constexpr int kVectors = 8;  // of 8 elements, per group
static_assert(kVectors * 8 == kGroupElements, "a group is 8 vectors");

// How far ahead of its use memory is asked for. The processor's own prefetcher stops at page boundaries and loses track
// with this many streams; 1 KiB of fp32 was measured best, and running past a run's end is harmless.
constexpr int kPrefetchElements = 256;

template <class Element>
HWY_INLINE void PrefetchGroup(const Element* from) {
  for (int i = 0; i < kGroupElements; i += 64 / static_cast<int>(sizeof(Element))) {
    _mm_prefetch(reinterpret_cast<const char*>(from + kPrefetchElements + i), _MM_HINT_T0);
  }
}

// How a format lies in memory.
template <Format kFormat>
struct Stored {
  using Element = uint16_t;
};
template <>
struct Stored<Format::kFp32> {
  using Element = float;
};

// The new weights of vector `vector` of a group as bits: all 32 for fp32, in the upper half for bf16.
template <Format kWeights>
HWY_INLINE U32x8 RoundedBits(F32x8 weight, const U32x8 (&words)[4], int vector) {
  if constexpr (kWeights == Format::kFp32) {
    return FloatBits(weight);
  } else if constexpr (kWeights == Format::kBf16) {
    return Bf16BitsRne(weight);
  } else {
    return Bf16BitsSr(weight, GroupDraws::Of(words, vector));
  }
}

// 16 elements of the new weights, on their way to memory. Ordinary stores everywhere: streaming stores made the copies
// 5 to 15 % of the pass slower, since a pass with draws is bound by arithmetic and hides the reads for ownership.
template <Format kWeights>
struct WeightPair {
  HWY_INLINE WeightPair(U32x8 a, U32x8 b) : halves(UpperHalves(a, b)) {}
  HWY_INLINE void Store(uint16_t* to) const { hn::StoreU(halves, Halves16(), to); }
  hn::Vec<Halves16> halves;
};
template <>
struct WeightPair<Format::kFp32> {
  HWY_INLINE WeightPair(U32x8 a, U32x8 b)
      : first(hn::BitCast(Floats(), a.lanes)), second(hn::BitCast(Floats(), b.lanes)) {}
  HWY_INLINE void Store(float* to) const {
    hn::StoreU(first, Floats(), to);
    hn::StoreU(second, Floats(), to + 8);
  }
  hn::Vec<Floats> first, second;
};

// The slots of a run: kSlots is their number, or 0 where it is known at run time only.
template <class Gradient, int kSlots>
class Slots {
 public:
  HWY_INLINE Slots(const void* const* gradients, int num_slots, float divide_scale)
      : gradients_(gradients), num_slots_(num_slots), divide_scale_(divide_scale) {
    for (int slot = 0; slot < kSlots; ++slot) fixed_[slot] = static_cast<const Gradient*>(gradients[slot]);
  }
  HWY_INLINE F32x8 Mean(int64_t i) const {
    if constexpr (kSlots > 0) {
      return TreeSumFixed<kSlots>([&](int slot) HWY_ATTR { return Load8(fixed_[slot] + i); }) * divide_scale_;
    } else {
      const auto leaf = [&](int slot) HWY_ATTR { return Load8(static_cast<const Gradient*>(gradients_[slot]) + i); };
      return TreeSum<F32x8>(num_slots_, leaf) * divide_scale_;
    }
  }
  HWY_INLINE void Prefetch(int64_t i) const {
    for (int slot = 0; slot < kSlots; ++slot) PrefetchGroup(fixed_[slot] + i);
  }

 private:
  const void* const* const gradients_;
  const int num_slots_;
  const F32x8 divide_scale_;
  const Gradient* fixed_[kSlots > 0 ? kSlots : 1];
};

template <Format kWeights, Format kGradients, int kSlots>
HWY_NOINLINE void StepRun(const StepContext& context, const FusedRun& run) {
  using Weight = typename Stored<kWeights>::Element;
  const Weight* const weights_in = static_cast<const Weight*>(run.weights_in);
  Weight* const weights_out = static_cast<Weight*>(run.weights_out);
  Weight* const copy0 = run.num_copies > 0 ? static_cast<Weight*>(run.copies[0]) : nullptr;
  Weight* const copy1 = run.num_copies > 1 ? static_cast<Weight*>(run.copies[1]) : nullptr;
  const float* const m_in = run.m_in;
  const float* const v_in = run.v_in;
  float* const m_out = run.m_out;
  float* const v_out = run.v_out;
  const Slots<typename Stored<kGradients>::Element, kSlots> slots(run.gradients, run.num_slots, run.divide_scale);
  const AdamWConstants<F32x8> constants(context.scalars);
  GroupDraws draws(KeyOfStep(context.key, context.step), run.tensor, static_cast<uint32_t>(context.step));
  const int64_t num_elements = run.num_elements;
  for (int64_t i = 0; i < num_elements; i += kGroupElements) {
    U32x8 words[4];
    if constexpr (kWeights == Format::kBf16Sr) draws.Fill(run.first_element + static_cast<uint64_t>(i), words);
    slots.Prefetch(i);
    PrefetchGroup(weights_in + i);
    PrefetchGroup(m_in + i);
    PrefetchGroup(v_in + i);
#pragma GCC unroll 4
    for (int pair = 0; pair < kVectors / 2; ++pair) {
      const int64_t at = i + 16 * pair;
      U32x8 bits[2];
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const int64_t k = at + 8 * half;
        F32x8 m = Load8(m_in + k);
        F32x8 v = Load8(v_in + k);
        const F32x8 weight = AdamWUpdate(constants, Load8(weights_in + k), slots.Mean(k), m, v);
        Store8(m, m_out + k);
        Store8(v, v_out + k);
        bits[half] = RoundedBits<kWeights>(weight, words, 2 * pair + half);
      }
      const WeightPair<kWeights> pair_bits(bits[0], bits[1]);
      pair_bits.Store(weights_out + at);
      if (copy0 != nullptr) pair_bits.Store(copy0 + at);
      if (copy1 != nullptr) pair_bits.Store(copy1 + at);
    }
  }
}

template <Format kGradients, int kSlots, bool kStreamed>
HWY_NOINLINE void ReduceSlots(const ReduceRun& run) {
  const Slots<typename Stored<kGradients>::Element, kSlots> slots(run.gradients, run.num_slots, run.divide_scale);
  for (int64_t i = 0; i < run.num_elements; i += kGroupElements) {
    slots.Prefetch(i);
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector) {
      const F32x8 mean = slots.Mean(i + 8 * vector);
      float* const to = run.sum + i + 8 * vector;
      if constexpr (kStreamed) {
        hn::Stream(mean.lanes, Floats(), to);
      } else {
        Store8(mean, to);
      }
    }
  }
  if constexpr (kStreamed) _mm_sfence();
}

template <Format kGradients, int kSlots>
void ReduceRunOf(const ReduceRun& run) {
  const bool aligned = reinterpret_cast<uintptr_t>(run.sum) % 32 == 0;
  return run.streamed && aligned ? ReduceSlots<kGradients, kSlots, true>(run)
                                 : ReduceSlots<kGradients, kSlots, false>(run);
}

// Calls pass(n) with the number of slots as a compile-time constant where it is common, else with 0.
template <class Pass>
void WithSlots(int num_slots, const Pass& pass) {
  switch (num_slots) {
    case 1:
      return pass(std::integral_constant<int, 1>());
    case 2:
      return pass(std::integral_constant<int, 2>());
    case 3:
      return pass(std::integral_constant<int, 3>());
    case 4:
      return pass(std::integral_constant<int, 4>());
    case 6:
      return pass(std::integral_constant<int, 6>());
    case 8:
      return pass(std::integral_constant<int, 8>());
    default:
      return pass(std::integral_constant<int, 0>());
  }
}

template <Format kWeights>
void StepGradients(const StepContext& context, const FusedRun& run) {
  WithSlots(run.num_slots, [&](auto slots) {
    constexpr int kSlots = decltype(slots)::value;
    if (context.gradients == Format::kFp32) return StepRun<kWeights, Format::kFp32, kSlots>(context, run);
    return StepRun<kWeights, Format::kBf16, kSlots>(context, run);
  });
}

}  // namespace

void Step(const StepContext& context, const FusedRun& run) {
  switch (context.weights) {
    case Format::kFp32:
      return StepGradients<Format::kFp32>(context, run);
    case Format::kBf16:
      return StepGradients<Format::kBf16>(context, run);
    case Format::kBf16Sr:
      return StepGradients<Format::kBf16Sr>(context, run);
  }
}

void Reduce(Format gradients, const ReduceRun& run) {
  WithSlots(run.num_slots, [&](auto slots) {
    constexpr int kSlots = decltype(slots)::value;
    if (gradients == Format::kFp32) return ReduceRunOf<Format::kFp32, kSlots>(run);
    return ReduceRunOf<Format::kBf16, kSlots>(run);
  });
}

}  // namespace simd8
}  // namespace shardmesh
HWY_AFTER_NAMESPACE();
