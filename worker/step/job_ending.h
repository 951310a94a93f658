// How a job ended at an epoch, where a later one goes on from what its members hold. Its members' engines have ended
// for good; of the newest command the control block alone tells whether it was decided. One of those that were stopped,
// and not killed, may go on at any time and write to the control block: so what the newest command is, is agreed on
// once, in a word, and all take it from there. Pure functions of the control block, thread-safe between threads and
// processes.
#pragma once

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/base/ids.h"
#include "worker/control/control_block.h"

namespace shardmesh {

struct Ending {
  int64_t step = kNoStep;  // that every shard is at, once it has executed the command
  int parity = 0;          // where its data lies then
  uint64_t seq = 0;        // of the newest command
  bool steps = false;      // the command changes shards: one that is not done with it has to execute it
};

// In ControlBlock::ending: the newest command, and whether it was committed; of initial weights, whether anybody may
// have been told.
constexpr uint64_t EndingWord(uint64_t seq, bool committed) { return seq << 2 | (committed ? 2 : 0) | 1; }
// REQUIRES: a word that is on the control block.
Ending EndingOf(const ControlBlock& control, uint64_t word);

// The engine of this member ended, and will touch neither control block nor shard any more.
void TellStopped(ControlBlock& control, Rank self);
// Waits until the engines of all `members`, ranks of the epoch that ends, have, and says how the job ended: the same to
// each of them. Without `members`: waits until others have agreed on it. Cancelled:
// `cancelled` is true. DeadlineExceeded: names a member that did not stop.
absl::StatusOr<Ending> AwaitEnding(ControlBlock& control, absl::Span<const Rank> members,
                                   const std::function<bool()>& cancelled, absl::Duration timeout);

// Of a job on several hosts: waits until ControlBlock::ended says how. Errors as AwaitEnding.
absl::StatusOr<Ending> AwaitEnded(ControlBlock& control, const std::function<bool()>& cancelled,
                                  absl::Duration timeout);

// What the next epoch has of one that ended: its last step, and the outcomes of that and of those before it. Plain
// bytes, which a host that was not in it gets from one that was.
struct Bequest {
  struct Outcome {
    int64_t step = 0;
    double norm = 0;
    int64_t skipped = 0, peak = 0;  // as OutcomeWords
  };
  int64_t step = kNoStep;
  Outcome outcomes[kOutcomeRing] = {};
};
Bequest BequestOf(const ControlBlock& before, const Ending& ending);
std::string PackBequest(const Bequest& bequest);
// DataLoss: these are not the bytes of one.
absl::StatusOr<Bequest> UnpackBequest(absl::string_view bytes);

// On the lead of each host: shards of the next epoch will be filled with what they were at that step.
void BeginRestored(const Bequest& bequest, ControlBlock& control);
// Waits until the lead has said so; then the control block's restored_step_plus_one says the step. Errors as
// AwaitEnding.
absl::Status AwaitRestoreBegun(ControlBlock& control, const std::function<bool()>& cancelled, absl::Duration timeout);
// The shard of this member is filled.
void TellRestored(ControlBlock& control, Rank self, std::atomic<uint32_t>& notifier);

}  // namespace shardmesh
