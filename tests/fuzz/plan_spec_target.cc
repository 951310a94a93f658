#include <cstdio>
#include <cstdlib>
#include <set>

#include "client/cli/plan/layout_spec.h"
#include "core/layout/bucket_layout.h"
#include "core/layout/layout_picture.h"
#include "tests/fuzz/targets.h"

namespace shardmesh::fuzz {
namespace {

constexpr int64_t kMaxCheckedShards = 64;

void Check(bool promise, const char* what) {
  if (promise) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

// Elements of a shard's stretches.
int64_t CheckShard(const BucketLayout& layout, int bucket, int64_t shard) {
  int64_t end = 0, held = 0;
  for (const Stretch& stretch : layout.StretchesOf(bucket, shard)) {
    Check(stretch.num_elements > 0 && stretch.shard_offset >= end, "stretches ascend");
    end = stretch.shard_offset + stretch.num_elements;
    held += stretch.num_elements;
    const auto [first, last] = layout.ShardsOf(stretch.tensor);
    Check(first <= shard && shard <= last, "a tensor's shards are those that hold it");
  }
  Check(end <= layout.buckets()[bucket].shard_elements, "a stretch lies in its shard");
  return held;
}

void CheckBucket(const BucketLayout& layout, int index) {
  const LayoutBucket& bucket = layout.buckets()[index];
  int64_t elements = 0, padded = 0;
  for (const int32_t tensor : bucket.tensors) {
    elements += layout.places()[tensor].num_elements;
    padded += layout.places()[tensor].padded_elements;
  }
  Check(bucket.padding == bucket.num_elements - elements, "padding is what no tensor has");
  Check(bucket.padding >= 0 && bucket.num_elements <= kMaxLayoutElements, "within the limits");
  if (layout.num_shards() > kMaxCheckedShards) {
    CheckShard(layout, index, 0);
    CheckShard(layout, index, layout.num_shards() - 1);
    return;
  }
  int64_t held = 0;
  for (int64_t shard = 0; shard < layout.num_shards(); ++shard) held += CheckShard(layout, index, shard);
  Check(held == padded, "every granule has one holder");
}

}  // namespace

void PlanSpec(absl::string_view input) {
  absl::StatusOr<LayoutSpec> spec = ParseLayoutSpec(input);
  if (!spec.ok()) return;
  const absl::StatusOr<StoredPlan> plan = PlanOf(*spec);
  if (!plan.ok()) return;
  const BucketLayout& layout = plan->layout();
  std::set<int32_t> placed;
  for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
    CheckBucket(layout, b);
    for (const int32_t tensor : layout.buckets()[b].tensors) Check(placed.insert(tensor).second, "one place a tensor");
  }
  Check(PlanOf(*spec)->hash() == plan->hash(), "a plan is a function");
  Check(!Picture(*plan).empty(), "a plan can be drawn");
}

}  // namespace shardmesh::fuzz
