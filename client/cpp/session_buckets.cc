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
  RETURN_IF_ERROR(uses_.Check(bucket));
  return CheckHasWeights();
}

absl::Status Session::OpenBuckets() {
  declared_.assign(job_->plan().buckets().size(), false);
  return uses_.Open(job_->spec(), static_cast<int>(declared_.size()), this);
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
  return uses_.Prefetch(bucket);
}

absl::Status Session::Acquire(int bucket, absl::Duration timeout) {
  RETURN_IF_ERROR(CheckBucket(bucket));
  return uses_.Acquire(bucket, timeout);
}

absl::Status Session::Release(int bucket) {
  RETURN_IF_ERROR(CheckBucket(bucket));
  return uses_.Release(bucket);
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
