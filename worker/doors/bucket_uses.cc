#include "worker/doors/bucket_uses.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"

namespace shardmesh {

BucketUses::~BucketUses() {
  for (const auto& [bucket, count] : uses_) {
    for (int i = 0; i < count; ++i) shard_->protocol().buckets().Release(bucket);
  }
}

absl::Status BucketUses::Add(int bucket) {
  const int most = 1 + shard_->spec().prefetch_buckets;
  if (uses_.count(bucket) == 0 && static_cast<int>(uses_.size()) >= most) {
    const std::string held = absl::StrJoin(
        uses_, ",", [](std::string* out, const std::pair<const int, int>& use) { absl::StrAppend(out, use.first); });
    return absl::ResourceExhaustedError(absl::StrCat("bucket ", bucket, " would be one more than the ", most,
                                                     " that a trainer of job ", shard_->spec().name, " may use (", held,
                                                     "); release one first, or create the job with more "
                                                     "prefetch_buckets"));
  }
  RETURN_IF_ERROR(shard_->protocol().buckets().Acquire(bucket));
  ++uses_[bucket];
  return absl::OkStatus();
}

absl::Status BucketUses::CheckUsed(int bucket) const {
  if (uses_.count(bucket) > 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("bucket ", bucket, " of job ", shard_->spec().name,
                                                    " is not in use by this trainer; acquire it first"));
}

absl::Status BucketUses::Drop(int bucket) {
  RETURN_IF_ERROR(CheckUsed(bucket));
  if (--uses_[bucket] == 0) uses_.erase(bucket);
  shard_->protocol().buckets().Release(bucket);
  return absl::OkStatus();
}

}  // namespace shardmesh
