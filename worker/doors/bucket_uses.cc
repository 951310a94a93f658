#include "worker/doors/bucket_uses.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"
#include "worker/control/residency.h"

namespace shardmesh {
namespace {

Slot First(absl::Span<const int> slots) {
  return Slot(slots.empty() ? 0 : *std::min_element(slots.begin(), slots.end()));
}

}  // namespace

BucketUses::BucketUses(std::shared_ptr<JobShard> shard, absl::Span<const int> slots, bool resumed)
    : shard_(std::move(shard)), slot_(First(slots)), resumed_(resumed) {
  if (!resumed_ || !shard_->plan().bucketed()) return;
  const int buckets = static_cast<int>(shard_->plan().buckets().size());
  for (int b = 0; b < buckets; ++b) {
    if (const int count = UsesIn(shard_->protocol().buckets().UsesOf(b, slot_)); count > 0) uses_[b] = count;
  }
}

bool BucketUses::IsDone(int bucket, uint64_t request) const {
  const bool known = bucket >= 0 && bucket < static_cast<int>(shard_->plan().buckets().size());
  if (!resumed_ || !known || request == 0) return false;
  const uint64_t word = shard_->protocol().buckets().UsesOf(bucket, slot_);
  return word == UseWord(request, UsesIn(word));
}

absl::Status BucketUses::Say(int bucket, uint64_t request, int count) {
  RETURN_IF_ERROR(shard_->protocol().buckets().Use(bucket, slot_, UseWord(request, count)));
  uses_[bucket] = count;
  if (count == 0) uses_.erase(bucket);
  return absl::OkStatus();
}

absl::Status BucketUses::Add(int bucket, uint64_t request) {
  if (IsDone(bucket, request)) return absl::OkStatus();
  const int most = 1 + shard_->spec().prefetch_buckets;
  const auto now = uses_.find(bucket);
  if (now == uses_.end() && static_cast<int>(uses_.size()) >= most) {
    const std::string held = absl::StrJoin(
        uses_, ",", [](std::string* out, const std::pair<const int, int>& use) { absl::StrAppend(out, use.first); });
    return absl::ResourceExhaustedError(absl::StrCat("bucket ", bucket, " would be one more than the ", most,
                                                     " that a trainer of job ", shard_->spec().name, " may use (", held,
                                                     "); release one first, or create the job with more "
                                                     "prefetch_buckets"));
  }
  const int count = now == uses_.end() ? 0 : now->second;
  if (count == kMaxUses) {
    return absl::ResourceExhaustedError(absl::StrCat("bucket ", bucket, " of job ", shard_->spec().name, " has ", count,
                                                     " uses of this trainer already; release some first"));
  }
  return Say(bucket, request, count + 1);
}

absl::Status BucketUses::CheckUsed(int bucket) const {
  if (uses_.count(bucket) > 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("bucket ", bucket, " of job ", shard_->spec().name,
                                                    " is not in use by this trainer; acquire it first"));
}

absl::Status BucketUses::Drop(int bucket, uint64_t request) {
  if (IsDone(bucket, request)) return absl::OkStatus();
  RETURN_IF_ERROR(CheckUsed(bucket));
  return Say(bucket, request, uses_[bucket] - 1);
}

void BucketUses::TakeBack(int bucket) {
  if (CheckUsed(bucket).ok()) Say(bucket, 0, uses_[bucket] - 1).IgnoreError();
}

}  // namespace shardmesh
