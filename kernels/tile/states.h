// Optimizer states between their stored form and fp32, for every number type (core/format/numeric_formats.h).
//
// A block's scale is its largest magnitude over the largest level, at least 2^-100 (so that its reciprocal is finite
// and a block of zeros stays one); of blocks of 32 it is rounded up to a power of two. A value is multiplied by the
// reciprocal of the scale and becomes the nearest level. Second moments keep a code of 1 or more where they are above
// 0: a code of 0 beside a first moment that is not would make the next update hundreds of times too large.
//
// Second moments of fp8x32 are rounded stochastically, for they move by less than half a level a step: element i of the
// group of 64 takes the draw of the weight of element i ^ 32 (each of the two is uniform, and no element's weight and
// second moment share one). Powers of two as scales keep what does not change exactly as it is.
#pragma once

#include "kernels/rules/dynamic_map.h"
#include "kernels/rules/four_bit.h"
#include "kernels/rules/minifloat.h"
#include "kernels/tile/weights.h"

namespace shardmesh {

inline constexpr float kSmallestScale = PowerOfTwo(-100);

// The codes of blocks: what a number, divided by its block's scale, becomes. kSigned: first moments; else second ones.
//   Encode(y, draw), Decode(code)  of one element
//   LoadRaw(codes, i)              elements [i, i + width) of a stream of codes, over kRaw
//   Store4(y, draws, codes, i)     elements [i, i + 4 width)
//   kStochastic                    whether draws are read, uniform in [0, 65536)
template <class Number, bool kSigned>
struct Dyn8 {
  using L = Lanes<Number>;
  using Word = typename L::Word;
  static constexpr int64_t kBlock = 256;
  static constexpr float kLargest = 1, kRaw = 1;
  static constexpr bool kStochastic = false;

  SHARDMESH_RULE static Word Encode(Number y, Word) { return MaxInt(Word(0u), Code(y)); }
  SHARDMESH_RULE static Number Decode(Word code) {
    if constexpr (kSigned) return DecodeDynamicSigned<Number>(code);
    if constexpr (!kSigned) return DecodeDynamicUnsigned<Number>(code);
  }
  SHARDMESH_RULE static Number LoadRaw(const uint8_t* codes, int64_t i) { return Decode(L::LoadBytes(codes + i)); }
  SHARDMESH_RULE static void Store4(const Number (&y)[4], const Word (&)[4], uint8_t* codes, int64_t i) {
    const Word words[4] = {Code(y[0]), Code(y[1]), Code(y[2]), Code(y[3])};
    L::StoreBytes4(words, codes + i);
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
  static constexpr float kRaw = L::template kMinifloatRaw<Mini>;
  static constexpr bool kStochastic = kWide && !kSigned;

  SHARDMESH_RULE static Word Encode(Number y, Word draw) {
    const Word code = Round(y, draw);
    if constexpr (kSigned) return code;
    const Number least = Select(Number(0.0f) < y, Number(1.0f), Number(0.0f));
    return Select(IntToFloat(code) < least, Word(1u), code);
  }
  // Second moments have no sign, whatever their codes have.
  SHARDMESH_RULE static Number Decode(Word code) {
    return DecodeMinifloat<Mini, Number>(Mini::kSigned && !kSigned ? code & Word(0x7Fu) : code);
  }
  SHARDMESH_RULE static Number LoadRaw(const uint8_t* codes, int64_t i) {
    if constexpr (L::kHasMinifloats) return L::template LoadMinifloat<Mini, kSigned>(codes + i);
    if constexpr (!L::kHasMinifloats) return Decode(L::LoadBytes(codes + i));
  }
  SHARDMESH_RULE static void Store4(const Number (&y)[4], const Word (&draws)[4], uint8_t* codes, int64_t i) {
    if constexpr (L::kHasMinifloats && kStochastic) {
      L::template StoreMinifloatSr4<Mini>(y, draws, codes + i);
    } else if constexpr (L::kHasMinifloats) {
      L::template StoreMinifloat4<Mini, !kSigned>(y, codes + i);
    } else {
      const Word words[4] = {Encode(y[0], draws[0]), Encode(y[1], draws[1]), Encode(y[2], draws[2]),
                             Encode(y[3], draws[3])};
      L::StoreBytes4(words, codes + i);
    }
  }

 private:
  SHARDMESH_RULE static Word Round(Number y, Word draw) {
    if constexpr (kStochastic) return EncodeMinifloatSr<Mini>(y, draw);
    if constexpr (!kStochastic) return EncodeMinifloat<Mini>(y);
  }
};

// Two codes lie in a byte.
template <class Number, bool kSigned>
struct Dyn4 {
  using L = Lanes<Number>;
  using Word = typename L::Word;
  using Levels = std::conditional_t<kSigned, Dyn4Signed, Dyn4Unsigned>;
  static constexpr int64_t kBlock = 128;
  static constexpr float kLargest = 1, kRaw = 1;
  static constexpr bool kStochastic = false;

  SHARDMESH_RULE static Word Encode(Number y, Word) { return EncodeFourBit<Levels>(y); }
  SHARDMESH_RULE static Number Decode(Word code) { return DecodeFourBit<Levels, Number>(code); }
  SHARDMESH_RULE static Number LoadRaw(const uint8_t* codes, int64_t i) { return Decode(L::LoadNibbles(codes, i)); }
  SHARDMESH_RULE static void Store4(const Number (&y)[4], const Word (&draws)[4], uint8_t* codes, int64_t i) {
    const Word words[4] = {Encode(y[0], draws[0]), Encode(y[1], draws[1]), Encode(y[2], draws[2]),
                           Encode(y[3], draws[3])};
    L::StoreNibbles4(words, codes, i);
  }
};

// The code of a format's blocks.
template <class Number, StateFormat kFormat, bool kSigned>
struct StateCode;
template <class Number, bool kSigned>
struct StateCode<Number, StateFormat::kDyn8, kSigned> {
  using Type = Dyn8<Number, kSigned>;
};
template <class Number, bool kSigned>
struct StateCode<Number, StateFormat::kDyn4, kSigned> {
  using Type = Dyn4<Number, kSigned>;
};
template <class Number, bool kSigned>
struct StateCode<Number, StateFormat::kFp8, kSigned> {
  using Type = Fp8<Number, kSigned, 256, false>;
};
template <class Number, bool kSigned>
struct StateCode<Number, StateFormat::kFp8x32, kSigned> {
  using Type = Fp8<Number, kSigned, 32, true>;
};

// Calls visit(code) with an object of the code's type; nothing for fp32 and bf16_sr, which have no blocks.
template <class Number, bool kSigned, class Visit>
SHARDMESH_RULE void WithCode(StateFormat format, const Visit& visit) {
  switch (format) {
    case StateFormat::kFp32:
    case StateFormat::kBf16Sr:
      return;
    case StateFormat::kDyn8:
      return visit(typename StateCode<Number, StateFormat::kDyn8, kSigned>::Type());
    case StateFormat::kDyn4:
      return visit(typename StateCode<Number, StateFormat::kDyn4, kSigned>::Type());
    case StateFormat::kFp8:
      return visit(typename StateCode<Number, StateFormat::kFp8, kSigned>::Type());
    case StateFormat::kFp8x32:
      return visit(typename StateCode<Number, StateFormat::kFp8x32, kSigned>::Type());
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

// The bits of the largest scale with which every code stands for a finite number: FLT_MAX over the largest level.
template <class Code>
inline constexpr uint32_t kMostScaleBits = Code::kLargest == 1 ? 0x7F7FFFFFu : 0x7B124924u;

// The smallest power of two that brings `largest` to the largest level or below; finite, although that may not be.
template <class Code, class Number>
SHARDMESH_RULE Number PowerScale(Number largest) {
  using Word = std::decay_t<decltype(FloatBits(largest))>;
  constexpr uint32_t kLevel = Code::kLargest == 448 ? 0x43E00000u : 0x47700000u;  // its bits
  static_assert(Code::kLargest == 448 || Code::kLargest == 61440);
  const Number most = FloatOfBits(Word(0x7F000000u | (kLevel & 0x7FFFFFu)));
  const Number kept = Max(Select(largest < most, largest, most), Number(kSmallestScale * Code::kLargest));
  const Word powers = FloatBits(kept) + Word(0x7FFFFFu - (kLevel & 0x7FFFFFu));
  return FloatOfBits((powers & Word(0x7F800000u)) - Word((kLevel & 0x7F800000u) - 0x3F800000u));
}

// The scale of a block whose largest magnitude is `largest`: finite, although that may not be.
template <class Code, class Number>
SHARDMESH_RULE Number BlockScale(Number largest) {
  using Word = std::decay_t<decltype(FloatBits(largest))>;
  if constexpr (kShortScales<Code>) {
    return PowerScale<Code>(largest);
  } else {
    const Number scale = Max(largest * Number(1.0f / Code::kLargest), Number(kSmallestScale));
    const Number most = FloatOfBits(Word(kMostScaleBits<Code>));
    return Select(scale < most, scale, most);
  }
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

// Whether a second moment's codes need the draws of the weights.
SHARDMESH_HOST_DEVICE constexpr bool NeedsDraws(StateFormat format) { return format == StateFormat::kFp8x32; }

// Of elements [i, i + width) of a tile, for a second moment.
template <class Number>
SHARDMESH_RULE typename Lanes<Number>::Word SecondMomentDrawsAt(const TileDraws& weight_draws, int64_t i) {
  return DrawsAt<Number>(weight_draws, i ^ 32);
}

// The codes of the block of elements [first, first + kBlock), from their values and the reciprocal of its scale.
// `weight_draws`: the tile's; read where Code::kStochastic.
template <class Code, class Number>
SHARDMESH_RULE void EncodeBlock(const float* values, Number inverse, const TileDraws& weight_draws, uint8_t* codes,
                                int64_t first) {
  using L = Lanes<Number>;
  SHARDMESH_UNROLL(2)
  for (int64_t i = first; i < first + Code::kBlock; i += 4 * L::kWidth) {
    Number y[4];
    typename L::Word draws[4];
    SHARDMESH_UNROLL(4)
    for (int k = 0; k < 4; ++k) {
      y[k] = L::Load(values + i + k * L::kWidth) * inverse;
      if constexpr (Code::kStochastic) draws[k] = SecondMomentDrawsAt<Number>(weight_draws, i + k * L::kWidth);
      if constexpr (!Code::kStochastic) draws[k] = typename L::Word(0u);
    }
    Code::Store4(y, draws, codes, i);
  }
}

// A tile.
template <class Number, bool kSigned>
void DecodeStates(StateFormat format, const ConstStoredTile& from, float* to) {
  using L = Lanes<Number>;
  if (format == StateFormat::kFp32) return DecodeWeights<Number>(WeightFormat::kFp32, from, to);
  if (format == StateFormat::kBf16Sr) return DecodeWeights<Number>(WeightFormat::kBf16, from, to);
  WithCode<Number, kSigned>(format, [&](auto code) {
    using Code = decltype(code);
    for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
      const Number scale(LoadScale<Code>(from.extra, i / Code::kBlock) * Code::kRaw);
      L::Store(Code::LoadRaw(from.codes, i) * scale, to + i);
    }
  });
}

// `draws`: the state's for bf16_sr, the weights' for second moments in fp8x32; not read for others.
template <class Number, bool kSigned>
void EncodeStates(StateFormat format, const float* from, const TileDraws& draws, const StoredTile& to) {
  if (format == StateFormat::kFp32) return EncodeWeights<Number>(WeightFormat::kFp32, from, draws, to);
  if (format == StateFormat::kBf16Sr) return EncodeWeights<Number>(WeightFormat::kBf16Sr, from, draws, to);
  WithCode<Number, kSigned>(format, [&](auto code) {
    using Code = decltype(code);
    for (int64_t block = 0; block < kTileElements; block += Code::kBlock) {
      const float scale = BlockScale<Code>(LargestMagnitude<Number>(from + block, Code::kBlock));
      StoreScale<Code>(scale, to.extra, block / Code::kBlock);
      EncodeBlock<Code>(from, Number(Divide(1.0f, scale)), draws, to.codes, block);
    }
  });
}

}  // namespace shardmesh
