// BucketUses: the buckets of the parameter window that one trainer uses, of a job with bucket residency. They are
// dropped with the object, which lives as long as the trainer's connection: one that dies holds nothing.
//
// For one thread.
#pragma once

#include <map>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "worker/job/job_shard.h"

namespace shardmesh {

class BucketUses {
 public:
  explicit BucketUses(std::shared_ptr<JobShard> shard) : shard_(std::move(shard)) {}
  ~BucketUses();
  BucketUses(const BucketUses&) = delete;
  BucketUses& operator=(const BucketUses&) = delete;

  // One more use. Errors of StepBuckets::Acquire. ResourceExhausted: more than 1 + prefetch_buckets buckets.
  absl::Status Add(int bucket);
  // One less. FailedPrecondition: there is none.
  absl::Status Drop(int bucket);
  // FailedPrecondition: this trainer does not use it.
  absl::Status CheckUsed(int bucket) const;

 private:
  const std::shared_ptr<JobShard> shard_;
  std::map<int, int> uses_;  // bucket -> how many, 1 or more
};

}  // namespace shardmesh
