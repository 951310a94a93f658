// Format: how the elements of one stream (weights, gradients) are stored, and the rounding rules between fp32 and bf16.
// Values and pure functions, thread-safe.
//
//   name      bytes  stored as    rounded by
//   fp32      4      IEEE binary32  not at all
//   bf16      2      upper half of binary32  to nearest, ties to even
//   bf16_sr   2      upper half of binary32  stochastically: up with probability (dropped bits) / 2^16, so that the
//                                            expected value is exact and updates below half an ulp are not lost
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/host_device.h"

namespace shardmesh {

enum class Format { kFp32, kBf16, kBf16Sr };

// Every shard boundary, run and chunk is a multiple of this many elements: one group of random draws
// (core/base/philox.h).
constexpr int64_t kGroupElements = 64;

// "fp32", "bf16" or "bf16_sr"; "unknown" for a value outside the enumeration.
absl::string_view FormatName(Format format);

// The format of that exact name. kInvalidArgument: no such format; the message lists the known ones.
absl::StatusOr<Format> ParseFormat(absl::string_view name);

// Bytes of one stored element: 4 or 2.
constexpr int64_t BytesPerElement(Format format) { return format == Format::kFp32 ? 4 : 2; }

// The bits of a float, and back.
SHARDMESH_HOST_DEVICE inline uint32_t FloatBits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
SHARDMESH_HOST_DEVICE inline float FloatOfBits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

// The only NaN that a conversion to bf16 writes, whatever the sign and payload of its source: x86 and NVIDIA processors
// propagate payloads differently.
constexpr uint16_t kBf16Nan = 0x7FC0;

// The two roundings, once for every number type: float, or a SIMD vector that overloads FloatBits and IfNan. The result
// is the upper half of the returned bits; the lower half is to be cut.
SHARDMESH_RULE uint32_t IfNan(float x, uint32_t bits_if_nan, uint32_t bits) { return x != x ? bits_if_nan : bits; }

template <class Number>
SHARDMESH_RULE auto Bf16BitsRne(Number x) {
  const auto bits = FloatBits(x);
  using Bits = std::decay_t<decltype(bits)>;
  return IfNan(x, Bits(uint32_t{kBf16Nan} << 16), bits + Bits(0x7FFFu) + (ShiftRight<16>(bits) & Bits(1u)));
}

template <class Number, class Bits>
SHARDMESH_RULE Bits Bf16BitsSr(Number x, Bits draw) {
  return IfNan(x, Bits(uint32_t{kBf16Nan} << 16), FloatBits(x) + draw);
}

// Exact.
SHARDMESH_HOST_DEVICE inline float Bf16ToFloat(uint16_t x) { return FloatOfBits(static_cast<uint32_t>(x) << 16); }

// To nearest, ties to even; beyond the largest finite bf16 by half an ulp or more: infinity.
SHARDMESH_HOST_DEVICE inline uint16_t FloatToBf16Rne(float x) { return static_cast<uint16_t>(Bf16BitsRne(x) >> 16); }

// Stochastic: adds the draw, uniform in [0, 65536), below the kept bits and cuts. REQUIRES: draw < 65536.
// What bf16 holds exactly, infinities included, stays as it is for every draw; a finite value rounds to infinity only
// from beyond the largest finite bf16.
SHARDMESH_HOST_DEVICE inline uint16_t FloatToBf16Sr(float x, uint32_t draw) {
  return static_cast<uint16_t>(Bf16BitsSr(x, draw) >> 16);
}

}  // namespace shardmesh
