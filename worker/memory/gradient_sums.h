// GradientSums: where a worker keeps summed gradients of its shard, in fp32, until the step that reads them. They are
// the redo log of that step: they lie in memory that is held like the shard's, and are complete before the step is
// decided.
//   pulled slots      plan.slots().num_partials() copies: the sum of some slots each (pulled_words.h)
//   bucket residency  else one copy: each bucket is summed when all slots have declared it
//
// Frozen buckets have none. Movable. Different elements may be written by different threads.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/job/plan.h"
#include "worker/memory/memory.h"

namespace shardmesh {

class GradientSums {
 public:
  // Of a job that has none: nothing. ResourceExhausted: not enough memory.
  static absl::StatusOr<GradientSums> Open(Memory& memory, const std::string& name, const Plan& plan, int shard);

  // Whether a job has them.
  static bool Has(const Plan& plan) { return plan.bucketed() || plan.pulled(); }
  // Bytes of the segment that Open asks for.
  static int64_t NumBytes(const Plan& plan, int shard);

  // Of an element of the shard, counted from its bucket's start; those behind it in the shard follow.
  // REQUIRES: a job that has them, a bucket that is not frozen, one of the copies.
  float* At(int bucket, int64_t element, int copy = 0) const {
    return reinterpret_cast<float*>(segment_.data() + copy * stride_) + first_[bucket] + element;
  }
  int64_t num_bytes() const { return segment_.num_bytes(); }
  const Segment& segment() const { return segment_; }

 private:
  Segment segment_;
  int64_t stride_ = 0;          // bytes from copy to copy
  std::vector<int64_t> first_;  // by bucket: elements from the copy to where the bucket's first would lie
};

}  // namespace shardmesh
