#include "worker/step/step_commands.h"

#include "core/base/fault_point.h"
#include "local/memory/futex.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kSlice = absl::Milliseconds(100);  // waits end and begin again this often
}  // namespace

void StepCommands::Done(Rank rank, uint64_t seq) const {
  view_.control->members[rank.value()].done.store(seq, std::memory_order_release);
  Reach(FaultPoint::kDone);
  FutexBump(*view_.notifier);
}

bool StepCommands::AwaitGradients(Step step, int bucket) const {
  const uint64_t needed = BucketWord(static_cast<uint64_t>(step.value()), bucket + 1);
  while (true) {
    const uint32_t word = view_.control->decision.load(std::memory_order_acquire);
    if (Reaches(view_.control->gradients_here.load(std::memory_order_acquire), needed)) return true;
    if (view_.control->abort.load() != 0) return false;
    FutexWait(view_.control->decision, word, kSlice);
  }
}

void StepCommands::GradientsHere(Step step, int buckets) const {
  view_.control->gradients_here.store(BucketWord(static_cast<uint64_t>(step.value()), buckets),
                                      std::memory_order_release);
  FutexBump(view_.control->decision);
}

void StepCommands::BucketsDone(Rank rank, uint64_t seq, int buckets) const {
  view_.control->members[rank.value()].buckets_done.store(BucketWord(seq, buckets), std::memory_order_release);
  FutexBump(*view_.notifier);
}

bool StepCommands::AllBucketsDone(uint64_t seq, int buckets) const {
  for (int r = view_.local.first(); r < view_.local.end(); ++r) {
    const MemberWords& member = view_.control->members[r];
    if (member.done.load(std::memory_order_acquire) >= seq) continue;  // one that has no part of any bucket, too
    if (!Reaches(member.buckets_done.load(std::memory_order_acquire), BucketWord(seq, buckets))) return false;
  }
  return true;
}

bool StepCommands::AllDone() const {
  const uint64_t seq = view_.decided();
  for (int r = view_.local.first(); r < view_.local.end(); ++r) {
    if (view_.control->members[r].done.load(std::memory_order_acquire) != seq) return false;
  }
  return true;
}

std::vector<int> StepCommands::NotDone() const {
  std::vector<int> ranks;
  for (int r = view_.local.first(); r < view_.local.end(); ++r) {
    if (view_.control->members[r].done.load(std::memory_order_acquire) != view_.decided()) ranks.push_back(r);
  }
  return ranks;
}

void StepCommands::InitialShardReady(Rank rank, uint64_t push_id) const {
  view_.control->members[rank.value()].initial_id.store(push_id, std::memory_order_release);
  FutexBump(*view_.notifier);
}

void StepCommands::LoadedReady(Rank rank, uint64_t load_id, Step step) const {
  view_.control->members[rank.value()].loaded_step.store(step.value(), std::memory_order_release);
  view_.control->members[rank.value()].loaded_id.store(load_id, std::memory_order_release);
  FutexBump(*view_.notifier);
}

}  // namespace shardmesh
