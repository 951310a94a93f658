// Optimizer states of one tile between their stored form and fp32, for every number type (core/numeric_formats.h).
//
// A block's scale is its largest magnitude over the largest level, at least 2^-100 (so that its reciprocal is finite
// and a block of zeros stays one); a value is multiplied by the scale's reciprocal and becomes the nearest level.
// Second moments keep a code of 1 or more where they are above 0: a code of 0 beside a first moment that is not would
// make the next update hundreds of times too large.
#pragma once

#include "kernels/rules/dynamic_map.h"
#include "kernels/rules/four_bit.h"
#include "kernels/rules/minifloat.h"
#include "kernels/tile/weights.h"

namespace shardmesh {

inline constexpr float kSmallestScale = PowerOfTwo(-100);

// Of first and of second moments.
template <class Number, bool kSigned>
struct Dyn8 {
  using Word = typename Lanes<Number>::Word;
  static constexpr int64_t kBlock = 256;
  static constexpr float kLargest = 1;
  SHARDMESH_RULE static Word Encode(Number y) {
    if constexpr (kSigned) {
      return EncodeDynamicSigned(y);
    } else {
      return EncodeDynamicUnsigned</*kGuard=*/true>(y);
    }
  }
  SHARDMESH_RULE static Number Decode(Word code) {
    if constexpr (kSigned) {
      return DecodeDynamicSigned<Number>(code);
    } else {
      return DecodeDynamicUnsigned<Number>(code);
    }
  }
};

template <class Number, bool kSigned, int64_t kElements, bool kWide>
struct Fp8 {
  using Word = typename Lanes<Number>::Word;
  using Mini = std::conditional_t<kWide && !kSigned, UE5M3, E4M3>;
  static constexpr int64_t kBlock = kElements;
  static constexpr float kLargest = Mini::kLargest;
  SHARDMESH_RULE static Word Encode(Number y) {
    const Word code = EncodeMinifloat<Mini>(y);
    if constexpr (kSigned) {
      return code;
    } else {
      const Word guarded = Select(IntToFloat(code) < Number(1.0f), Word(1u), code);
      return Select(Number(0.0f) < y, guarded, code);
    }
  }
  SHARDMESH_RULE static Number Decode(Word code) { return DecodeMinifloat<Mini, Number>(code); }
};

// The largest magnitude of `elements` numbers.
template <class Number>
SHARDMESH_RULE float LargestMagnitude(const float* from, int64_t elements) {
  using L = Lanes<Number>;
  Number largest(0.0f);
  for (int64_t i = 0; i < elements; i += L::kWidth) largest = Max(largest, Abs(L::Load(from + i)));
  return L::Largest(largest);
}

template <class Number>
struct StateCodec {
  using L = Lanes<Number>;
  using Word = typename L::Word;

  template <class Code>
  SHARDMESH_RULE static void DecodeBlocks(const ConstStoredTile& from, float* to) {
    for (int64_t block = 0; block < kTileElements; block += Code::kBlock) {
      const Number scale(reinterpret_cast<const float*>(from.extra)[block / Code::kBlock]);
      for (int64_t i = block; i < block + Code::kBlock; i += L::kWidth) {
        L::Store(Code::Decode(L::LoadBytes(from.codes + i)) * scale, to + i);
      }
    }
  }

  template <class Code>
  SHARDMESH_RULE static void EncodeBlocks(const float* from, const StoredTile& to) {
    for (int64_t block = 0; block < kTileElements; block += Code::kBlock) {
      const float scale =
          Max(LargestMagnitude<Number>(from + block, Code::kBlock) * (1.0f / Code::kLargest), kSmallestScale);
      reinterpret_cast<float*>(to.extra)[block / Code::kBlock] = scale;
      const Number inverse(1.0f / scale);
      const Number largest(Code::kLargest), smallest(-Code::kLargest);
      for (int64_t i = block; i < block + Code::kBlock; i += L::kWidth) {
        // Rounding may lead a little beyond the largest; a NaN becomes it.
        const Number y = Max(smallest, Min(largest, L::Load(from + i) * inverse));
        L::StoreBytes(Code::Encode(y), to.codes + i);
      }
    }
  }

  template <class Levels>
  SHARDMESH_RULE static void DecodeDyn4(const ConstStoredTile& from, float* to) {
    constexpr int64_t kBlock = 128;
    // A byte at a time is read for each of its two elements: even ones lie in the upper half.
    for (int64_t i = 0; i < kTileElements; ++i) {
      const uint32_t byte = from.codes[i / 2];
      to[i] = DecodeFourBit<Levels, float>(i % 2 == 0 ? byte >> 4 : byte & 15u) *
              reinterpret_cast<const float*>(from.extra)[i / kBlock];
    }
  }

  template <class Levels>
  SHARDMESH_RULE static void EncodeDyn4(const float* from, const StoredTile& to) {
    constexpr int64_t kBlock = 128;
    alignas(32) uint8_t codes[kTileElements];
    for (int64_t block = 0; block < kTileElements; block += kBlock) {
      const float scale = Max(LargestMagnitude<Number>(from + block, kBlock), kSmallestScale);
      reinterpret_cast<float*>(to.extra)[block / kBlock] = scale;
      const Number inverse(1.0f / scale);
      for (int64_t i = block; i < block + kBlock; i += L::kWidth) {
        L::StoreBytes(EncodeFourBit<Levels>(Min(Number(1.0f), L::Load(from + i) * inverse)), codes + i);
      }
    }
    for (int64_t i = 0; i < kTileElements; i += 2) {
      to.codes[i / 2] = static_cast<uint8_t>(codes[i] << 4 | codes[i + 1]);
    }
  }

  template <bool kSigned>
  static void Decode(StateFormat format, const ConstStoredTile& from, float* to) {
    switch (format) {
      case StateFormat::kFp32:
        for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
          L::Store(L::Load(reinterpret_cast<const float*>(from.codes) + i), to + i);
        }
        return;
      case StateFormat::kBf16Sr:
        for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
          L::Store(L::LoadBf16(reinterpret_cast<const uint16_t*>(from.codes) + i), to + i);
        }
        return;
      case StateFormat::kDyn8:
        return DecodeBlocks<Dyn8<Number, kSigned>>(from, to);
      case StateFormat::kDyn4:
        return DecodeDyn4<std::conditional_t<kSigned, Dyn4Signed, Dyn4Unsigned>>(from, to);
      case StateFormat::kFp8:
        return DecodeBlocks<Fp8<Number, kSigned, 256, false>>(from, to);
      case StateFormat::kFp8x32:
        return DecodeBlocks<Fp8<Number, kSigned, 32, true>>(from, to);
    }
  }

  // `draws`: read for bf16_sr alone.
  template <bool kSigned>
  static void Encode(StateFormat format, const float* from, const TileDraws& draws, const StoredTile& to) {
    switch (format) {
      case StateFormat::kFp32:
        for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
          L::Store(L::Load(from + i), reinterpret_cast<float*>(to.codes) + i);
        }
        return;
      case StateFormat::kBf16Sr:
        for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
          const Word bits = Bf16BitsSr(L::Load(from + i), DrawsAt<Number>(draws, i));
          L::StoreHalves(ShiftRight<16>(bits), reinterpret_cast<uint16_t*>(to.codes) + i);
        }
        return;
      case StateFormat::kDyn8:
        return EncodeBlocks<Dyn8<Number, kSigned>>(from, to);
      case StateFormat::kDyn4:
        return EncodeDyn4<std::conditional_t<kSigned, Dyn4Signed, Dyn4Unsigned>>(from, to);
      case StateFormat::kFp8:
        return EncodeBlocks<Fp8<Number, kSigned, 256, false>>(from, to);
      case StateFormat::kFp8x32:
        return EncodeBlocks<Fp8<Number, kSigned, 32, true>>(from, to);
    }
  }
};

}  // namespace shardmesh
