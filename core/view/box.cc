#include "core/view/box.h"

#include <algorithm>
#include <numeric>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

// Sum of (size - 1) * stride, or nothing beyond kMaxElements. REQUIRES: sizes >= 1, strides >= 0.
std::optional<int64_t> Extent(const Dims& sizes, const Dims& strides) {
  int64_t extent = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    int64_t step;
    if (__builtin_mul_overflow(sizes[d] - 1, strides[d], &step)) return std::nullopt;
    if (__builtin_add_overflow(extent, step, &extent) || extent > kMaxElements) return std::nullopt;
  }
  return extent;
}

// Whether every dimension steps over all that the dimensions of smaller strides span: a sufficient condition that any
// slice of a dense tensor, in any order of dimensions, meets.
bool IsInjective(const Dims& sizes, const Dims& strides) {
  Dims order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  absl::c_sort(order, [&](int64_t a, int64_t b) { return strides[a] < strides[b]; });
  int64_t span = 0;
  for (const int64_t d : order) {
    if (sizes[d] == 1) continue;
    if (strides[d] <= span) return false;
    span += (sizes[d] - 1) * strides[d];
  }
  return true;
}

void AppendFlatRange(const Dims& sizes, const Dims& strides, size_t d, int64_t begin, int64_t end, Box prefix,
                     std::vector<Box>* boxes) {
  if (begin >= end) return;
  if (d == sizes.size()) return boxes->push_back(std::move(prefix));
  const int64_t inner = strides[d];
  const auto append_inside = [&](int64_t index, int64_t from, int64_t to) {  // elements [from, to) of one index
    Box one = prefix;
    one.offsets[d] = index;
    one.sizes[d] = 1;
    AppendFlatRange(sizes, strides, d + 1, from, to, std::move(one), boxes);
  };
  const int64_t first = begin / inner, last = end / inner;  // `last` is cut when end is no multiple of inner
  if (first == last) return append_inside(first, begin % inner, end % inner);
  const bool head = begin % inner != 0;
  if (head) append_inside(first, begin % inner, inner);
  Box body = prefix;
  body.offsets[d] = first + head;
  body.sizes[d] = last - body.offsets[d];
  if (body.sizes[d] > 0) boxes->push_back(std::move(body));
  append_inside(last, 0, end % inner);
}

}  // namespace

Box Box::Whole(const Dims& shape) { return {Dims(shape.size(), 0), shape}; }

bool Box::IsEmpty() const { return absl::c_linear_search(sizes, 0); }

int64_t Box::NumElements() const {
  if (IsEmpty()) return 0;
  int64_t product = 1;
  for (const int64_t size : sizes) product *= size;
  return product;
}

bool Box::Overlaps(const Box& other) const {
  for (size_t d = 0; d < sizes.size(); ++d) {
    const int64_t begin = std::max(offsets[d], other.offsets[d]);
    if (begin >= std::min(offsets[d] + sizes[d], other.offsets[d] + other.sizes[d])) return false;
  }
  return true;
}

std::string Box::ToString() const {
  std::vector<std::string> ranges;
  for (size_t d = 0; d < std::min(offsets.size(), sizes.size()); ++d) {
    int64_t end;
    const bool overflow = __builtin_add_overflow(offsets[d], sizes[d], &end);
    ranges.push_back(overflow ? absl::StrCat(offsets[d], ":+", sizes[d]) : absl::StrCat(offsets[d], ":", end));
  }
  return absl::StrCat("[", absl::StrJoin(ranges, ", "), "]");
}

Box Intersection(const Box& a, const Box& b) {
  Box both = a;
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    both.offsets[d] = std::max(a.offsets[d], b.offsets[d]);
    const int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    both.sizes[d] = std::max<int64_t>(end - both.offsets[d], 0);
  }
  return both;
}

LocalBox LocalBox::Part(const Box& inner) const {
  LocalBox part{inner, offset, strides};
  for (size_t d = 0; d < strides.size(); ++d) part.offset += (inner.offsets[d] - box.offsets[d]) * strides[d];
  return part;
}

absl::Status ValidateShape(const Dims& shape) {
  if (shape.size() > kMaxTensorDims) {
    return absl::ResourceExhaustedError(
        absl::StrCat("box: a tensor of ", shape.size(), " dimensions; at most ", kMaxTensorDims, " are supported"));
  }
  int64_t elements = 1;
  for (const int64_t size : shape) {
    if (size < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("box: the size ", size, " in the shape [", absl::StrJoin(shape, ", "), "]; give 0 or more"));
    }
    if (__builtin_mul_overflow(elements, std::max<int64_t>(size, 1), &elements) || elements > kMaxElements) {
      return absl::ResourceExhaustedError(absl::StrCat("box: the sizes of the shape [", absl::StrJoin(shape, ", "),
                                                       "] make more than 2^62 elements, the most that is supported"));
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateBox(const Box& box, const Dims& shape) {
  RETURN_IF_ERROR(ValidateShape(shape));
  if (box.offsets.size() != shape.size() || box.sizes.size() != shape.size()) {
    return absl::InvalidArgumentError(absl::StrCat("box: ", box.offsets.size(), " offsets and ", box.sizes.size(),
                                                   " sizes for a tensor of ", shape.size(),
                                                   " dimensions; give one of each for each dimension"));
  }
  for (size_t d = 0; d < shape.size(); ++d) {
    const int64_t offset = box.offsets[d], size = box.sizes[d];
    if (offset < 0 || size < 0) {
      return absl::InvalidArgumentError(absl::StrCat("box: ", box.ToString(), " has the negative ",
                                                     size < 0 ? "size " : "offset ", size < 0 ? size : offset,
                                                     " along dimension ", d, "; give 0 or more"));
    }
    if (offset > shape[d] || size > shape[d] - offset) {
      return absl::InvalidArgumentError(absl::StrCat("box: ", box.ToString(), " is not inside the shape [",
                                                     absl::StrJoin(shape, ", "), "]: see dimension ", d));
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateLocalBox(const LocalBox& local, const Dims& shape) {
  RETURN_IF_ERROR(ValidateBox(local.box, shape));
  const auto bad = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("box: ", local.box.ToString(), " at offset ", local.offset,
                                                   " with strides [", absl::StrJoin(local.strides, ", "), "]: ", what));
  };
  if (local.strides.size() != shape.size()) return bad("give one stride for each dimension");
  if (local.offset < 0) return bad("the offset must be 0 or more");
  if (absl::c_any_of(local.strides, [](int64_t s) { return s < 0; })) return bad("strides must be 0 or more");
  if (local.box.IsEmpty()) return absl::OkStatus();
  const auto extent = Extent(local.box.sizes, local.strides);
  if (!extent.has_value() || local.offset > kMaxElements - *extent) {
    return absl::ResourceExhaustedError(absl::StrCat("box: ", local.box.ToString(), " at offset ", local.offset,
                                                     " with strides [", absl::StrJoin(local.strides, ", "),
                                                     "] ends beyond element 2^62 of the memory"));
  }
  if (!IsInjective(local.box.sizes, local.strides)) return bad("two elements share a place; use larger strides");
  return absl::OkStatus();
}

Dims RowMajorStrides(const Dims& sizes) {
  Dims strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= std::max<int64_t>(sizes[d], 1)) strides[d] = stride;
  return strides;
}

std::vector<Box> BoxesOfFlatRange(const Dims& sizes, int64_t begin, int64_t end) {
  std::vector<Box> boxes;
  AppendFlatRange(sizes, RowMajorStrides(sizes), 0, begin, end, Box::Whole(sizes), &boxes);
  return boxes;
}

std::optional<int64_t> NextInBox(const Dims& sizes, const Box& box, int64_t index) {
  const Dims strides = RowMajorStrides(sizes);
  // The first d dimensions agree with `index`; `carry` is where the last of them that could step on would lie.
  int64_t prefix = 0, start = 0;  // `start`: the box's first corner, of the dimensions not yet looked at
  std::optional<int64_t> carry;
  for (size_t d = 0; d < sizes.size(); ++d) start += box.offsets[d] * strides[d];
  for (size_t d = 0; d < sizes.size(); ++d) {
    const int64_t at = (index - prefix) / strides[d], end = box.offsets[d] + box.sizes[d];
    if (at < box.offsets[d]) return prefix + start;
    if (at >= end) return carry;
    start -= box.offsets[d] * strides[d];
    if (at + 1 < end) carry = prefix + (at + 1) * strides[d] + start;
    prefix += at * strides[d];
  }
  return index == prefix ? std::optional<int64_t>(index) : carry;
}

}  // namespace shardmesh
