// Box: a half-open N-dimensional box of a tensor's elements; LocalBox: where such a box lies in its holder's memory.
//
// Both count elements, never bytes. A scalar's box has no dimensions and one element. A box with a size of 0 is legal
// and empty. Limits: kMaxTensorDims dimensions, kMaxElements elements; a size of 0 does not excuse the others (the
// product of the sizes that are not 0 counts), so that no stride can overflow.
// Plain values; functions here are pure and thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"

namespace shardmesh {

inline constexpr int kMaxTensorDims = 8;
inline constexpr int64_t kMaxElements = int64_t{1} << 62;

using Dims = absl::InlinedVector<int64_t, 4>;  // one number for each dimension of a tensor, the slowest first

// Elements [offsets[d], offsets[d] + sizes[d]) along every dimension d.
struct Box {
  Dims offsets;
  Dims sizes;

  static Box Whole(const Dims& shape);

  // REQUIRES of all: the box is valid in some shape (ValidateBox); two boxes have the same number of dimensions.
  bool IsEmpty() const;
  int64_t NumElements() const;
  bool Overlaps(const Box& other) const;  // an empty box overlaps nothing

  std::string ToString() const;  // "[0:2, 4:8]" as begin:end; "[]" is the box of a scalar

  friend bool operator==(const Box& a, const Box& b) { return a.offsets == b.offsets && a.sizes == b.sizes; }
  friend bool operator!=(const Box& a, const Box& b) { return !(a == b); }
};

// The box of the elements that lie in both. All its sizes are at least 0; where the boxes are apart, some are 0.
// REQUIRES: as the members of Box.
Box Intersection(const Box& a, const Box& b);

// A box of a tensor, and its place in one holder's memory: the element at offsets + i lies at
// offset + sum over d of i[d] * strides[d].
struct LocalBox {
  Box box;
  int64_t offset = 0;
  Dims strides;

  // The same memory, for the part `inner` of the box. REQUIRES: inner lies in the box.
  LocalBox Part(const Box& inner) const;

  friend bool operator==(const LocalBox& a, const LocalBox& b) {
    return a.box == b.box && a.offset == b.offset && a.strides == b.strides;
  }
};

// InvalidArgument: a size below 0. ResourceExhausted: more than kMaxTensorDims dimensions or kMaxElements elements.
absl::Status ValidateShape(const Dims& shape);

// As ValidateShape(shape); InvalidArgument: another number of dimensions, or the box is not inside [0, shape).
absl::Status ValidateBox(const Box& box, const Dims& shape);

// As ValidateBox; InvalidArgument: a number of strides other than that of the dimensions, a negative offset or stride,
// two elements in one place. ResourceExhausted: an element lies beyond kMaxElements.
absl::Status ValidateLocalBox(const LocalBox& local, const Dims& shape);

// Strides of a dense tensor of these sizes, the last dimension contiguous. REQUIRES: ValidateShape(sizes).
Dims RowMajorStrides(const Dims& sizes);

// The row-major elements [begin, end) of a tensor of these sizes as boxes, ascending: at most 2 D - 1 of them (head,
// body and tail by dimension). REQUIRES: ValidateShape(sizes); 0 <= begin, end <= the number of elements.
std::vector<Box> BoxesOfFlatRange(const Dims& sizes, int64_t begin, int64_t end);

// The first element of `box` at or after row-major `index` of a tensor of these sizes; nothing if there is none.
// REQUIRES: the box lies inside, is not empty, and 0 <= index <= the number of elements.
std::optional<int64_t> NextInBox(const Dims& sizes, const Box& box, int64_t index);

}  // namespace shardmesh
