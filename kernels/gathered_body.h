// The loops of kernels/gathered.h for every number type: Number is float, or a vector of them. REQUIRES: the
// floating-point environment is set.
#pragma once

#include <cstring>

#include "kernels/gathered.h"
#include "kernels/rules/block_scales.h"
#include "kernels/rules/int8.h"
#include "kernels/tile/lanes.h"
#include "kernels/tile/states.h"

namespace shardmesh {

constexpr uint32_t kInfinityBits = 0x7F800000u, kNanBits = 0x7FC00000u;

// kWidth values.
template <class Number>
SHARDMESH_RULE Number LoadValues(const float* values) {
  return Lanes<Number>::Load(values);
}
template <class Number>
SHARDMESH_RULE Number LoadValues(const uint16_t* values) {
  return Lanes<Number>::LoadBf16(values);
}

// Calls visit(i, number) for elements [i, i + kWidth); what is beyond `n` is 0.
template <class Number, class Value, class Visit>
SHARDMESH_RULE void ForEachNumber(const Value* values, int64_t n, const Visit& visit) {
  constexpr int64_t kWidth = Lanes<Number>::kWidth;
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) visit(i, LoadValues<Number>(values + i));
  if (kWidth == 1 || i >= n) return;
  Value rest[kWidth] = {};
  for (int64_t k = 0; k < kWidth && i + k < n; ++k) rest[k] = values[i + k];
  visit(i, LoadValues<Number>(rest));
}

// Bits of magnitudes are compared as integers: so a NaN is the largest.
template <class Number, class Value>
SHARDMESH_RULE uint32_t LargestBits(const Value* values, int64_t n) {
  using Word = typename Lanes<Number>::Word;
  Word most(0u);
  ForEachNumber<Number>(values, n, [&](int64_t, Number x) { most = MaxInt(most, FloatBits(x) & Word(0x7FFFFFFFu)); });
  float lanes[Lanes<Number>::kWidth];
  Lanes<Number>::Store(FloatOfBits(most), lanes);
  uint32_t largest = 0;
  for (const float lane : lanes) largest = MaxInt(largest, FloatBits(lane));
  return largest;
}

template <class Number, class Value>
void RaiseMaximaAs(const GatheredRun& run, std::atomic<uint32_t>* maxima) {
  const auto* const values = static_cast<const Value*>(run.values);
  ForEachPiece(*run.blocks, run.first_element, run.num_elements, [&](int64_t at, int64_t n, int64_t block, bool) {
    const uint32_t largest = LargestBits<Number>(values + at, n);
    uint32_t seen = maxima[block].load(std::memory_order_relaxed);
    while (seen < largest && !maxima[block].compare_exchange_weak(seen, largest, std::memory_order_relaxed)) {
    }
  });
}

// The codes of a piece: code(number) of each.
template <class Number, class Value, class Code>
SHARDMESH_RULE void EncodePiece(const Value* values, int64_t n, const Code& code, uint8_t* codes) {
  constexpr int64_t kWidth = Lanes<Number>::kWidth;
  ForEachNumber<Number>(values, n, [&](int64_t i, Number x) {
    if (i + kWidth <= n) return Lanes<Number>::StoreBytes(code(x), codes + i);
    uint8_t rest[kWidth];
    Lanes<Number>::StoreBytes(code(x), rest);
    for (int64_t k = 0; k < kWidth && i + k < n; ++k) codes[i + k] = rest[k];
  });
}

// The scale of a block whose largest magnitude has these bits. Not of mx8.
SHARDMESH_RULE float GatheredScaleOf(GatherFormat gather, uint32_t largest) {
  if (largest >= kInfinityBits) return FloatOfBits(kNanBits);
  const float magnitude = FloatOfBits(largest);
  return gather == GatherFormat::kInt8Row ? Max(Divide(magnitude, kInt8Largest), kSmallestScale)
                                          : Float8Scale<E4M3>(magnitude);
}

template <class Number, class Value>
void EncodeGatheredAs(const GatheredRun& run, const std::atomic<uint32_t>* maxima, const GatheredPlace* places,
                      int count) {
  const auto* const values = static_cast<const Value*>(run.values);
  uint8_t* const codes = places[0].codes;
  ForEachPiece(*run.blocks, run.first_element, run.num_elements,
               [&](int64_t at, int64_t n, int64_t block, bool begins) {
                 const auto encode = [&](const auto& code) { EncodePiece<Number>(values + at, n, code, codes + at); };
                 if (run.gather == GatherFormat::kMx8) {
                   const uint32_t largest = LargestBits<Number>(values + at, n);
                   const auto mx = MxScaleCeil(FloatOfBits(largest));
                   const uint32_t scale = largest < kInfinityBits ? mx.code : 0xFFu;
                   for (int i = 0; i < count; ++i)
                     static_cast<uint8_t*>(places[i].scales)[block] = static_cast<uint8_t>(scale);
                   return encode([m = Number(mx.multiplier)](Number x) { return EncodeMinifloat<E4M3>(x * m); });
                 }
                 const float scale = GatheredScaleOf(run.gather, maxima[block].load(std::memory_order_relaxed));
                 for (int i = 0; begins && i < count; ++i) static_cast<float*>(places[i].scales)[block] = scale;
                 if (run.gather == GatherFormat::kInt8Row) {
                   encode([s = Number(scale)](Number x) { return EncodeInt8(Divide(x, s)); });
                 } else {
                   encode([s = Number(scale)](Number x) { return EncodeMinifloat<E4M3>(x * s); });
                 }
               });
  for (int i = 1; i < count; ++i) std::memcpy(places[i].codes, codes, static_cast<size_t>(run.num_elements));
}

template <class Number>
void RaiseMaximaOf(const GatheredRun& run, std::atomic<uint32_t>* maxima) {
  run.format == Format::kFp32 ? RaiseMaximaAs<Number, float>(run, maxima)
                              : RaiseMaximaAs<Number, uint16_t>(run, maxima);
}

template <class Number>
void EncodeGatheredOf(const GatheredRun& run, const std::atomic<uint32_t>* maxima, const GatheredPlace* places,
                      int count) {
  run.format == Format::kFp32 ? EncodeGatheredAs<Number, float>(run, maxima, places, count)
                              : EncodeGatheredAs<Number, uint16_t>(run, maxima, places, count);
}

}  // namespace shardmesh
