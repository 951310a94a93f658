#include "client/cpp/used_buckets.h"

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh {

absl::Status UsedBuckets::Open(const JobSpec& job, int num_buckets, BucketWindow* window) {
  job_ = &job;
  window_ = window;
  uses_.assign(num_buckets, 0);
  prefetched_.assign(num_buckets, false);
  for (int b = 0; b < num_buckets; ++b) RETURN_IF_ERROR(window_->GuardWeights(b, /*accessible=*/false));
  return absl::OkStatus();
}

absl::Status UsedBuckets::Check(int bucket) const {
  if (bucket >= 0 && bucket < static_cast<int>(uses_.size())) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("bucket ", bucket, " is none of job ", job_->name, "'s: 0 to ", uses_.size() - 1));
}

absl::Status UsedBuckets::Prefetch(int bucket) {
  if (job_->residency == Residency::kFull || uses_[bucket] > 0 || prefetched_[bucket]) return absl::OkStatus();
  RETURN_IF_ERROR(window_->StartFetch(bucket));
  prefetched_[bucket] = true;
  return absl::OkStatus();
}

absl::Status UsedBuckets::Acquire(int bucket, absl::Duration timeout) {
  if (job_->residency == Residency::kFull) return absl::OkStatus();
  if (uses_[bucket] == 0) {
    RETURN_IF_ERROR(window_->Fetch(bucket, prefetched_[bucket], timeout));
    prefetched_[bucket] = false;
    RETURN_IF_ERROR(window_->GuardWeights(bucket, /*accessible=*/true));
  }
  ++uses_[bucket];
  return absl::OkStatus();
}

absl::Status UsedBuckets::Release(int bucket) {
  if (job_->residency == Residency::kFull) return absl::OkStatus();
  if (uses_[bucket] == 0 && !prefetched_[bucket]) {
    return absl::FailedPreconditionError(
        absl::StrCat("bucket ", bucket, " of job ", job_->name, " is not in use by this session; acquire it first"));
  }
  if (uses_[bucket] > 1) {
    --uses_[bucket];
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(window_->GuardWeights(bucket, /*accessible=*/false));
  uses_[bucket] = 0;
  prefetched_[bucket] = false;
  return window_->Drop(bucket);
}

}  // namespace shardmesh
