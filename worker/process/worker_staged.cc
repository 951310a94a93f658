// Worker's part in a job that is brought to another mesh while it trains: what it will have is built beside what it
// has.

#include <thread>
#include <utility>

#include "core/base/fault_point.h"
#include "core/base/give_way.h"
#include "core/base/status.h"
#include "core/base/thread.h"
#include "local/memory/futex.h"
#include "worker/process/worker.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kSlice = absl::Milliseconds(20);
constexpr int kNice = 15;

// Whether a member that leaves ends the older epoch with the same workers by both.
bool SameOthers(const v1::Assignment& one, const v1::Assignment& other) {
  v1::Assignment a, b;
  *a.mutable_from() = one.from();
  *a.mutable_peers() = one.peers();
  *b.mutable_from() = other.from();
  *b.mutable_peers() = other.peers();
  return a.SerializeAsString() == b.SerializeAsString();
}

}  // namespace

void Worker::KeepStaged(const v1::Assignment& assignment, Entries& keep, Entries& keep_staged) {
  const std::string& name = assignment.spec().name();
  if (keep_staged.count(name) > 0) return;
  const auto first = jobs_.find(name);  // of a worker that was no member before, and has cut over
  if (first != jobs_.end() && first->second->assignment.epoch() == assignment.epoch())
    keep.insert(jobs_.extract(first));
  const auto now = keep.find(name);
  const bool there = now != keep.end();
  if (there && now->second->assignment.epoch() == assignment.epoch()) return;  // it has cut over
  const auto staged = staged_.find(name);
  if (staged != staged_.end() && staged->second->assignment.epoch() == assignment.epoch()) {
    keep_staged.insert(staged_.extract(staged));
    return;
  }
  auto entry = std::make_shared<Entry>();
  entry->assignment = assignment;
  if (there && now->second->assignment.epoch() == assignment.from().epoch()) entry->before = now->second;
  BeginPreparing(entry);
  keep_staged[name] = std::move(entry);
}

// Once more, if the job goes on with others than before.
void Worker::KeepLeaving(const v1::Assignment& assignment, const Entries& keep, Entries& keep_staged) {
  const std::string& name = assignment.spec().name();
  const auto staged = staged_.find(name);
  if (staged != staged_.end() && staged->second->assignment.leaves() &&
      SameOthers(staged->second->assignment, assignment)) {
    staged->second->cutover.store(true);
    keep_staged.insert(staged_.extract(staged));
    return;
  }
  const auto held = keep.find(name);
  if (held == keep.end()) return;
  auto entry = std::make_shared<Entry>();
  entry->assignment = assignment;
  entry->assignment.set_leaves(true);
  entry->before = held->second;
  entry->cutover.store(true);
  BeginPreparing(entry);
  keep_staged[name] = std::move(entry);
}

// In a thread of its own, which gives way to those that step: its priority is not to be had back.
absl::Status Worker::AwaitCutover(const std::shared_ptr<Entry>& entry, JobShard& shard) {
  const auto take_memory = [&] {
    GiveWay(kNice);
    shard.memory().TakeForFirstCommand(options_.prepare_timeout, entry->closing);
    shard.memory().TakeForSteps(entry->closing);
  };
  ASSIGN_OR_RETURN(std::thread thread, StartThread("the memory of a job's next mesh", take_memory));
  thread.join();
  RETURN_IF_ERROR(ErrorAt(FaultPoint::kStaged));
  TellPrepared(*entry);
  RETURN_IF_ERROR(AwaitCutoverOf(*entry, &shard));
  CutOver(entry);
  return EndBefore(*entry);
}

absl::Status Worker::EndAtCutover(const std::shared_ptr<Entry>& entry) {
  RETURN_IF_ERROR(AwaitHeldBefore(*entry).status());
  TellPrepared(*entry);
  RETURN_IF_ERROR(AwaitCutoverOf(*entry, nullptr));
  return EndBefore(*entry);
}

// The control block of the older epoch says it first. Who has none of that sees it by what the lead of its host says in
// the new one, or hears it from the coordinator, as that lead does.
absl::Status Worker::AwaitCutoverOf(const Entry& entry, JobShard* shard) const {
  while (true) {
    const std::shared_ptr<JobShard> before = HeldBefore(entry);
    JobShard* const watched = before != nullptr ? before.get() : shard;
    if (watched == nullptr) return absl::FailedPreconditionError("this worker does not hold what it is to give");
    ControlBlock& control = *watched->protocol().control();
    const uint32_t seen = control.finished.load(std::memory_order_acquire);
    if (entry.closing.load()) return absl::CancelledError("the job is assigned anew");
    if (entry.cutover.load()) return absl::OkStatus();
    const uint64_t abort = control.abort.load(std::memory_order_acquire);
    const bool over = before != nullptr ? abort != 0 && ReasonOf(abort) == AbortReason::kReformed
                                        : control.restore_begun.load(std::memory_order_acquire) != 0;
    if (over) return absl::OkStatus();
    if (shard != nullptr) RETURN_IF_ERROR(shard->Health());
    FutexWait(control.finished, seen, kSlice);
  }
}

void Worker::TellPrepared(Entry& entry) {
  {
    MutexLock lock(mu_);
    entry.state = v1::MEMBER_STATE_PREPARED;
  }
  Changed();
}

void Worker::CutOver(const std::shared_ptr<Entry>& entry) {
  MutexLock lock(mu_);
  entry->state = v1::MEMBER_STATE_PREPARING;
  const auto staged = staged_.find(entry->assignment.spec().name());
  if (staged == staged_.end() || staged->second != entry) return;
  jobs_[staged->first] = entry;
  staged_.erase(staged);
}

}  // namespace shardmesh
