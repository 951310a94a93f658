// What one shard of a layout reads from the shards of another one of the same model: interval arithmetic, no bytes.
// The cost is that of the result: it does not grow with the number of tensors or shards of either. Pure, thread-safe.
//
// For views that are no layouts (placements, boxes) there is core/view/reshard.h.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "core/layout/bucket_layout.h"

namespace shardmesh {

inline constexpr size_t kMaxShardCopies = size_t{1} << 20;

// Elements [source_offset, + num_elements) of a source shard's part of a bucket become [destination_offset, ...) of the
// destination shard's. Offsets count from the start of the shard in that bucket.
struct ShardCopy {
  int32_t source_bucket = 0, destination_bucket = 0;
  int64_t source_shard = 0;
  int64_t source_offset = 0, destination_offset = 0;
  int64_t num_elements = 0;
};

// Fills shard `shard` of `to` from the shards of `from`: every element of every tensor once, padding not at all, by
// destination bucket and offset; copies that continue each other are one. Bounded by the number of granules' runs: at
// most (tensors that the shard holds) + (shards of `from` that they lie on) copies.
// Between blocks and another order there is at most one copy more for each row of a block.
// NotFound: a tensor of the shard is missing in `from`. InvalidArgument: it has another shape or space there.
// OutOfRange: no such shard. ResourceExhausted: more than kMaxShardCopies.
absl::StatusOr<std::vector<ShardCopy>> CopiesInto(const BucketLayout& from, const BucketLayout& to, int64_t shard);

// OK when CopiesInto answers for every shard of `to`: the errors above, of the first tensor that has one. Its cost is
// that of the number of tensors.
absl::Status CheckReshard(const BucketLayout& from, const BucketLayout& to);

}  // namespace shardmesh
