// How a run is cut into tiles. Compiled for any processor; what a tile does is a function that it is given.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/tile/plan.h"

namespace shardmesh {

// Makes ready what all tiles of a run share.
StepPlan PlanStep(const OptimizerContext& context, const OptimizerRun& run);

// Rows of a row format that fill whole tiles together, or all of the run's: their elements, and memory for them in
// fp32.
class RowUnit {
 public:
  explicit RowUnit(const OptimizerRun& run);
  int64_t elements() const { return elements_; }
  float* weights() { return weights_.data(); }
  uint8_t* codes() { return codes_.data(); }
  // Compares the codes with those that `tile` had.
  void NoteChanges(const TileRun& tile, int64_t num_elements) const;

 private:
  const int64_t elements_;
  std::vector<float> weights_;
  std::vector<uint8_t> codes_;
};

// Elements [begin, begin + num_elements) of a run, with fp32 weights that lie at `weights`. `tile`: where its streams
// are.
OptimizerRun PartOf(const StepPlan& plan, const TileRun& tile, int64_t begin, int64_t num_elements,
                    const void* const* gradients, float* weights);

// The slots of a run from element `begin` on.
class GradientsAt {
 public:
  GradientsAt(const OptimizerContext& context, const OptimizerRun& run, int64_t begin);
  const void* const* slots() const { return slots_.data(); }

 private:
  std::vector<const void*> slots_;
};

// The run's last tile, when it is short: in memory of its own, zeros behind its end.
class ShortTile {
 public:
  ShortTile(const StepPlan& plan, int64_t index);
  const TileRun& tile() const { return tile_; }
  void CopyBack() const;  // the elements that there are

 private:
  struct Stream {
    alignas(64) uint8_t codes[4 * kTileElements];
    alignas(64) uint8_t extra[2 * kTileElements];
  };

  const StepPlan& plan_;
  const int64_t begin_, elements_;
  TileRun tile_;
  Stream weights_, states_[3];
  alignas(64) uint8_t copies_[2][4 * kTileElements];
  std::vector<uint8_t> gradients_;
  std::vector<const void*> slots_;
};

}  // namespace shardmesh
