// Rows of int8 weights between their stored form and fp32, for every number type (kernels/rules/int8.h).
#pragma once

#include <cstring>

#include "kernels/rules/int8.h"
#include "kernels/tile/states.h"

namespace shardmesh {

// Calls visit(row, begin, end) for the part of each row that lies in elements [begin, end).
template <class Visit>
SHARDMESH_RULE void ForEachRow(int64_t row_elements, int64_t begin, int64_t end, const Visit& visit) {
  while (begin < end) {
    const int64_t row = begin / row_elements, row_end = (row + 1) * row_elements;
    const int64_t stop = row_end < end ? row_end : end;
    visit(row, begin, stop);
    begin = stop;
  }
}

// Each element of [begin, end) gets its row's number.
SHARDMESH_RULE void SpreadRows(const float* of_row, int64_t row_elements, int64_t begin, int64_t end, float* spread) {
  ForEachRow(row_elements, begin, end, [&](int64_t row, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) spread[i - begin] = of_row[row];
  });
}

// What a tile has of `left` elements: how many, and that rounded up to whole vectors.
SHARDMESH_RULE int64_t InTile(int64_t left) { return left < kTileElements ? left : kTileElements; }
template <class Number>
SHARDMESH_RULE int64_t InVectors(int64_t elements) {
  return (elements + Lanes<Number>::kWidth - 1) / Lanes<Number>::kWidth * Lanes<Number>::kWidth;
}

// Elements [0, num_elements) of whole rows. `from`: the codes of the first, and its row's scale.
template <class Number>
void DecodeRows(const ConstStoredTile& from, int64_t row_elements, int64_t num_elements, float* to) {
  using L = Lanes<Number>;
  using Word = typename L::Word;
  const auto* scales = reinterpret_cast<const float*>(from.extra);
  alignas(32) float spread[kTileElements] = {1};
  alignas(32) uint8_t codes[kTileElements] = {};
  alignas(32) float values[kTileElements];
  for (int64_t begin = 0; begin < num_elements; begin += kTileElements) {
    const int64_t n = InTile(num_elements - begin);
    SpreadRows(scales, row_elements, begin, begin + n, spread);
    std::memcpy(codes, from.codes + begin, static_cast<size_t>(n));
    for (int64_t i = 0; i < InVectors<Number>(n); i += L::kWidth) {
      const Word code = ((L::LoadBytes(codes + i) + Word(0x80u)) & Word(0xFFu)) - Word(0x80u);
      L::Store(IntToFloat(code) * L::Load(spread + i), values + i);
    }
    std::memcpy(to + begin, values, static_cast<size_t>(n) * sizeof(float));
  }
}

// The other way, with new scales. `first_element`: of the first element in its tensor, a multiple of kTileElements.
// Calls store(begin, elements, codes, values) for each tile of codes and what they stand for.
template <class Number, class Store>
void EncodeRows(const float* from, int64_t row_elements, int64_t num_elements, const DrawStream& stream,
                uint64_t first_element, float* scales, const Store& store) {
  using L = Lanes<Number>;
  for (int64_t row = 0; row * row_elements < num_elements; ++row) {
    float largest = 0;
    for (int64_t i = row * row_elements; i < (row + 1) * row_elements; ++i) largest = Max(largest, Abs(from[i]));
    scales[row] = Max(largest / kInt8Largest, kSmallestScale);
  }
  TileDraws draws;
  alignas(32) float spread[kTileElements] = {1};
  alignas(32) float values[kTileElements] = {};
  alignas(32) uint8_t codes[kTileElements];
  for (int64_t begin = 0; begin < num_elements; begin += kTileElements) {
    const int64_t n = InTile(num_elements - begin);
    SpreadRows(scales, row_elements, begin, begin + n, spread);
    std::memcpy(values, from + begin, static_cast<size_t>(n) * sizeof(float));
    DrawFiller<Number>::Fill(stream, first_element + static_cast<uint64_t>(begin), draws);
    for (int64_t i = 0; i < InVectors<Number>(n); i += L::kWidth) {
      const Number y = Divide(L::Load(values + i), L::Load(spread + i));
      const auto code = EncodeInt8Stochastic(y, DrawsAt<Number>(draws, i));
      L::StoreBytes(code & typename L::Word(0xFFu), codes + i);
      L::Store(IntToFloat(code) * L::Load(spread + i), values + i);
    }
    for (int64_t i = n; i < kTileElements; ++i) values[i] = 0;
    store(begin, n, codes, values);
  }
}

}  // namespace shardmesh
