// Worker's part in a job that goes back to a checkpoint by itself (Assignment.back).
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/clock.h"
#include "core/base/fault_point.h"
#include "core/base/status.h"
#include "worker/move/shard_files.h"
#include "worker/process/worker.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(5);
constexpr int kPatience = 5;  // time-outs in which the coordinator notices who is gone, or a link works again

// The same at all members of an epoch. Callers of Shard.Load, who choose one at random, load at no epoch that goes back.
uint64_t LoadIdOf(int64_t epoch) { return (static_cast<uint64_t>(epoch) << 1) | 1; }

}  // namespace

absl::Status Worker::ReadBack(Entry& entry, JobShard& shard) {
  const v1::Assignment& assignment = entry.assignment;
  const v1::StoredCheckpoint& checkpoint = assignment.back().checkpoint();
  const uint64_t load_id = LoadIdOf(assignment.epoch());
  const auto read = [&]() -> absl::StatusOr<uint64_t> {
    if (checkpoint.copied_at() == 0) {
      return LoadStored(shard, options_.checkpoint_folders, checkpoint, load_id, entry.closing);
    }
    const auto kept = FindCopies(assignment.spec().name(), checkpoint.copied_at(), assignment.secret());
    return LoadKept({shard, assignment, kept.ok() ? kept->get() : nullptr, options_.transfer, entry.closing,
                     heartbeat_timeout() * kPatience},
                    load_id);
  };
  const absl::StatusOr<uint64_t> digest = read();
  {
    MutexLock lock(mu_);
    if (digest.ok()) entry.loaded_digest = *digest;
    entry.unreadable = !digest.ok() && !entry.closing.load() && shard.Health().ok();
  }
  Hurry();  // the coordinator answers this one before the others have read theirs
  Changed();
  return digest.status();
}

absl::Status Worker::GoBack(const std::shared_ptr<Entry>& entry, JobShard& shard) {
  RETURN_IF_ERROR(ReadBack(*entry, shard));
  // As long as it takes the others to read theirs, and the coordinator to say so: nobody else could decide.
  while (!entry->use_loaded.load()) {
    if (entry->closing.load()) return absl::CancelledError("the job is assigned anew");
    RETURN_IF_ERROR(shard.Health());
    absl::SleepFor(kPoll);
  }
  RETURN_IF_ERROR(ErrorAt(FaultPoint::kUseLoaded));
  RETURN_IF_ERROR(shard.run().engine.UseLoaded(LoadIdOf(entry->assignment.epoch())));
  const absl::Time deadline = MonotonicNow() + options_.prepare_timeout + TransferTime(StorageBytesOfAll(shard.plan()));
  while (shard.protocol().committed_step().value() == kNoStep) {
    if (entry->closing.load()) return absl::CancelledError("the job is assigned anew");
    RETURN_IF_ERROR(shard.Health());
    if (MonotonicNow() >= deadline) {
      return absl::DeadlineExceededError("the job did not begin with the checkpoint that all its members have read");
    }
    absl::SleepFor(kPoll);
  }
  return absl::OkStatus();
}

}  // namespace shardmesh
