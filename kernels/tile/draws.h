// The random bits of one tile for one purpose (core/base/philox.h): computed once, then read 16 bits an element.
#pragma once

#include <cstdint>

#include "core/base/philox.h"
#include "kernels/tile/lanes.h"
#include "kernels/tile/plan.h"

namespace shardmesh {

// The output words of each group of 64 elements: word w of counter lane l at words[group][w][l].
struct TileDraws {
  alignas(32) uint32_t words[kTileElements / 64][4][8];
};

// Fills `draws` for the tile that begins at `first_element`, a multiple of 64. A number type may bring a faster one.
template <class Number>
struct DrawFiller {
  SHARDMESH_RULE static void Fill(const DrawStream& stream, uint64_t first_element, TileDraws& draws) {
    for (int group = 0; group < kTileElements / 64; ++group) {
      for (uint32_t lane = 0; lane < 8; ++lane) {
        const uint64_t number = DrawCounter(first_element + 64 * group) + lane;
        uint32_t words[4] = {static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32), stream.tensor,
                             stream.step};
        Philox4x32(stream.key, words);
        for (int w = 0; w < 4; ++w) draws.words[group][w][lane] = words[w];
      }
    }
  }
};

// The draws of elements [i, i + width) of the tile, uniform in [0, 65536). REQUIRES: i is a multiple of the width.
template <class Number>
SHARDMESH_RULE typename Lanes<Number>::Word DrawsAt(const TileDraws& draws, int64_t i) {
  using Word = typename Lanes<Number>::Word;
  const Word word = Lanes<Number>::LoadWords(&draws.words[i / 64][i % 64 / 8 % 4][i % 8]);
  return i % 64 < 32 ? word & Word(0xFFFFu) : ShiftRight<16>(word);
}

}  // namespace shardmesh
