// BucketUses: the buckets of the parameter window that one attached session uses, of a job with bucket residency. They
// stay until the session's slots are given back (GiveSlotsBack): a trainer that dies holds nothing. They lie in memory
// that outlives the worker where it is retained: the session goes on with them at the worker's next incarnation.
//
// For one thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "worker/job/job_shard.h"

namespace shardmesh {

class BucketUses {
 public:
  // `slots`: the session's; of a job whose slots are pulled, its seat. `resumed`: it may use buckets already, and
  // repeats the request that the last incarnation did not answer.
  BucketUses(std::shared_ptr<JobShard> shard, absl::Span<const int> slots, bool resumed);
  BucketUses(const BucketUses&) = delete;
  BucketUses& operator=(const BucketUses&) = delete;

  // One more use, since the session's `request` of that number says so. Errors of StepBuckets::Acquire.
  // ResourceExhausted: more than 1 + prefetch_buckets buckets, or more than kMaxUses uses of one.
  absl::Status Add(int bucket, uint64_t request);
  // One less. FailedPrecondition: there is none.
  absl::Status Drop(int bucket, uint64_t request);
  // What a request added that comes to nothing. Repeated it is one that was never made.
  void TakeBack(int bucket);
  // FailedPrecondition: this trainer does not use it.
  absl::Status CheckUsed(int bucket) const;

 private:
  // Whether the last incarnation did that already.
  bool IsDone(int bucket, uint64_t request) const;
  absl::Status Say(int bucket, uint64_t request, int count);

  const std::shared_ptr<JobShard> shard_;
  const Slot slot_;  // under which its uses are counted
  const bool resumed_;
  std::map<int, int> uses_;  // bucket -> how many, 1 or more
};

}  // namespace shardmesh
