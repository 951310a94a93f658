// BoxIndex: which of many boxes of one tensor overlap a given box, without looking at all of them.
//
// A bounding volume hierarchy (a binary tree of bounding boxes, split at the median centre along the widest dimension):
// built in O(n log n), asked in about O(log n + answers) where the boxes are disjoint.
// Immutable, thread-safe.
#pragma once

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "core/view/box.h"

namespace shardmesh {

class BoxIndex {
 public:
  // REQUIRES: all boxes are valid in one shape. Empty ones are allowed; they overlap nothing.
  explicit BoxIndex(std::vector<Box> boxes);

  const std::vector<Box>& boxes() const { return boxes_; }

  // Calls `visit` with the index of every box that overlaps `want`, in no particular order, until it returns false.
  // Returns whether it never did. REQUIRES: as for the boxes.
  bool ForEachOverlap(const Box& want, absl::FunctionRef<bool(size_t)> visit) const;

  // Two boxes (i < j) that share an element, if there are any.
  std::optional<std::pair<size_t, size_t>> FirstOverlap() const;

 private:
  struct Node {
    Box bounds;
    size_t begin, end;   // of order_
    size_t right_child;  // the left one is the next node; 0: a leaf
  };

  void Build(size_t begin, size_t end);
  bool Visit(size_t node, const Box& want, absl::FunctionRef<bool(size_t)> visit) const;

  // Constant after construction.
  std::vector<Box> boxes_;
  std::vector<size_t> order_;  // indices of the boxes that are not empty, those of one node together
  std::vector<Node> nodes_;    // in preorder
};

}  // namespace shardmesh
