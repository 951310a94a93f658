// A picture of a layout that a person can read: totals, buckets with their padding, and what each shard holds of a
// bucket, as a bar. Pure and thread-safe.
#pragma once

#include <string>

#include "core/layout/bucket_layout.h"
#include "core/layout/stored_plan.h"

namespace shardmesh {

// A bar stands for a shard: each column is the letter of the tensor that has most of it, "." where all of it is padding
// (in a bucket of whole matrices also where a shard is shorter than the largest).
//
//   bucket 0  bf16  flat granules of 256  2 x 768 elements, padding 0.00%
//     shard 0  ranks 0,2  |aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa|   a embed.w
//     shard 1  ranks 1,3  |aaaaaaaaaaaaaaaabbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb|   a embed.w b head.w
// Tensors that lie in no bucket of their own (tied ones, those without elements) are listed. At most 16 buckets with 16
// shards each are drawn; what is left out is said.
std::string Picture(const StoredPlan& plan);

}  // namespace shardmesh
