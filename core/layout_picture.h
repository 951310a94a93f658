// A picture of a layout that a person can read: totals, buckets with their padding, and what each shard holds of a
// bucket, as a bar. Pure and thread-safe.
#pragma once

#include <string>

#include "core/bucket_layout.h"

namespace shardmesh {

// A bar stands for a shard: each column is the letter of the tensor that has most of it, "." where all of it is
// padding.
//
//   bucket 0  bf16  flat:256 granules   3 x 2048 elements, padding 5.5%
//     shard 0  |aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaabbbbbbbbbbbbbbbb|   a embed.w  b layer.w
//     shard 1  ...
// At most 16 buckets with 16 shards each are drawn; what is left out is said.
std::string Picture(const BucketLayout& layout);

}  // namespace shardmesh
