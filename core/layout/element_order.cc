#include "core/layout/element_order.h"

#include <algorithm>
#include <limits>

namespace shardmesh {
namespace {

constexpr int64_t kNoEnd = std::numeric_limits<int64_t>::max();  // all that follow are padding

int64_t DivideUp(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

}  // namespace

ElementOrder::ElementOrder(const LayoutTensor& tensor) {
  for (const int64_t size : tensor.shape) num_elements_ *= size;
  if (tensor.granule.kind != GranuleKind::kBlock) return;
  side_ = tensor.granule.size;
  rows_ = tensor.shape[tensor.shape.size() - 2];
  columns_ = tensor.shape.back();
  down_ = DivideUp(rows_, side_);
  across_ = DivideUp(columns_, side_);
}

ElementOrder::Run ElementOrder::AtStored(int64_t stored) const {
  if (side_ == 0) return stored < num_elements_ ? Run{stored, num_elements_ - stored} : Run{kPadding, kNoEnd};
  const int64_t area = side_ * side_, block = stored / area, matrix = block / (down_ * across_);
  const int64_t row_in_block = stored % area / side_, column_in_block = stored % side_;
  const int64_t row = block / across_ % down_ * side_ + row_in_block;
  const int64_t column = block % across_ * side_ + column_in_block;
  if (row >= rows_) return {kPadding, area - stored % area};
  if (column >= columns_) return {kPadding, side_ - column_in_block};
  const int64_t at = (matrix * rows_ + row) * columns_ + column;
  if (columns_ == side_) return {at, (rows_ - row) * columns_ - column};  // whole rows: row-major itself
  return {at, std::min(side_ - column_in_block, columns_ - column)};
}

ElementOrder::Run ElementOrder::AtRowMajor(int64_t row_major) const {
  if (side_ == 0) return {row_major, num_elements_ - row_major};
  const int64_t matrix = row_major / (rows_ * columns_);
  const int64_t row = row_major / columns_ % rows_, column = row_major % columns_;
  const int64_t block = (matrix * down_ + row / side_) * across_ + column / side_;
  const int64_t at = block * side_ * side_ + row % side_ * side_ + column % side_;
  if (columns_ == side_) return {at, (rows_ - row) * columns_ - column};
  return {at, std::min(side_ - column % side_, columns_ - column)};
}

}  // namespace shardmesh
