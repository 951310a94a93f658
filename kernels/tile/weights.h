// Weights between their stored form and fp32, for every number type (core/format/numeric_formats.h): a few elements in
// a row, and a whole tile. Row formats are not here: a row is not a tile.
#pragma once

#include <type_traits>

#include "core/format/numeric_formats.h"
#include "kernels/rules/split_weight.h"
#include "kernels/tile/draws.h"

namespace shardmesh {

SHARDMESH_HOST_DEVICE constexpr bool NeedsDraws(WeightFormat format) {
  return format == WeightFormat::kBf16Sr || format == WeightFormat::kBf16Plus8Sr;
}

// Elements [i, i + width) of a tile.
template <class Number, WeightFormat kFormat>
struct StoredWeights {
  using L = Lanes<Number>;
  using Word = typename L::Word;

  SHARDMESH_RULE static Number Load(const ConstStoredTile& from, int64_t i) {
    const auto* halves = reinterpret_cast<const uint16_t*>(from.codes) + i;
    if constexpr (kFormat == WeightFormat::kFp32) {
      return L::Load(reinterpret_cast<const float*>(from.codes) + i);
    } else if constexpr (kFormat == WeightFormat::kBf16Plus16) {
      const Word remainder = L::LoadHalves(reinterpret_cast<const uint16_t*>(from.extra) + i);
      return JoinExact<Number>(L::LoadHalves(halves), SignExtend<16>(remainder));
    } else if constexpr (kFormat == WeightFormat::kBf16Plus8Sr) {
      return JoinStochastic<Number>(L::LoadHalves(halves), SignExtend<8>(L::LoadBytes(from.extra + i)));
    } else {
      return L::LoadBf16(halves);
    }
  }

  // `draw`: of 16 bits, read where NeedsDraws(kFormat).
  SHARDMESH_RULE static void Store(Number x, Word draw, const StoredTile& to, int64_t i) {
    auto* halves = reinterpret_cast<uint16_t*>(to.codes) + i;
    if constexpr (kFormat == WeightFormat::kFp32) {
      L::Store(x, reinterpret_cast<float*>(to.codes) + i);
    } else if constexpr (kFormat == WeightFormat::kBf16) {
      L::StoreHalves(ShiftRight<16>(Bf16BitsRne(x)), halves);
    } else if constexpr (kFormat == WeightFormat::kBf16Sr) {
      L::StoreHalves(ShiftRight<16>(Bf16BitsSr(x, draw)), halves);
    } else if constexpr (kFormat == WeightFormat::kBf16Plus16) {
      const SplitWeight<Word> split = SplitExact(x);
      L::StoreHalves(split.upper, halves);
      L::StoreHalves(split.remainder, reinterpret_cast<uint16_t*>(to.extra) + i);
    } else if constexpr (kFormat == WeightFormat::kBf16Plus8Sr) {
      const SplitWeight<Word> split = SplitStochastic(x, draw & Word(0xFFu));
      L::StoreHalves(split.upper, halves);
      L::StoreBytes(split.remainder, to.extra + i);
    }
  }

 private:
  template <int kBits>
  SHARDMESH_RULE static Word SignExtend(Word x) {
    constexpr uint32_t kHalf = 1u << (kBits - 1);
    return ((x + Word(kHalf)) & Word(2 * kHalf - 1)) - Word(kHalf);
  }
};

// Calls visit(std::integral_constant<WeightFormat, format>()); nothing for row formats and nf4.
template <class Visit>
SHARDMESH_RULE void WithFormat(WeightFormat format, const Visit& visit) {
  switch (format) {
    case WeightFormat::kFp32:
      return visit(std::integral_constant<WeightFormat, WeightFormat::kFp32>());
    case WeightFormat::kBf16:
      return visit(std::integral_constant<WeightFormat, WeightFormat::kBf16>());
    case WeightFormat::kBf16Sr:
      return visit(std::integral_constant<WeightFormat, WeightFormat::kBf16Sr>());
    case WeightFormat::kBf16Plus16:
      return visit(std::integral_constant<WeightFormat, WeightFormat::kBf16Plus16>());
    case WeightFormat::kBf16Plus8Sr:
      return visit(std::integral_constant<WeightFormat, WeightFormat::kBf16Plus8Sr>());
    case WeightFormat::kInt8Row:
    case WeightFormat::kNf4:
      return;
  }
}

template <class Number>
void DecodeWeights(WeightFormat format, const ConstStoredTile& from, float* to) {
  using L = Lanes<Number>;
  WithFormat(format, [&](auto known) {
    using Stored = StoredWeights<Number, decltype(known)::value>;
    for (int64_t i = 0; i < kTileElements; i += L::kWidth) L::Store(Stored::Load(from, i), to + i);
  });
}

template <class Number>
void EncodeWeights(WeightFormat format, const float* from, const TileDraws& draws, const StoredTile& to) {
  using L = Lanes<Number>;
  WithFormat(format, [&](auto known) {
    constexpr WeightFormat kFormat = decltype(known)::value;
    for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
      typename L::Word draw(0u);
      if constexpr (NeedsDraws(kFormat)) draw = DrawsAt<Number>(draws, i);
      StoredWeights<Number, kFormat>::Store(L::Load(from + i), draw, to, i);
    }
  });
}

}  // namespace shardmesh
