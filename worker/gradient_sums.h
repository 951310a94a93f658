// GradientSums: where a worker of a job with bucket residency keeps the summed gradients of its shard, in fp32, from
// the reduction of a bucket until the step that reads them. They are the redo log of that step: they lie in memory that
// is held like the shard's, and are complete before the step is decided.
//
// Frozen buckets have none. Movable. Different elements may be written by different threads.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/layout.h"
#include "worker/memory.h"

namespace shardmesh {

class GradientSums {
 public:
  // Of a job with full residency: nothing. ResourceExhausted: not enough memory.
  static absl::StatusOr<GradientSums> Open(Memory& memory, const std::string& name, const Plan& plan, int shard);

  // Bytes of the segment that Open asks for.
  static int64_t NumBytes(const Plan& plan, int shard);

  // Of an element of the shard, counted from its bucket's start; those behind it in the shard follow.
  // REQUIRES: bucket residency, a bucket that is not frozen.
  float* At(int bucket, int64_t element) const {
    return reinterpret_cast<float*>(segment_.data()) + first_[bucket] + element;
  }
  int64_t num_bytes() const { return segment_.num_bytes(); }

 private:
  Segment segment_;
  std::vector<int64_t> first_;  // by bucket: elements from the data to where the bucket's first would lie
};

}  // namespace shardmesh
