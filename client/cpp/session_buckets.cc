// Of Session: buckets, of jobs with bucket residency: what this session uses and has declared, and which pages of the
// windows may be touched.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "client/cpp/session.h"
#include "core/base/clock.h"
#include "core/base/status.h"

namespace shardmesh {

absl::StatusOr<int> Session::bucket(absl::string_view name) const {
  ASSIGN_OR_RETURN(const int tensor, job_->Resolve(name));
  return job_->plan().placements()[tensor].bucket;
}

absl::Status Session::CheckBucket(int bucket) const {
  if (bucket >= 0 && bucket < static_cast<int>(uses_.size())) return CheckHasWeights();
  return absl::InvalidArgumentError(
      absl::StrCat("bucket ", bucket, " is none of job ", job_->spec().name, "'s: 0 to ", uses_.size() - 1));
}

absl::Status Session::OpenBuckets() {
  uses_.assign(job_->plan().buckets().size(), 0);
  prefetched_.assign(uses_.size(), false);
  declared_.assign(uses_.size(), false);
  for (int b = 0; b < static_cast<int>(uses_.size()); ++b) RETURN_IF_ERROR(GuardWeights(b, /*accessible=*/false));
  return absl::OkStatus();
}

absl::Status Session::GuardWeights(int bucket, bool accessible) {
  if (!guarded()) return absl::OkStatus();
  const int64_t begin = job_->plan().buckets()[bucket].weight_offset, bytes = job_->plan().WeightPageBytes(bucket);
  if (shown_.mapped()) RETURN_IF_ERROR(shown_.Guard(begin, bytes, accessible));
  return parameters_.Guard(begin, bytes, accessible);
}

absl::Status Session::GuardGradients(int bucket, bool accessible) {
  if (!guarded()) return absl::OkStatus();
  for (Segment& window : gradients_) {
    RETURN_IF_ERROR(window.Guard(job_->plan().buckets()[bucket].gradient_offset, job_->plan().GradientPageBytes(bucket),
                                 accessible));
  }
  return absl::OkStatus();
}

absl::Status Session::Prefetch(int bucket) {
  RETURN_IF_ERROR(CheckBucket(bucket));
  if (!bucketed() || uses_[bucket] > 0 || prefetched_[bucket]) return absl::OkStatus();
  RETURN_IF_ERROR(StartFetch(bucket));
  prefetched_[bucket] = true;
  return absl::OkStatus();
}

absl::Status Session::Acquire(int bucket, absl::Duration timeout) {
  RETURN_IF_ERROR(CheckBucket(bucket));
  if (!bucketed()) return absl::OkStatus();
  if (uses_[bucket] == 0) {
    RETURN_IF_ERROR(Fetch(bucket, prefetched_[bucket], timeout));
    prefetched_[bucket] = false;
    RETURN_IF_ERROR(GuardWeights(bucket, /*accessible=*/true));
  }
  ++uses_[bucket];
  return absl::OkStatus();
}

absl::Status Session::Release(int bucket) {
  RETURN_IF_ERROR(CheckBucket(bucket));
  if (!bucketed()) return absl::OkStatus();
  if (uses_[bucket] == 0 && !prefetched_[bucket]) {
    return absl::FailedPreconditionError(absl::StrCat("bucket ", bucket, " of job ", job_->spec().name,
                                                      " is not in use by this session; acquire it first"));
  }
  if (uses_[bucket] > 1) {
    --uses_[bucket];
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(GuardWeights(bucket, /*accessible=*/false));
  uses_[bucket] = 0;
  prefetched_[bucket] = false;
  return Drop(bucket);
}

absl::Status Session::DeclareBucket(int bucket, absl::Duration timeout) {
  RETURN_IF_ERROR(CheckBucket(bucket));
  if (!bucketed()) return absl::OkStatus();
  if (job_->plan().buckets()[bucket].frozen) {
    return absl::InvalidArgumentError(absl::StrCat("bucket ", bucket, " of job ", job_->spec().name,
                                                   " is of frozen parameters, which have no gradients"));
  }
  v1::DeclareBucketRequest request;
  request.set_job(job_->spec().name);
  request.set_epoch(job_->epoch().value());
  request.set_step(committed_.value() + 1);
  request.set_bucket(bucket);
  for (Slot slot : slots_) request.add_slots(slot.value());
  const absl::Status status = SendBucket(request, declared_[bucket], timeout);
  if (!status.ok() && !absl::IsDeadlineExceeded(status)) return status;
  if (!declared_[bucket]) RETURN_IF_ERROR(GuardGradients(bucket, /*accessible=*/false));
  declared_[bucket] = true;
  return status;
}

absl::Status Session::DeclareRest(absl::Time deadline) {
  for (int b = 0; b < static_cast<int>(declared_.size()) && bucketed(); ++b) {
    if (declared_[b] || job_->plan().buckets()[b].frozen) continue;
    RETURN_IF_ERROR(DeclareBucket(b, std::max(deadline - MonotonicNow(), absl::Milliseconds(1))));
  }
  return absl::OkStatus();
}

absl::Status Session::BeginNextStep(shardmesh::Step committed) {
  committed_ = committed;
  for (int b = 0; b < static_cast<int>(declared_.size()); ++b) {
    if (!declared_[b]) continue;
    declared_[b] = false;
    RETURN_IF_ERROR(GuardGradients(b, /*accessible=*/true));
  }
  return absl::OkStatus();
}

}  // namespace shardmesh
