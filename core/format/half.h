// IEEE 754 binary16 ("half", F16 of safetensors) to and from float. Pure and thread-safe.
#pragma once

#include <cstdint>

#include "core/format/format.h"

namespace shardmesh {

// Exact; a NaN stays one, with its bits.
inline float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = half >> 10 & 31, fraction = half & 0x3FF;
  if (exponent == 31) return FloatOfBits(sign | 0x7F800000 | fraction << 13);
  if (exponent > 0) return FloatOfBits(sign | (exponent + 127 - 15) << 23 | fraction << 13);
  return FloatOfBits(sign | FloatBits(static_cast<float>(fraction) * 0x1p-24f));
}

// To nearest, ties to even; from 65520 on infinity. A NaN stays one.
inline uint16_t FloatToHalf(float x) {
  const uint32_t bits = FloatBits(x), magnitude = bits & 0x7FFFFFFF;
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const auto with_sign = [sign](uint32_t half) { return static_cast<uint16_t>(sign | half); };
  if (magnitude > 0x7F800000) return with_sign(0x7E00 | (magnitude >> 13 & 0x3FF));
  if (magnitude >= FloatBits(65520.0f)) return with_sign(0x7C00);
  if (magnitude < FloatBits(0x1p-14f)) {  // subnormal: floats from 0.5 on are multiples of 2^-24, too
    return with_sign(FloatBits(FloatOfBits(magnitude) + 0.5f) - FloatBits(0.5f));
  }
  return with_sign((magnitude - ((127 - 15) << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13);
}

}  // namespace shardmesh
