#include "worker/job/shard_memory.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "local/memory/futex.h"
#include "worker/pass/thread_team.h"

namespace shardmesh {
namespace {
constexpr int kPublicationsInUse = 2;  // of a job without slow readers
}  // namespace

absl::Status ShardMemory::Open(Memory& memory, const std::string& name, int shard, const std::atomic<bool>* cancelled) {
  ASSIGN_OR_RETURN(storage_, ShardStorage::Open(memory, name, plan_, shard, cancelled));
  ASSIGN_OR_RETURN(sums_, GradientSums::Open(memory, absl::StrCat(name, "-sums"), plan_, shard));
  return absl::OkStatus();
}

void ShardMemory::TakeForFirstCommand(absl::Duration patience, const std::atomic<bool>& cancelled) {
  if (!storage_.has_value()) return;
  const int64_t until = MonotonicNanos() + absl::ToInt64Nanoseconds(patience);
  ThreadTeam team(threads_);
  team.ForEach(static_cast<int>(storage_->ranges().size()), [&](int range) {
    if (cancelled.load() || MonotonicNanos() > until) return;
    storage_->Populate(range);
    if (plan_.bucketed()) return;  // its window has what trainers hold
    const StorageRange& r = storage_->ranges()[range];
    const Bucket& bucket = plan_.buckets()[r.bucket];
    const int64_t begin = bucket.weight_offset + bucket.CodeOffset(r.bucket_begin);
    host_.window().Populate(begin, bucket.CodeOffset(r.num_elements));
    host_.publication(0).Populate(begin, bucket.CodeOffset(r.num_elements));
  });
}

void ShardMemory::TakeForSteps(const std::atomic<bool>& cancelled) const {
  std::vector<const Segment*> segments;
  for (int b = 0; b < std::min(host_.num_publications(), kPublicationsInUse); ++b) {
    segments.push_back(&host_.publication(b));
  }
  for (int slot = 0; slot < spec_.num_writers() && !plan_.bucketed(); ++slot) segments.push_back(&host_.slot(slot));
  constexpr int64_t kPart = int64_t{64} << 20;  // one call of the system cannot be cancelled
  for (const Segment* segment : segments) {
    for (int64_t begin = 0; begin < segment->data_bytes() && !cancelled.load(); begin += kPart) {
      segment->Populate(begin, std::min(kPart, segment->data_bytes() - begin));
    }
  }
}

void ShardMemory::GiveBack() {
  const auto give_back = [](const Segment& segment) {
    const int64_t whole = segment.data_bytes() / kSegmentPage * kSegmentPage;
    if (segment.data_offset() % kSegmentPage == 0) segment.Punch(0, whole).IgnoreError();
  };
  if (storage_.has_value()) give_back(storage_->segment());
  if (sums() != nullptr) give_back(sums()->segment());
  for (int slot = 0; slot < spec_.num_writers(); ++slot) give_back(host_.slot(slot));
}

}  // namespace shardmesh
