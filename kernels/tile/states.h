// Optimizer states between their stored form and fp32, for every number type (core/numeric_formats.h).
//
// A block's scale is its largest magnitude over the largest level, at least 2^-100 (so that its reciprocal is finite
// and a block of zeros stays one); of blocks of 32 it is rounded up to bf16. A value is multiplied by the reciprocal of
// the scale as it is stored and becomes the nearest level. Second moments keep a code of 1 or more where they are above
// 0: a code of 0 beside a first moment that is not would make the next update hundreds of times too large.
#pragma once

#include "kernels/rules/dynamic_map.h"
#include "kernels/rules/four_bit.h"
#include "kernels/rules/minifloat.h"
#include "kernels/tile/weights.h"

namespace shardmesh {

inline constexpr float kSmallestScale = PowerOfTwo(-100);

// The codes of blocks: what a number, divided by its block's scale, becomes. kSigned: first moments; else second ones.
template <class Number, bool kSigned>
struct Dyn8 {
  using L = Lanes<Number>;
  using Word = typename L::Word;
  static constexpr int64_t kBlock = 256;
  static constexpr float kLargest = 1;

  SHARDMESH_RULE static Word Encode(Number y) { return MaxInt(Word(0u), Code(y)); }
  SHARDMESH_RULE static Number Load(const uint8_t* from) {
    if constexpr (kSigned) return DecodeDynamicSigned<Number>(L::LoadBytes(from));
    if constexpr (!kSigned) return DecodeDynamicUnsigned<Number>(L::LoadBytes(from));
  }
  SHARDMESH_RULE static void Store4(const Number (&y)[4], uint8_t* to) {
    const Word codes[4] = {Code(y[0]), Code(y[1]), Code(y[2]), Code(y[3])};
    L::StoreBytes4(codes, to);
  }

 private:
  // -1 stands for 0.
  SHARDMESH_RULE static Word Code(Number y) {
    if constexpr (kSigned) return EncodeDynamicSigned(y);
    if constexpr (!kSigned) return EncodeDynamicUnsigned(y);
  }
};

template <class Number, bool kSigned, int64_t kElements, bool kWide>
struct Fp8 {
  using L = Lanes<Number>;
  using Word = typename L::Word;
  using Mini = std::conditional_t<kWide && !kSigned, UE5M3, E4M3>;
  static constexpr int64_t kBlock = kElements;
  static constexpr float kLargest = Mini::kLargest;

  SHARDMESH_RULE static Word Encode(Number y) {
    const Word code = EncodeMinifloat<Mini>(y);
    if constexpr (kSigned) return code;
    const Number least = Select(Number(0.0f) < y, Number(1.0f), Number(0.0f));
    return Select(IntToFloat(code) < least, Word(1u), code);
  }
  SHARDMESH_RULE static Number Load(const uint8_t* from) {
    if constexpr (L::kHasMinifloats) return L::template LoadMinifloat<Mini>(from);
    if constexpr (!L::kHasMinifloats) return DecodeMinifloat<Mini, Number>(L::LoadBytes(from));
  }
  SHARDMESH_RULE static void Store4(const Number (&y)[4], uint8_t* to) {
    if constexpr (L::kHasMinifloats) {
      L::template StoreMinifloat4<Mini, !kSigned>(y, to);
    } else {
      const Word codes[4] = {Encode(y[0]), Encode(y[1]), Encode(y[2]), Encode(y[3])};
      L::StoreBytes4(codes, to);
    }
  }
};

// Codes are four bits: they go through an array of bytes, two of which lie in one byte of storage.
template <class Number, bool kSigned>
struct Dyn4 {
  using L = Lanes<Number>;
  using Word = typename L::Word;
  using Levels = std::conditional_t<kSigned, Dyn4Signed, Dyn4Unsigned>;
  static constexpr int64_t kBlock = 128;
  static constexpr float kLargest = 1;

  SHARDMESH_RULE static Word Encode(Number y) { return EncodeFourBit<Levels>(Min(Number(1.0f), y)); }
  SHARDMESH_RULE static Number Load(const uint8_t* from) { return DecodeFourBit<Levels, Number>(L::LoadBytes(from)); }
  SHARDMESH_RULE static void Store4(const Number (&y)[4], uint8_t* to) {
    const Word codes[4] = {Encode(y[0]), Encode(y[1]), Encode(y[2]), Encode(y[3])};
    L::StoreBytes4(codes, to);
  }
};

// Calls visit(code, ...) with an object of the code's type; nothing for fp32 and bf16_sr, which have no blocks.
template <class Number, bool kSigned, class Visit>
SHARDMESH_RULE void WithCode(StateFormat format, const Visit& visit) {
  switch (format) {
    case StateFormat::kFp32:
    case StateFormat::kBf16Sr:
      return;
    case StateFormat::kDyn8:
      return visit(Dyn8<Number, kSigned>());
    case StateFormat::kDyn4:
      return visit(Dyn4<Number, kSigned>());
    case StateFormat::kFp8:
      return visit(Fp8<Number, kSigned, 256, false>());
    case StateFormat::kFp8x32:
      return visit(Fp8<Number, kSigned, 32, true>());
  }
}

// The largest magnitude of `elements` numbers.
template <class Number>
SHARDMESH_RULE float LargestMagnitude(const float* from, int64_t elements) {
  using L = Lanes<Number>;
  Number largest(0.0f);
  for (int64_t i = 0; i < elements; i += L::kWidth) largest = Max(largest, Abs(L::Load(from + i)));
  return L::Largest(largest);
}

// Blocks this short have scales of two bytes.
template <class Code>
inline constexpr bool kShortScales = Code::kBlock == 32;

// The scale of a block whose largest magnitude is `largest`.
template <class Code>
SHARDMESH_RULE float BlockScale(float largest) {
  const float scale = Max(largest * (1.0f / Code::kLargest), kSmallestScale);
  if constexpr (!kShortScales<Code>) return scale;
  const float up = FloatOfBits((FloatBits(scale) + 0xFFFFu) & 0xFFFF0000u);
  return scale < FloatOfBits(0x7F7F0000u) ? up : FloatOfBits(0x7F7F0000u);  // the largest that is finite
}

template <class Code>
SHARDMESH_RULE float LoadScale(const uint8_t* scales, int64_t block) {
  if constexpr (kShortScales<Code>) return Bf16ToFloat(reinterpret_cast<const uint16_t*>(scales)[block]);
  if constexpr (!kShortScales<Code>) return reinterpret_cast<const float*>(scales)[block];
}

template <class Code>
SHARDMESH_RULE void StoreScale(float scale, uint8_t* scales, int64_t block) {
  if constexpr (kShortScales<Code>) {
    reinterpret_cast<uint16_t*>(scales)[block] = static_cast<uint16_t>(FloatBits(scale) >> 16);
  } else {
    reinterpret_cast<float*>(scales)[block] = scale;
  }
}

// The codes of one block whose numbers are multiplied by `factor` first.
template <class Number, class Code>
SHARDMESH_RULE void EncodeTimes(const float* from, float factor, uint8_t* to) {
  using L = Lanes<Number>;
  const Number times(factor);
  SHARDMESH_UNROLL(2)
  for (int64_t i = 0; i < Code::kBlock; i += 4 * L::kWidth) {
    Number y[4];
    SHARDMESH_UNROLL(4)
    for (int k = 0; k < 4; ++k) y[k] = L::Load(from + i + k * L::kWidth) * times;
    Code::Store4(y, to + i);
  }
}

// Under its scale.
template <class Number, class Code>
SHARDMESH_RULE void EncodeBlock(const float* from, float scale, uint8_t* to) {
  EncodeTimes<Number, Code>(from, 1.0f / scale, to);
}

// A tile.
template <class Number, bool kSigned>
void DecodeStates(StateFormat format, const ConstStoredTile& from, float* to) {
  using L = Lanes<Number>;
  if (format == StateFormat::kFp32) return DecodeWeights<Number>(WeightFormat::kFp32, from, to);
  if (format == StateFormat::kBf16Sr) return DecodeWeights<Number>(WeightFormat::kBf16, from, to);
  WithCode<Number, kSigned>(format, [&](auto code) {
    using Code = decltype(code);
    alignas(32) uint8_t nibbles[kTileElements];
    const uint8_t* codes = from.codes;
    if constexpr (std::is_same_v<Code, Dyn4<Number, kSigned>>) {
      for (int64_t i = 0; i < kTileElements / 2; ++i) {
        nibbles[2 * i] = from.codes[i] >> 4;  // even elements lie in the upper half of their byte
        nibbles[2 * i + 1] = from.codes[i] & 15;
      }
      codes = nibbles;
    }
    for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
      const Number scale(LoadScale<Code>(from.extra, i / Code::kBlock));
      L::Store(Code::Load(codes + i) * scale, to + i);
    }
  });
}

// `draws`: read for bf16_sr alone.
template <class Number, bool kSigned>
void EncodeStates(StateFormat format, const float* from, const TileDraws& draws, const StoredTile& to) {
  if (format == StateFormat::kFp32) return EncodeWeights<Number>(WeightFormat::kFp32, from, draws, to);
  if (format == StateFormat::kBf16Sr) return EncodeWeights<Number>(WeightFormat::kBf16Sr, from, draws, to);
  WithCode<Number, kSigned>(format, [&](auto code) {
    using Code = decltype(code);
    constexpr bool kNibbles = std::is_same_v<Code, Dyn4<Number, kSigned>>;
    alignas(32) uint8_t nibbles[kTileElements];
    uint8_t* codes = kNibbles ? nibbles : to.codes;
    for (int64_t block = 0; block < kTileElements; block += Code::kBlock) {
      const float scale = BlockScale<Code>(LargestMagnitude<Number>(from + block, Code::kBlock));
      StoreScale<Code>(scale, to.extra, block / Code::kBlock);
      EncodeBlock<Number, Code>(from + block, scale, codes + block);
    }
    for (int64_t i = 0; kNibbles && i < kTileElements / 2; ++i) {
      to.codes[i] = static_cast<uint8_t>(nibbles[2 * i] << 4 | nibbles[2 * i + 1]);
    }
  });
}

}  // namespace shardmesh
