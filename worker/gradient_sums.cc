#include "worker/gradient_sums.h"

#include <algorithm>

#include "core/status.h"

namespace shardmesh {
namespace {

constexpr int kStream = 29;  // of a pass: another than those of shard_storage.cc and host_memory.cc

}  // namespace

int64_t GradientSums::NumBytes(const Plan& plan, int shard) {
  if (!plan.bucketed()) return 0;
  int64_t elements = 0;
  for (const Bucket& bucket : plan.buckets()) elements += bucket.gradients(shard);
  return std::max(elements * static_cast<int64_t>(sizeof(float)), kPageBytes) + StreamOffset(kStream);
}

absl::StatusOr<GradientSums> GradientSums::Open(Memory& memory, const std::string& name, const Plan& plan, int shard) {
  GradientSums sums;
  if (!plan.bucketed()) return sums;
  int64_t before = 0;
  for (const Bucket& bucket : plan.buckets()) {
    sums.first_.push_back(before - bucket.begin(shard));
    before += bucket.gradients(shard);
  }
  ASSIGN_OR_RETURN(sums.segment_, memory.Open(name, NumBytes(plan, shard), StreamOffset(kStream)));
  return sums;
}

}  // namespace shardmesh
