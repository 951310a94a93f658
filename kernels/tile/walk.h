// How a run is cut into tiles. Compiled for any processor; what a tile does is a function that it is given.
#pragma once

#include <cstdint>

#include "kernels/tile/plan.h"

namespace shardmesh {

// Makes ready what all tiles of a run share.
StepPlan PlanStep(const OptimizerContext& context, const OptimizerRun& run);

// Rows of a row format that fill whole tiles together, or all of the run's: their elements.
int64_t RowUnitElements(const OptimizerRun& run);

// Memory for that many numbers. It is this thread's, kept for its next run.
float* RowMemory(int64_t elements);

// Elements [begin, begin + num_elements) of a run, with fp32 weights that lie at `weights`, and with `digests` if the
// run has any. `tile`: where its streams are. Its slots begin where the run's do (StepPlan::gradient_begin).
OptimizerRun PartOf(const StepPlan& plan, const TileRun& tile, int64_t begin, int64_t num_elements, float* weights,
                    uint64_t* digests);

// The run's last tile, when it is short: in memory of its own, zeros behind its end. Its gradients stay where they are.
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
};

}  // namespace shardmesh
