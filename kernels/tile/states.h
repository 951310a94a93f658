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

// How a block's numbers, divided by its scale, lie in memory: of first moments, which have a sign, and of second ones.
template <class Number, bool kSigned>
struct Dyn8 {
  using L = Lanes<Number>;
  static constexpr int64_t kBlock = 256;
  static constexpr float kLargest = 1;

  SHARDMESH_RULE static Number Load(const uint8_t* from) {
    if constexpr (kSigned) {
      return DecodeDynamicSigned<Number>(L::LoadBytes(from));
    } else {
      return DecodeDynamicUnsigned<Number>(L::LoadBytes(from));
    }
  }
  SHARDMESH_RULE static void Store4(const Number (&y)[4], uint8_t* to) {
    typename L::Word codes[4];
    for (int k = 0; k < 4; ++k) {
      if constexpr (kSigned) {
        codes[k] = EncodeDynamicSigned(y[k]);
      } else {
        codes[k] = EncodeDynamicUnsigned(y[k]);
      }
    }
    L::StoreBytes4(codes, to);
  }
};

template <class Number, bool kSigned, int64_t kElements, bool kWide>
struct Fp8 {
  using L = Lanes<Number>;
  using Mini = std::conditional_t<kWide && !kSigned, UE5M3, E4M3>;
  static constexpr int64_t kBlock = kElements;
  static constexpr float kLargest = Mini::kLargest;

  SHARDMESH_RULE static Number Load(const uint8_t* from) { return L::template LoadMinifloat<Mini>(from); }
  SHARDMESH_RULE static void Store4(const Number (&y)[4], uint8_t* to) {
    L::template StoreMinifloat4<Mini, !kSigned>(y, to);
  }
};

// The largest magnitude of `elements` numbers.
template <class Number>
SHARDMESH_RULE float LargestMagnitude(const float* from, int64_t elements) {
  using L = Lanes<Number>;
  Number largest(0.0f);
  for (int64_t i = 0; i < elements; i += L::kWidth) largest = Max(largest, Abs(L::Load(from + i)));
  return L::Largest(largest);
}

// The scale of a block whose largest magnitude is `largest`.
template <class Code>
SHARDMESH_RULE float BlockScale(float largest) {
  return Max(largest * (1.0f / Code::kLargest), kSmallestScale);
}

// The codes of one block under its scale.
template <class Number, class Code>
SHARDMESH_RULE void EncodeBlock(const float* from, float scale, uint8_t* to) {
  using L = Lanes<Number>;
  const Number inverse(1.0f / scale);
#pragma GCC unroll 2
  for (int64_t i = 0; i < Code::kBlock; i += 4 * L::kWidth) {
    Number y[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) y[k] = L::Load(from + i + k * L::kWidth) * inverse;
    Code::Store4(y, to + i);
  }
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
        L::Store(Code::Load(from.codes + i) * scale, to + i);
      }
    }
  }

  template <class Code>
  SHARDMESH_RULE static void EncodeBlocks(const float* from, const StoredTile& to) {
    for (int64_t block = 0; block < kTileElements; block += Code::kBlock) {
      const float scale = BlockScale<Code>(LargestMagnitude<Number>(from + block, Code::kBlock));
      reinterpret_cast<float*>(to.extra)[block / Code::kBlock] = scale;
      EncodeBlock<Number, Code>(from + block, scale, to.codes + block);
    }
  }

  static constexpr int64_t kDyn4Block = 128;

  // Even elements lie in the upper half of their byte.
  template <class Levels>
  static void DecodeDyn4(const ConstStoredTile& from, float* to) {
    alignas(32) uint8_t codes[kTileElements];
    for (int64_t i = 0; i < kTileElements / 2; ++i) {
      codes[2 * i] = from.codes[i] >> 4;
      codes[2 * i + 1] = from.codes[i] & 15;
    }
    for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
      const Number scale(reinterpret_cast<const float*>(from.extra)[i / kDyn4Block]);
      L::Store(DecodeFourBit<Levels, Number>(L::LoadBytes(codes + i)) * scale, to + i);
    }
  }

  template <class Levels>
  static void EncodeDyn4(const float* from, const StoredTile& to) {
    alignas(32) uint8_t codes[kTileElements];
    for (int64_t block = 0; block < kTileElements; block += kDyn4Block) {
      const float scale = Max(LargestMagnitude<Number>(from + block, kDyn4Block), kSmallestScale);
      reinterpret_cast<float*>(to.extra)[block / kDyn4Block] = scale;
      const Number inverse(1.0f / scale);
      for (int64_t i = block; i < block + kDyn4Block; i += 4 * L::kWidth) {
        Word words[4];
        for (int k = 0; k < 4; ++k) {
          words[k] = EncodeFourBit<Levels>(Min(Number(1.0f), L::Load(from + i + k * L::kWidth) * inverse));
        }
        L::StoreBytes4(words, codes + i);
      }
    }
    for (int64_t i = 0; i < kTileElements / 2; ++i) {
      to.codes[i] = static_cast<uint8_t>(codes[2 * i] << 4 | codes[2 * i + 1]);
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
