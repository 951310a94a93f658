#include "kernels/gathered.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/fp_environment.h"
#include "kernels/rules/block_scales.h"
#include "kernels/rules/int8.h"
#include "kernels/tile/states.h"

namespace shardmesh {
namespace {

constexpr uint32_t kInfinity = 0x7F800000u, kMagnitude = 0x7FFFFFFFu;

// The bits of a value as fp32.
uint32_t BitsAt(const float* values, int64_t i) { return FloatBits(values[i]); }
uint32_t BitsAt(const uint16_t* values, int64_t i) { return uint32_t{values[i]} << 16; }

template <class Value>
uint32_t LargestBits(const Value* values, int64_t num) {
  int32_t largest = 0;  // magnitudes have no sign bit: they order alike, and signed ones have instructions
  for (int64_t i = 0; i < num; ++i) largest = std::max(largest, static_cast<int32_t>(BitsAt(values, i) & kMagnitude));
  return static_cast<uint32_t>(largest);
}

template <class Value>
void RaiseMaximaOf(const GatheredRun& run, std::atomic<uint32_t>* maxima) {
  const auto* values = static_cast<const Value*>(run.values);
  ForEachPiece(*run.blocks, run.first_element, run.num_elements, [&](int64_t at, int64_t num, int64_t block, bool) {
    const uint32_t largest = LargestBits(values + at, num);
    uint32_t seen = maxima[block].load(std::memory_order_relaxed);
    while (seen < largest && !maxima[block].compare_exchange_weak(seen, largest, std::memory_order_relaxed)) {
    }
  });
}

// One piece, with the scale that its block has.
template <class Value, class Code>
void EncodePiece(const Value* values, int64_t num, const Code& code, uint8_t* codes) {
  for (int64_t i = 0; i < num; ++i) codes[i] = static_cast<uint8_t>(code(FloatOfBits(BitsAt(values, i))));
}

// The scale of a block whose largest magnitude has these bits. Not of mx8.
float ScaleOf(GatherFormat gather, uint32_t largest) {
  if (largest >= kInfinity) return FloatOfBits(0x7FC00000u);
  const float magnitude = FloatOfBits(largest);
  return gather == GatherFormat::kInt8Row ? Max(Divide(magnitude, kInt8Largest), kSmallestScale)
                                          : Float8Scale<E4M3>(magnitude);
}

template <class Value>
void EncodeAs(const GatheredRun& run, const std::atomic<uint32_t>* maxima, const GatheredPlace* places, int count) {
  const auto* const values = static_cast<const Value*>(run.values);
  uint8_t* const codes = places[0].codes;
  ForEachPiece(*run.blocks, run.first_element, run.num_elements,
               [&](int64_t at, int64_t n, int64_t block, bool begins) {
                 if (run.gather == GatherFormat::kMx8) {
                   const uint32_t largest = LargestBits(values + at, n);
                   const auto mx = MxScaleCeil(FloatOfBits(largest));
                   const uint32_t scale = largest < kInfinity ? mx.code : 0xFFu;
                   for (int i = 0; i < count; ++i)
                     static_cast<uint8_t*>(places[i].scales)[block] = static_cast<uint8_t>(scale);
                   EncodePiece(
                       values + at, n, [&](float x) { return EncodeMinifloat<E4M3>(x * mx.multiplier); }, codes + at);
                   return;
                 }
                 const float scale = ScaleOf(run.gather, maxima[block].load(std::memory_order_relaxed));
                 for (int i = 0; begins && i < count; ++i) static_cast<float*>(places[i].scales)[block] = scale;
                 if (run.gather == GatherFormat::kInt8Row) {
                   EncodePiece(
                       values + at, n, [=](float x) { return EncodeInt8(Divide(x, scale)); }, codes + at);
                 } else {
                   EncodePiece(
                       values + at, n, [=](float x) { return EncodeMinifloat<E4M3>(x * scale); }, codes + at);
                 }
               });
  for (int i = 1; i < count; ++i) std::memcpy(places[i].codes, codes, static_cast<size_t>(run.num_elements));
}

}  // namespace

void RaiseMaxima(const GatheredRun& run, std::atomic<uint32_t>* maxima) {
  if (run.gather == GatherFormat::kMx8) return;
  run.format == Format::kFp32 ? RaiseMaximaOf<float>(run, maxima) : RaiseMaximaOf<uint16_t>(run, maxima);
}

// Not inlined: kernels/fp_environment.h.
__attribute__((noinline)) static void EncodeInEnvironment(const GatheredRun& run, const std::atomic<uint32_t>* maxima,
                                                          const GatheredPlace* places, int count) {
  run.format == Format::kFp32 ? EncodeAs<float>(run, maxima, places, count)
                              : EncodeAs<uint16_t>(run, maxima, places, count);
}

void EncodeGathered(const GatheredRun& run, const std::atomic<uint32_t>* maxima, const GatheredPlace* places,
                    int count) {
  const ScopedFpEnvironment environment;
  EncodeInEnvironment(run, maxima, places, count);
}

}  // namespace shardmesh
