// A list of runs that one launch steps: tables for the blocks, which each find their run by binary search. The tables
// are plain values in one stretch of memory, so that they can be copied to a device; the search is compiled for both.
//
// Work comes in units: a tile of 256 elements, or of row formats (kernels/cuda/row_step_body.h) as many rows as fill
// whole tiles. Units are numbered through the list, run after run.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/tile/plan.h"

namespace shardmesh {

// A run, and which of the contexts (parameter groups) it is stepped with.
struct OptimizerItem {
  int context = 0;
  OptimizerRun run;
};

struct StepListEntry {
  OptimizerRun run;
  StepPlan plan;  // its pointers are null: they are set where it is used
  int32_t context = 0;
};

struct StepList {
  const OptimizerContext* contexts = nullptr;
  const StepListEntry* entries = nullptr;
  const int64_t* first_units = nullptr;  // [num_entries + 1], from 0 to the number of all
  int32_t num_entries = 0;
};

// A unit's run, and its number in it.
struct StepPlace {
  int32_t entry = 0;
  int64_t index = 0;
};

// REQUIRES: 0 <= unit < list.first_units[list.num_entries].
SHARDMESH_RULE StepPlace PlaceOf(const StepList& list, int64_t unit) {
  int32_t begin = 0, end = list.num_entries;  // the last entry that begins at or before `unit` is in [begin, end)
  while (end - begin > 1) {
    const int32_t middle = begin + (end - begin) / 2;
    if (list.first_units[middle] <= unit) {
      begin = middle;
    } else {
      end = middle;
    }
  }
  return {begin, unit - list.first_units[begin]};
}

// Units of a run.
int64_t NumUnits(const OptimizerContext& context, const OptimizerRun& run);

// The tables of a list, in host memory. Not thread-safe.
class StepTables {
 public:
  // REQUIRES: every item's context is one of `contexts`.
  StepTables(absl::Span<const OptimizerContext> contexts, absl::Span<const OptimizerItem> items);

  const std::vector<uint8_t>& bytes() const { return bytes_; }
  int64_t num_units() const { return num_units_; }
  // The list of a copy of bytes() at `base`, a multiple of 16, which may be another machine's address.
  StepList At(const uint8_t* base) const;

 private:
  int64_t entries_at_ = 0, first_units_at_ = 0, num_units_ = 0;
  int32_t num_entries_ = 0;
  std::vector<uint8_t> bytes_;
};

}  // namespace shardmesh
