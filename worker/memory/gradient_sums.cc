#include "worker/memory/gradient_sums.h"

#include <algorithm>

#include "core/base/status.h"

namespace shardmesh {
namespace {

constexpr int kStream = 29;  // of a pass: another than those of shard_storage.cc and host_memory.cc

int Copies(const Plan& plan) { return plan.pulled() ? plan.slots().num_partials() : 1; }

int64_t CopyBytes(const Plan& plan, int shard) {
  int64_t elements = 0;
  for (const Bucket& bucket : plan.buckets()) elements += bucket.gradients(shard);
  return std::max(elements * static_cast<int64_t>(sizeof(float)), kPageBytes);
}

// Copies are streams of one pass, too.
int64_t Stride(const Plan& plan, int shard) {
  return (CopyBytes(plan, shard) + kPageBytes - 1) / kPageBytes * kPageBytes + StreamOffset(1);
}

}  // namespace

int64_t GradientSums::NumBytes(const Plan& plan, int shard) {
  if (!Has(plan)) return 0;
  return (Copies(plan) - 1) * Stride(plan, shard) + CopyBytes(plan, shard) + StreamOffset(kStream);
}

absl::StatusOr<GradientSums> GradientSums::Open(Memory& memory, const std::string& name, const Plan& plan, int shard) {
  GradientSums sums;
  if (!Has(plan)) return sums;
  int64_t before = 0;
  for (const Bucket& bucket : plan.buckets()) {
    sums.first_.push_back(before - bucket.begin(shard));
    before += bucket.gradients(shard);
  }
  sums.stride_ = Stride(plan, shard);
  ASSIGN_OR_RETURN(sums.segment_, memory.Open(name, NumBytes(plan, shard), StreamOffset(kStream)));
  return sums;
}

}  // namespace shardmesh
