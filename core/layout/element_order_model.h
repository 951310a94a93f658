// The order of a tensor's elements in its storage, straight from the definition (core/layout/granule.h), for tests.
#pragma once

#include <cstdint>
#include <vector>

#include "core/layout/bucket_layout.h"

namespace shardmesh {

// A tensor's coordinates at an element of its storage; nothing: that is padding. Not for scalars,
// which have no coordinates.
inline std::vector<int64_t> CoordinatesAt(const LayoutTensor& tensor, int64_t element) {
  const std::vector<int64_t>& shape = tensor.shape;
  std::vector<int64_t> at(shape.size());
  if (tensor.granule.kind != GranuleKind::kBlock) {
    for (size_t d = shape.size(); d-- > 0; element /= shape[d]) at[d] = element % shape[d];
    return element > 0 ? std::vector<int64_t>() : at;
  }
  const int64_t side = tensor.granule.size, rows = shape[shape.size() - 2], columns = shape.back();
  const int64_t across = (columns + side - 1) / side, down = (rows + side - 1) / side;
  const int64_t in_block = element % (side * side), block = element / (side * side);
  at[shape.size() - 2] = block % (across * down) / across * side + in_block / side;
  at[shape.size() - 1] = block % across * side + in_block % side;
  int64_t matrix = block / (across * down);
  for (size_t d = shape.size() - 2; d-- > 0; matrix /= shape[d]) at[d] = matrix % shape[d];
  return at[shape.size() - 2] < rows && at.back() < columns ? at : std::vector<int64_t>();
}

}  // namespace shardmesh
