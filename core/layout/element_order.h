// ElementOrder: where an element of a tensor lies in its storage, and the other way round.
//
// Storage is row-major, or block by block with blocks at the edge filled up with zeros (core/layout/granule.h). Both
// indices count elements from the tensor's start. Pure and thread-safe.
#pragma once

#include <cstdint>

#include "core/layout/bucket_layout.h"

namespace shardmesh {

class ElementOrder {
 public:
  // What is known of the elements behind one: where it lies in the other order, and how many from it on lie
  // consecutively in both.
  struct Run {
    int64_t at = 0;  // kPadding: no element of the tensor lies there
    int64_t num_elements = 0;
  };
  static constexpr int64_t kPadding = -1;

  // REQUIRES: the tensor has elements, and its granule fits it (BucketLayout::Create checks both).
  explicit ElementOrder(const LayoutTensor& tensor);

  // REQUIRES: 0 <= stored < the elements of its whole granules.
  Run AtStored(int64_t stored) const;
  // REQUIRES: 0 <= row_major < the tensor's elements.
  Run AtRowMajor(int64_t row_major) const;

 private:
  int64_t num_elements_ = 1;
  int64_t side_ = 0;                // of a block; 0: row-major
  int64_t rows_ = 0, columns_ = 0;  // of one matrix; those below where there are blocks
  int64_t down_ = 0, across_ = 0;   // its blocks
};

}  // namespace shardmesh
