// Lanes<Number>: how a number type goes between memory and registers. Loops over a tile step by kWidth elements; a
// tile's length is a multiple of every width. The scalar one is here, the vector one in kernels/tile/simd8_lanes.h.
// Functions with a 4 take four numbers of elements in a row. Memory needs the alignment of its elements only. Pure
// functions, thread-safe.
#pragma once

#include <cstdint>

#include "kernels/rules/number.h"

namespace shardmesh {

template <class Number>
struct Lanes;

template <>
struct Lanes<float> {
  using Word = uint32_t;
  static constexpr int kWidth = 1;
  static constexpr bool kHasMinifloats = false;  // no way of its own for kernels/rules/minifloat.h
  template <class Mini>
  static constexpr float kMinifloatRaw = 1;

  SHARDMESH_RULE static float Load(const float* from) { return *from; }
  SHARDMESH_RULE static void Store(float x, float* to) { *to = x; }
  SHARDMESH_RULE static float LoadBf16(const uint16_t* from) { return Bf16ToFloat(*from); }

  // Zero-extended.
  SHARDMESH_RULE static uint32_t LoadBytes(const uint8_t* from) { return *from; }
  SHARDMESH_RULE static uint32_t LoadHalves(const uint16_t* from) { return *from; }
  SHARDMESH_RULE static uint32_t LoadWords(const uint32_t* from) { return *from; }

  // The low byte, or the low half.
  SHARDMESH_RULE static void StoreBytes(uint32_t x, uint8_t* to) { *to = static_cast<uint8_t>(x); }
  SHARDMESH_RULE static void StoreHalves(uint32_t x, uint16_t* to) { *to = static_cast<uint16_t>(x); }

  SHARDMESH_RULE static float Largest(float x) { return x; }

  // Asks for a cache line that will be read soon.
  SHARDMESH_RULE static void Prefetch(const void*) {}

  // Four bits each, two in a byte, the even element in the upper half: elements [i, i + width), and [i, i + 4 width).
  SHARDMESH_RULE static uint32_t LoadNibbles(const uint8_t* from, int64_t i) {
    return i % 2 == 0 ? from[i / 2] >> 4 : from[i / 2] & 15;
  }
  SHARDMESH_RULE static void StoreNibbles4(const uint32_t (&x)[4], uint8_t* to, int64_t i) {
    for (int k = 0; k < 4; k += 2) to[(i + k) / 2] = static_cast<uint8_t>(x[k] << 4 | x[k + 1]);
  }

  // 0 for negative ones. REQUIRES: below 256.
  SHARDMESH_RULE static void StoreBytes4(const uint32_t (&x)[4], uint8_t* to) {
    for (int k = 0; k < 4; ++k) to[k] = static_cast<uint8_t>(MaxInt(x[k], 0));
  }
};

}  // namespace shardmesh
