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

template <class Value>
void EncodeMx8(const Value* values, int64_t num, uint8_t* codes, uint8_t* scale) {
  const uint32_t largest = LargestBits(values, num);
  const auto mx = MxScaleCeil(FloatOfBits(largest));
  const bool finite = largest < kInfinity;
  *scale = finite ? static_cast<uint8_t>(mx.code) : uint8_t{0xFF};
  const float multiplier = finite ? mx.multiplier : 0;
  EncodePiece(
      values, num, [=](float x) { return EncodeMinifloat<E4M3>(x * multiplier); }, codes);
}

template <class Value>
void EncodeAs(const GatheredRun& run, const std::atomic<uint32_t>* maxima, uint8_t* codes, void* scales) {
  const auto* values = static_cast<const Value*>(run.values);
  ForEachPiece(
      *run.blocks, run.first_element, run.num_elements, [&](int64_t at, int64_t num, int64_t block, bool begins) {
        if (run.gather == GatherFormat::kMx8) {
          return EncodeMx8(values + at, num, codes + at, static_cast<uint8_t*>(scales) + block);
        }
        const bool is_int8 = run.gather == GatherFormat::kInt8Row;
        const uint32_t bits = maxima[block].load(std::memory_order_relaxed);
        const float largest = FloatOfBits(bits);
        float scale = is_int8 ? Max(Divide(largest, kInt8Largest), kSmallestScale) : Float8Scale<E4M3>(largest);
        if (bits >= kInfinity) scale = FloatOfBits(0x7FC00000u);
        if (begins) static_cast<float*>(scales)[block] = scale;
        if (is_int8) {
          EncodePiece(
              values + at, num, [=](float x) { return EncodeInt8(Divide(x, scale)); }, codes + at);
        } else {
          EncodePiece(
              values + at, num, [=](float x) { return EncodeMinifloat<E4M3>(x * scale); }, codes + at);
        }
      });
}

}  // namespace

void RaiseMaxima(const GatheredRun& run, std::atomic<uint32_t>* maxima) {
  if (run.gather == GatherFormat::kMx8) return;
  run.format == Format::kFp32 ? RaiseMaximaOf<float>(run, maxima) : RaiseMaximaOf<uint16_t>(run, maxima);
}

// Not inlined: kernels/fp_environment.h.
__attribute__((noinline)) static void EncodeInEnvironment(const GatheredRun& run, const std::atomic<uint32_t>* maxima,
                                                          uint8_t* codes, void* scales) {
  run.format == Format::kFp32 ? EncodeAs<float>(run, maxima, codes, scales)
                              : EncodeAs<uint16_t>(run, maxima, codes, scales);
}

void EncodeGathered(const GatheredRun& run, const std::atomic<uint32_t>* maxima, uint8_t* codes, void* scales) {
  const ScopedFpEnvironment environment;
  EncodeInEnvironment(run, maxima, codes, scales);
}

}  // namespace shardmesh
