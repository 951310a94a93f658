// What the tiles of a run share, and where the streams of one tile lie. Plain values.
#pragma once

#include <cstdint>

#include "core/base/host_device.h"
#include "core/base/philox.h"
#include "core/format/numeric_formats.h"
#include "core/format/stream_digest.h"
#include "kernels/optimizer_step.h"

namespace shardmesh {

inline constexpr int64_t kTileElements = 256;
inline constexpr int64_t kMxElements = 32;  // of one scale of mx8

// Where the parts of a tile's stream begin.
struct StoredTile {
  uint8_t* codes = nullptr;
  uint8_t* extra = nullptr;  // remainder or scales
};
struct ConstStoredTile {
  const uint8_t* codes = nullptr;
  const uint8_t* extra = nullptr;
};

// Which draws: of one step, one tensor, one purpose.
struct DrawStream {
  PhiloxKey key;  // the job's for the purpose, the step's high bits mixed in (KeyOfStep)
  uint32_t step = 0;
  uint32_t tensor = 0;
};

// The streams of one tile.
struct TileRun {
  const void* const* gradients = nullptr;
  int64_t gradient_offset = 0;  // elements from where the slots begin
  ConstStoredTile weights_in, states_in[3];
  StoredTile weights_out, states_out[3];
  uint8_t* copies[2] = {nullptr, nullptr};
  float* square_sum = nullptr;
  uint8_t* changed = nullptr;
  StoredTile mx8;
  float* largest = nullptr;
};

// Bytes of a whole tile's parts.
struct TileBytes {
  int64_t codes = 0, extra = 0;
};

// How a stream's part is digested, tile by tile (core/format/stream_digest.h).
struct TileDigest {
  uint64_t key = 0;
  int64_t word_bytes = 8;
  uint64_t words = 0;  // of a tile
};

// What one call needs, so that the tile loop computes nothing twice.
struct StepPlan {
  const OptimizerContext* context = nullptr;
  const OptimizerRun* run = nullptr;
  int num_states = 0;
  float gradient_scale = 1;    // clip, and the sign of maximize
  int64_t gradient_begin = 0;  // where the run begins in its slots, in elements
  DrawStream weight_draws, state_draws[3];
  StoredLayout weights, states;
  TileBytes weights_tile, states_tile;
  TileDigest digests[4][2];  // of the weights and each state, where they are asked for: codes, extra
};

// What is not there stays null.
SHARDMESH_RULE uint8_t* PartAt(void* part, int64_t offset) {
  return part == nullptr ? nullptr : static_cast<uint8_t*>(part) + offset;
}

template <class Tile>
SHARDMESH_RULE Tile StreamAt(const StoredRun& run, const TileBytes& bytes, int64_t index) {
  Tile tile;
  tile.codes = PartAt(run.codes, bytes.codes * index);
  tile.extra = PartAt(run.extra, bytes.extra * index);
  return tile;
}

// Where tile `index` of a run publishes its weights.
SHARDMESH_RULE void SetPublished(const OptimizerRun& run, int64_t index, TileRun& tile) {
  if (run.mx8.codes != nullptr) {
    tile.mx8 = StreamAt<StoredTile>(run.mx8, {kTileElements, kTileElements / kMxElements}, index);
  }
  if (run.largest != nullptr) tile.largest = run.largest + index * (kTileElements / kLargestElements);
}

// Tile `index` of the run, in place.
SHARDMESH_RULE TileRun TileAt(const StepPlan& plan, int64_t index) {
  const OptimizerRun& run = *plan.run;
  TileRun tile;
  tile.gradients = run.gradients;
  tile.gradient_offset = plan.gradient_begin + index * kTileElements;
  tile.weights_in = StreamAt<ConstStoredTile>(run.weights_in, plan.weights_tile, index);
  tile.weights_out = StreamAt<StoredTile>(run.weights_out, plan.weights_tile, index);
  for (int s = 0; s < plan.num_states; ++s) {
    tile.states_in[s] = StreamAt<ConstStoredTile>(run.states_in[s], plan.states_tile, index);
    tile.states_out[s] = StreamAt<StoredTile>(run.states_out[s], plan.states_tile, index);
  }
  for (int c = 0; c < run.num_copies; ++c) {
    tile.copies[c] = static_cast<uint8_t*>(run.copies[c]) + plan.weights_tile.codes * index;
  }
  if (run.square_sums != nullptr) tile.square_sum = run.square_sums + index;
  if (run.changed != nullptr) tile.changed = run.changed + index;
  SetPublished(run, index, tile);
  return tile;
}

}  // namespace shardmesh
