#include "core/view/box_index.h"

#include <algorithm>

namespace shardmesh {
namespace {

constexpr size_t kLeafBoxes = 4;

int64_t Centre(const Box& box, size_t d) { return box.offsets[d] + box.sizes[d] / 2; }

void Extend(const Box& by, Box* bounds) {
  for (size_t d = 0; d < by.sizes.size(); ++d) {
    const int64_t end = std::max(bounds->offsets[d] + bounds->sizes[d], by.offsets[d] + by.sizes[d]);
    bounds->offsets[d] = std::min(bounds->offsets[d], by.offsets[d]);
    bounds->sizes[d] = end - bounds->offsets[d];
  }
}

}  // namespace

BoxIndex::BoxIndex(std::vector<Box> boxes) : boxes_(std::move(boxes)) {
  for (size_t i = 0; i < boxes_.size(); ++i) {
    if (!boxes_[i].IsEmpty()) order_.push_back(i);
  }
  if (!order_.empty()) Build(0, order_.size());
}

void BoxIndex::Build(size_t begin, size_t end) {
  const size_t node = nodes_.size();
  nodes_.push_back({boxes_[order_[begin]], begin, end, 0});
  for (size_t i = begin + 1; i < end; ++i) Extend(boxes_[order_[i]], &nodes_[node].bounds);
  const Dims& widths = nodes_[node].bounds.sizes;
  if (end - begin <= kLeafBoxes || widths.empty()) return;
  const size_t widest = std::max_element(widths.begin(), widths.end()) - widths.begin();
  const size_t middle = begin + (end - begin) / 2;
  std::nth_element(order_.begin() + begin, order_.begin() + middle, order_.begin() + end,
                   [&](size_t a, size_t b) { return Centre(boxes_[a], widest) < Centre(boxes_[b], widest); });
  Build(begin, middle);
  nodes_[node].right_child = nodes_.size();
  Build(middle, end);
}

bool BoxIndex::Visit(size_t node, const Box& want, absl::FunctionRef<bool(size_t)> visit) const {
  const Node& at = nodes_[node];
  if (!at.bounds.Overlaps(want)) return true;
  if (at.right_child != 0) return Visit(node + 1, want, visit) && Visit(at.right_child, want, visit);
  for (size_t i = at.begin; i < at.end; ++i) {
    if (boxes_[order_[i]].Overlaps(want) && !visit(order_[i])) return false;
  }
  return true;
}

bool BoxIndex::ForEachOverlap(const Box& want, absl::FunctionRef<bool(size_t)> visit) const {
  return nodes_.empty() || want.IsEmpty() || Visit(0, want, visit);
}

std::optional<std::pair<size_t, size_t>> BoxIndex::FirstOverlap() const {
  std::optional<std::pair<size_t, size_t>> found;
  for (size_t i = 0; i < boxes_.size() && !found.has_value(); ++i) {
    ForEachOverlap(boxes_[i], [&](size_t j) {
      if (j != i) found.emplace(std::min(i, j), std::max(i, j));
      return j == i;
    });
  }
  return found;
}

}  // namespace shardmesh
