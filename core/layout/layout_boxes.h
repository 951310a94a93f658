// The boxes of a shard: which N-D boxes of which tensors lie where in one shard of a layout, for whoever thinks in
// tensors (checkpoints, views, people). Pure and thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "core/layout/bucket_layout.h"
#include "core/view/box.h"

namespace shardmesh {

// A box of a tensor; its place counts from the start of the shard in its bucket.
struct ShardBox {
  int32_t tensor = 0;
  int32_t bucket = 0;
  LocalBox local;
};

// What a shard's stretch of a tensor holds: each block, or the boxes of a row-major range, whose end may reach into
// padding. `num_elements`: of the tensor. REQUIRES: a stretch of that tensor, in whole granules.
std::vector<LocalBox> BoxesOfStretch(const LayoutTensor& tensor, int64_t num_elements, const Stretch& stretch);

inline constexpr int64_t kMaxShardBoxes = int64_t{1} << 20;

// All boxes of one shard, by bucket and offset; tied tensors are left out, padding too. OutOfRange: no such shard.
// ResourceExhausted: more than kMaxShardBoxes (each block is one).
absl::StatusOr<std::vector<ShardBox>> BoxesOfShard(const BucketLayout& layout, int64_t shard);

}  // namespace shardmesh
