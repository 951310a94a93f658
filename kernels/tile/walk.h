// How a run is cut into tiles. Compiled for any processor; what a tile does is a function that it is given.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/tile/plan.h"

namespace shardmesh {

// Makes ready what all tiles of a run share.
StepPlan PlanStep(const OptimizerContext& context, const OptimizerRun& run);

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
