#include "core/layout/layout_boxes.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

// The blocks [first, last) of a tensor of `block` granules; blocks of a matrix are row-major, matrices follow each
// other.
class Blocks {
 public:
  explicit Blocks(const LayoutTensor& tensor)
      : shape_(tensor.shape.begin(), tensor.shape.end()),
        side_(tensor.granule.size),
        columns_((shape_.back() + side_ - 1) / side_),
        per_matrix_((shape_[shape_.size() - 2] + side_ - 1) / side_ * columns_) {}

  Box At(int64_t block) const {
    const size_t dims = shape_.size();
    Box box;
    box.offsets.resize(dims);
    box.sizes.assign(dims, 1);
    int64_t matrix = block / per_matrix_;
    for (size_t d = dims - 2; d-- > 0;) {
      box.offsets[d] = matrix % shape_[d];
      matrix /= shape_[d];
    }
    box.offsets[dims - 2] = block % per_matrix_ / columns_ * side_;
    box.offsets[dims - 1] = block % per_matrix_ % columns_ * side_;
    for (const size_t d : {dims - 2, dims - 1}) box.sizes[d] = std::min(side_, shape_[d] - box.offsets[d]);
    return box;
  }

 private:
  const Dims shape_;
  const int64_t side_, columns_, per_matrix_;
};

std::vector<LocalBox> BlocksOf(const LayoutTensor& tensor, const Stretch& stretch) {
  const Blocks blocks(tensor);
  const int64_t size = tensor.granule.size * tensor.granule.size, first = stretch.first_element / size;
  // A block at the edge has rows as long as those of all others.
  Dims strides(tensor.shape.size(), size);
  strides[strides.size() - 2] = tensor.granule.size;
  strides.back() = 1;
  std::vector<LocalBox> boxes;
  for (int64_t i = 0; i < stretch.num_elements / size; ++i) {
    boxes.push_back({blocks.At(first + i), stretch.shard_offset + i * size, strides});
  }
  return boxes;
}

std::vector<LocalBox> RangesOf(const LayoutTensor& tensor, int64_t num_elements, const Stretch& stretch) {
  const int64_t end = std::min(stretch.first_element + stretch.num_elements, num_elements);
  int64_t at = stretch.shard_offset;
  std::vector<LocalBox> boxes;
  for (Box& box :
       BoxesOfFlatRange(Dims(tensor.shape.begin(), tensor.shape.end()), std::min(stretch.first_element, end), end)) {
    const int64_t elements = box.NumElements();
    Dims strides = RowMajorStrides(box.sizes);
    boxes.push_back({std::move(box), at, std::move(strides)});
    at += elements;
  }
  return boxes;
}

// Blocks alone are boxes without a bound: all others are a few for each tensor.
absl::Status CheckNumBlocks(const BucketLayout& layout) {
  int64_t blocks = 0;
  for (const LayoutBucket& bucket : layout.buckets()) {
    if (bucket.kind == GranuleKind::kBlock) blocks += bucket.shard_elements / bucket.granule_elements;
  }
  if (blocks <= kMaxShardBoxes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("a shard of ", blocks, " blocks; at most ", kMaxShardBoxes,
                                                   " boxes are listed: use more shards or larger blocks"));
}

}  // namespace

std::vector<LocalBox> BoxesOfStretch(const LayoutTensor& tensor, int64_t num_elements, const Stretch& stretch) {
  return tensor.granule.kind == GranuleKind::kBlock ? BlocksOf(tensor, stretch)
                                                    : RangesOf(tensor, num_elements, stretch);
}

absl::StatusOr<std::vector<ShardBox>> BoxesOfShard(const BucketLayout& layout, int64_t shard) {
  if (shard < 0 || shard >= layout.num_shards()) {
    return absl::OutOfRangeError(absl::StrCat("shard ", shard, "; this layout has 0 to ", layout.num_shards() - 1));
  }
  RETURN_IF_ERROR(CheckNumBlocks(layout));
  std::vector<ShardBox> boxes;
  for (int32_t b = 0; b < static_cast<int32_t>(layout.buckets().size()); ++b) {
    const std::vector<Stretch> stretches = layout.StretchesOf(b, shard);
    for (const Stretch& stretch : stretches) {
      const int64_t num_elements = layout.places()[stretch.tensor].num_elements;
      for (LocalBox& local : BoxesOfStretch(layout.tensors()[stretch.tensor], num_elements, stretch)) {
        boxes.push_back({stretch.tensor, b, std::move(local)});
      }
    }
  }
  return boxes;
}

}  // namespace shardmesh
