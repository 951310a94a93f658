// UsedBuckets: the buckets of the parameter window that a session of a job with bucket residency uses
// (Session::Acquire, PullingSession::Acquire). With full residency nothing is in use, and its calls do nothing. For one
// thread.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "core/job/job.h"

namespace shardmesh {

// What a kind of session does about a bucket of its parameter window.
class BucketWindow {
 public:
  virtual ~BucketWindow() = default;
  virtual absl::Status StartFetch(int bucket) = 0;
  // `started`: StartFetch of it was called since it was dropped last.
  virtual absl::Status Fetch(int bucket, bool started, absl::Duration timeout) = 0;
  virtual absl::Status Drop(int bucket) = 0;
  // With ClientOptions::guard_buckets: whether its pages may be touched.
  virtual absl::Status GuardWeights(int bucket, bool accessible) = 0;
};

class UsedBuckets {
 public:
  // None is in use, or may be touched. `window` is borrowed, and called from the others. Errors of GuardWeights.
  absl::Status Open(const JobSpec& job, int num_buckets, BucketWindow* window);

  // As Session's, of a bucket that the job has. Errors are the window's.
  absl::Status Prefetch(int bucket);
  absl::Status Acquire(int bucket, absl::Duration timeout);
  // FailedPrecondition: this session does not use it.
  absl::Status Release(int bucket);
  bool InUse(int bucket) const { return uses_[bucket] > 0; }
  // InvalidArgument: the job has no such bucket.
  absl::Status Check(int bucket) const;

 private:
  const JobSpec* job_ = nullptr;
  BucketWindow* window_ = nullptr;
  std::vector<int> uses_;  // by bucket
  std::vector<bool> prefetched_;
};

}  // namespace shardmesh
