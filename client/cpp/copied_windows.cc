#include "client/cpp/copied_windows.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "local/descriptor/fd.h"

namespace shardmesh {

absl::StatusOr<Segment> MapToDropWrites(const Segment& weights) {
  UniqueFd fd(dup(weights.fd()));
  if (!fd.valid()) return absl::ResourceExhaustedError("no descriptor for a second mapping of the weights");
  return Segment::Map(std::move(fd), weights.num_bytes(), weights.data_offset(), Segment::Access::kCopyOnWrite);
}

std::vector<absl::string_view> PartsOf(const Plan& plan, const char* window, int shard) {
  std::vector<absl::string_view> parts;
  const int64_t width = BytesPerElement(plan.gradient_format());
  for (const Bucket& bucket : plan.buckets()) {
    parts.emplace_back(window + bucket.gradient_offset + bucket.begin(shard) * width, bucket.gradients(shard) * width);
  }
  return parts;
}

absl::StatusOr<Step> PullWeights(const Job& job, Rank rank, int slot, std::optional<int> bucket, char* window,
                                 absl::Time deadline) {
  const Plan& plan = job.plan();
  v1::PullRequest request;
  request.set_job(job.spec().name);
  request.set_epoch(job.epoch().value());
  request.set_for_slot(slot);
  if (bucket.has_value()) request.set_bucket(*bucket);
  const int64_t expected = bucket.has_value() ? plan.buckets()[*bucket].weight_bytes : plan.version_bytes();
  const auto begin = [&](const v1::PullHeader& header) -> absl::Status {
    if (header.plan_hash() == plan.hash() && header.total_bytes() == expected) return absl::OkStatus();
    return absl::AbortedError(absl::StrCat("the weights have plan ", header.plan_hash(), " and ", header.total_bytes(),
                                           " bytes, this client ", plan.hash(), " and ", expected,
                                           ": the job is at a later epoch; open it again"));
  };
  size_t at = static_cast<size_t>(bucket.value_or(0));
  int64_t in_bucket = 0;
  const auto data = [&](absl::string_view bytes) -> absl::Status {
    while (!bytes.empty()) {
      const Bucket& bucket = plan.buckets()[at];
      const int64_t take = std::min<int64_t>(static_cast<int64_t>(bytes.size()), bucket.weight_bytes - in_bucket);
      std::memcpy(window + bucket.weight_offset + in_bucket, bytes.data(), static_cast<size_t>(take));
      bytes.remove_prefix(static_cast<size_t>(take));
      in_bucket += take;
      if (in_bucket != bucket.weight_bytes) continue;
      ++at;
      in_bucket = 0;
    }
    return absl::OkStatus();
  };
  ASSIGN_OR_RETURN(const v1::PullHeader header, job.worker(rank).Pull(request, begin, data, deadline - MonotonicNow()));
  return Step(header.step());
}

}  // namespace shardmesh
