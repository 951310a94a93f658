// Weights of one tile between their stored form and fp32, for every number type (core/numeric_formats.h). Row formats
// are not here: a row is not a tile (kernels/tile/rows.h).
#pragma once

#include "core/numeric_formats.h"
#include "kernels/rules/split_weight.h"
#include "kernels/tile/draws.h"

namespace shardmesh {

constexpr bool NeedsDraws(WeightFormat format) {
  return format == WeightFormat::kBf16Sr || format == WeightFormat::kBf16Plus8Sr;
}

template <class Number>
struct WeightCodec {
  using L = Lanes<Number>;
  using Word = typename L::Word;

  // Sign-extends the low half, or the low byte.
  SHARDMESH_RULE static Word Signed16(Word x) { return ((x + Word(0x8000u)) & Word(0xFFFFu)) - Word(0x8000u); }
  SHARDMESH_RULE static Word Signed8(Word x) { return ((x + Word(0x80u)) & Word(0xFFu)) - Word(0x80u); }

  static void Decode(WeightFormat format, const ConstStoredTile& from, float* to) {
    const auto* halves = reinterpret_cast<const uint16_t*>(from.codes);
    const auto* remainders = reinterpret_cast<const uint16_t*>(from.extra);
    switch (format) {
      case WeightFormat::kFp32:
        for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
          L::Store(L::Load(reinterpret_cast<const float*>(from.codes) + i), to + i);
        }
        return;
      case WeightFormat::kBf16:
      case WeightFormat::kBf16Sr:
        for (int64_t i = 0; i < kTileElements; i += L::kWidth) L::Store(L::LoadBf16(halves + i), to + i);
        return;
      case WeightFormat::kBf16Plus16:
        for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
          const Word remainder = Signed16(L::LoadHalves(remainders + i));
          L::Store(JoinExact<Number>(L::LoadHalves(halves + i), remainder), to + i);
        }
        return;
      case WeightFormat::kBf16Plus8Sr:
        for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
          const Word remainder = Signed8(L::LoadBytes(from.extra + i));
          L::Store(JoinStochastic<Number>(L::LoadHalves(halves + i), remainder), to + i);
        }
        return;
      case WeightFormat::kInt8Row:
        return;
    }
  }

  // `draws`: read where NeedsDraws(format).
  static void Encode(WeightFormat format, const float* from, const TileDraws& draws, const StoredTile& to) {
    auto* halves = reinterpret_cast<uint16_t*>(to.codes);
    switch (format) {
      case WeightFormat::kFp32:
        for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
          L::Store(L::Load(from + i), reinterpret_cast<float*>(to.codes) + i);
        }
        return;
      case WeightFormat::kBf16:
        for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
          L::StoreHalves(ShiftRight<16>(Bf16BitsRne(L::Load(from + i))), halves + i);
        }
        return;
      case WeightFormat::kBf16Sr:
        for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
          L::StoreHalves(ShiftRight<16>(Bf16BitsSr(L::Load(from + i), DrawsAt<Number>(draws, i))), halves + i);
        }
        return;
      case WeightFormat::kBf16Plus16:
        for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
          const SplitWeight<Word> split = SplitExact(L::Load(from + i));
          L::StoreHalves(split.upper, halves + i);
          L::StoreHalves(split.remainder, reinterpret_cast<uint16_t*>(to.extra) + i);
        }
        return;
      case WeightFormat::kBf16Plus8Sr:
        for (int64_t i = 0; i < kTileElements; i += L::kWidth) {
          const Word draw = DrawsAt<Number>(draws, i) & Word(0xFFu);
          const SplitWeight<Word> split = SplitStochastic(L::Load(from + i), draw);
          L::StoreHalves(split.upper, halves + i);
          L::StoreBytes(split.remainder, to.extra + i);
        }
        return;
      case WeightFormat::kInt8Row:
        return;
    }
  }
};

}  // namespace shardmesh
