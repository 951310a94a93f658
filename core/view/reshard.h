// ReshardPlan: which contiguous runs of elements one rank copies, from whom and to where, to have its boxes of one view
// filled from another view. The same lists serve the other direction: who sends what is the plan of its readers.
//
// Every element of the rank's boxes is written once. Copies are maximal: no two of them could be one. The cost is
// proportional to what the plan holds and the number of tensors, and does not grow with the ranks of either mesh:
// sources are found by arithmetic on the placements. For flat shards of one space (give the space as one tensor of one
// dimension) this is the intersection of intervals, the rule of RaggedShard -> RaggedShard (veScale).
// It moves no bytes, and knows elements only: both sides have the same format. Pure functions, thread-safe.
//
//   auto plan = PlanReshard(stored, wanted, rank);           // two std::vector<TensorView>
//   for (const Copy& copy : plan->copies) ...                // of tensor copy.tensor, by source, then destination
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/view/view.h"

namespace shardmesh {

inline constexpr int64_t kDefaultMaxCopies = int64_t{1} << 22;  // 160 MiB of them

// Elements [source_offset, + num_elements) of the source's memory of a tensor become [destination_offset, ...) of the
// destination's.
struct Copy {
  Rank source, destination;
  int32_t tensor = 0;  // index into both views
  int64_t source_offset = 0;
  int64_t destination_offset = 0;
  int64_t num_elements = 0;  // 1 or more

  friend bool operator==(const Copy& a, const Copy& b) {
    return a.source == b.source && a.destination == b.destination && a.tensor == b.tensor &&
           a.source_offset == b.source_offset && a.destination_offset == b.destination_offset &&
           a.num_elements == b.num_elements;
  }
};

// What a plan takes from one source.
struct SourceShare {
  Rank source;
  int64_t num_copies = 0;
  int64_t num_elements = 0;
};

struct ReshardPlan {
  std::vector<Copy> copies;          // by source, tensor, destination_offset
  std::vector<SourceShare> sources;  // by rank; those that give something
  int64_t num_elements = 0;          // of all copies
};

// The copies that fill the boxes that `rank` has in `destination`. Of a tensor that it has no part in (it is not in the
// tensor's mesh, not listed) it gets nothing. `names`: of the tensors, for messages, which else have their indices if
// they are several. InvalidArgument: the views (or the names, if any) differ in the number of tensors, or the views in
// a shape; a source
//   cannot be read from (TensorView::CanBeSource), or lacks elements that the rank wants. The message has the tensor.
// NotFound: there are tensors, and the rank has no part in any.
// ResourceExhausted: more than `max_copies` copies (counted for the tensor at hand before neighbours are joined); the
//   message has the count that was reached.
absl::StatusOr<ReshardPlan> PlanReshard(absl::Span<const TensorView> source, absl::Span<const TensorView> destination,
                                        Rank rank, int64_t max_copies = kDefaultMaxCopies,
                                        absl::Span<const std::string> names = {});

// All copies from listed boxes of one tensor to listed boxes, by destination, source, destination_offset; the tensor's
// index is 0. Errors as TensorView::Listed and PlanReshard, with `max_copies` for all destinations together.
absl::StatusOr<std::vector<Copy>> Intersect(const Dims& shape, std::vector<RankBox> source,
                                            std::vector<RankBox> destination, int64_t max_copies = kDefaultMaxCopies);

}  // namespace shardmesh
