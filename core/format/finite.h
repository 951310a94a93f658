// AllFiniteBelow: the check of a gradient run, made once when its slot is declared ready and still lies in cache.
// Every |g| must be below FLT_MAX / V, V the number of slots, and not NaN: then no tree sum of V such slots overflows,
// and the step's kernels need no check of their own. Pure functions, thread-safe; memory need only be element-aligned.
#pragma once

#include <cfloat>
#include <cstdint>

#include "core/format/format.h"

namespace shardmesh {

// The bits of the smallest magnitude that is refused with `num_slots` slots. Magnitudes compare as their bits do, and
// infinities and NaNs have the largest bits, so one integer comparison refuses all three. REQUIRES: num_slots >= 1.
inline uint32_t RefusedMagnitudeBits(int num_slots) { return FloatBits(FLT_MAX / static_cast<float>(num_slots)); }

namespace finite_internal {

// The index of the first element whose magnitude bits are `refused` or more, or num_elements. Element is uint32_t
// (fp32) or uint16_t (bf16), as stored; Signed is its signed twin. refused - 1 - magnitude is negative exactly for an
// offender, and never overflows; the inner loop ORs those signs and is vectorized by the compiler.
template <class Element, class Signed>
int64_t FirstRefused(const Element* elements, int64_t num_elements, Element refused) {
  constexpr int64_t kBlock = 256;
  constexpr Element kMagnitude = static_cast<Element>(~Element{0}) >> 1;
  const Element accepted = refused - 1;
  int64_t i = 0;
  for (; i + kBlock <= num_elements; i += kBlock) {
    Element signs = 0;
    for (int64_t j = 0; j < kBlock; ++j) signs |= static_cast<Element>(accepted - (elements[i + j] & kMagnitude));
    if (static_cast<Signed>(signs) < 0) break;
  }
  while (i < num_elements && (elements[i] & kMagnitude) < refused) ++i;
  return i;
}

}  // namespace finite_internal

// True when every gradient of the run is below FLT_MAX / num_slots in magnitude and not NaN. Otherwise false, and
// *first_offender (when given) is the index of the first that is not. `format` says how they are stored (kBf16Sr as
// kBf16). REQUIRES: num_slots >= 1, num_elements >= 0, `gradients` aligned to an element.
inline bool AllFiniteBelow(const void* gradients, Format format, int64_t num_elements, int num_slots,
                           int64_t* first_offender = nullptr) {
  const uint32_t refused = RefusedMagnitudeBits(num_slots);
  int64_t first;
  if (format == Format::kFp32) {
    first = finite_internal::FirstRefused<uint32_t, int32_t>(static_cast<const uint32_t*>(gradients), num_elements,
                                                             refused);
  } else {
    const uint16_t refused16 = static_cast<uint16_t>((refused + 0xFFFFu) >> 16);  // the first bf16 not below it
    first = finite_internal::FirstRefused<uint16_t, int16_t>(static_cast<const uint16_t*>(gradients), num_elements,
                                                             refused16);
  }
  if (first == num_elements) return true;
  if (first_offender != nullptr) *first_offender = first;
  return false;
}

}  // namespace shardmesh
