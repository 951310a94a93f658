#include "worker/step/job_ending.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "local/memory/futex.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kSlice = absl::Milliseconds(20);

Bequest::Outcome ValueOf(const OutcomeWords& words) {
  return {words.step.load(), words.norm.load(), words.skipped.load(), words.peak.load()};
}

// Of a step that was decided, and maybe not committed.
Bequest::Outcome OutcomeOf(const ControlBlock& before, const Command& command) {
  const bool skipped = command.kind == CommandKind::kStep && command.apply == 0;
  return {command.step, before.norm_step.load() == command.step ? before.norm.load() : 0,
          skipped ? command.nonfinite + 1 : 0, static_cast<int64_t>(BitsOf(before.pull.peak.load(), command.step))};
}

}  // namespace

Ending EndingOf(const ControlBlock& control, uint64_t word) {
  Ending ending;
  ending.seq = word >> 2;
  if (ending.seq == 0) return ending;
  const bool committed = (word & 2) != 0;
  const Command& command = control.commands[ending.seq % 2];
  ending.step = command.step;
  ending.parity = command.parity;
  switch (command.kind) {
    case CommandKind::kInit:  // shards of initial weights went with the processes that had them, as what they loaded
      if (!committed) ending.step = kNoStep;
      break;
    case CommandKind::kStep:
      ending.steps = command.apply != 0;
      if (ending.steps) ending.parity = 1 - command.parity;
      break;
    case CommandKind::kNorm:
    case CommandKind::kReduceBucket:
    case CommandKind::kMerge:
      ending.step = command.step - 1;
      break;
    case CommandKind::kRestore:
      if (!committed && command.initial_id != 0) ending.step = kNoStep;
      break;
    case CommandKind::kQuantize:
    case CommandKind::kDigest:
    case CommandKind::kGatherBucket:
    case CommandKind::kPublish:
    case CommandKind::kNone:
      break;
  }
  return ending;
}

void TellStopped(ControlBlock& control, Rank self) {
  control.members[self.value()].stopped.store(1, std::memory_order_release);
  FutexBump(control.finished);
}

absl::StatusOr<Ending> AwaitEnding(ControlBlock& control, absl::Span<const Rank> members,
                                   const std::function<bool()>& cancelled, absl::Duration timeout) {
  const absl::Time deadline = MonotonicNow() + timeout;
  while (true) {
    const uint32_t seen = control.finished.load(std::memory_order_acquire);
    const auto runs = std::find_if(members.begin(), members.end(), [&](Rank rank) {
      return control.members[rank.value()].stopped.load(std::memory_order_acquire) == 0;
    });
    // What others have agreed on is final, whoever did not stop: it is dead, or will take it from there.
    const bool told = control.ending.load(std::memory_order_acquire) != 0;
    if (told || (runs == members.end() && !members.empty())) break;
    if (cancelled()) return absl::CancelledError("the job is assigned anew");
    if (MonotonicNow() >= deadline) {
      const std::string who = runs == members.end() ? "its members" : absl::StrCat("rank ", runs->value());
      return absl::DeadlineExceededError(
          absl::StrCat(who, " of the epoch before did not stop within ", absl::FormatDuration(timeout)));
    }
    FutexWait(control.finished, seen, kSlice);
  }
  if (const uint64_t word = control.ending.load(std::memory_order_acquire); word != 0) return EndingOf(control, word);
  const uint64_t decided = control.decided.load(std::memory_order_acquire);
  uint64_t word = 0;
  // A step may be told of a moment before its command is over.
  const bool committed = control.committed.load() >= decided || control.committed_step_plus_one.load() > 0;
  if (control.ending.compare_exchange_strong(word, EndingWord(decided, committed))) word = control.ending.load();
  return EndingOf(control, word);
}

namespace {

// Until the word is not 0. `late`: what is said if that takes too long.
absl::Status AwaitWord(const std::atomic<uint64_t>& word, ControlBlock& control, const std::function<bool()>& cancelled,
                       absl::Duration timeout, absl::string_view late) {
  const absl::Time deadline = MonotonicNow() + timeout;
  while (true) {
    const uint32_t seen = control.finished.load(std::memory_order_acquire);
    if (word.load(std::memory_order_acquire) != 0) return absl::OkStatus();
    if (cancelled()) return absl::CancelledError("the job is assigned anew");
    if (MonotonicNow() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat(late, " within ", absl::FormatDuration(timeout)));
    }
    FutexWait(control.finished, seen, kSlice);
  }
}

}  // namespace

absl::StatusOr<Ending> AwaitEnded(ControlBlock& control, const std::function<bool()>& cancelled,
                                  absl::Duration timeout) {
  RETURN_IF_ERROR(AwaitWord(control.ended, control, cancelled, timeout,
                            "the hosts of the epoch before did not agree on its last step"));
  return EndingOf(control, control.ended.load(std::memory_order_acquire));
}

Bequest BequestOf(const ControlBlock& before, const Ending& ending) {
  Bequest bequest;
  bequest.step = ending.step;
  if (ending.step == kNoStep) return bequest;
  for (int i = 0; i < kOutcomeRing; ++i) bequest.outcomes[i] = ValueOf(before.outcomes[i]);
  const Command& last = before.commands[ending.seq % 2];
  const bool decided = last.first == 0;  // else they were restored, outcomes and all
  if (decided && last.step == ending.step && (last.kind == CommandKind::kStep || last.kind == CommandKind::kQuantize)) {
    bequest.outcomes[ending.step % kOutcomeRing] = OutcomeOf(before, last);
  }
  return bequest;
}

static_assert(std::is_trivially_copyable_v<Bequest>);

std::string PackBequest(const Bequest& bequest) {
  return std::string(reinterpret_cast<const char*>(&bequest), sizeof(bequest));
}

absl::StatusOr<Bequest> UnpackBequest(absl::string_view bytes) {
  Bequest bequest;
  if (bytes.size() != sizeof(bequest)) {
    return absl::DataLossError(
        absl::StrCat("outcomes of an ended epoch have ", bytes.size(), " bytes; expected ", sizeof(bequest)));
  }
  std::memcpy(&bequest, bytes.data(), sizeof(bequest));
  if (bequest.step >= kNoStep && bequest.step <= kMaxStep) return bequest;
  return absl::DataLossError(absl::StrCat("an ended epoch has its last step at ", bequest.step));
}

void BeginRestored(const Bequest& bequest, ControlBlock& control) {
  for (int i = 0; i < kOutcomeRing && bequest.step != kNoStep; ++i) {
    const Bequest::Outcome& from = bequest.outcomes[i];
    OutcomeWords& to = control.outcomes[i];
    to.norm.store(from.norm);
    to.skipped.store(from.skipped);
    to.peak.store(from.peak);
    to.step.store(from.step);
  }
  control.restored_step_plus_one.store(bequest.step + 1, std::memory_order_release);
  control.restore_begun.store(1, std::memory_order_release);
  FutexBump(control.finished);
}

absl::Status AwaitRestoreBegun(ControlBlock& control, const std::function<bool()>& cancelled, absl::Duration timeout) {
  return AwaitWord(control.restore_begun, control, cancelled, timeout, "the lead of this host did not say the step");
}

void TellRestored(ControlBlock& control, Rank self, std::atomic<uint32_t>& notifier) {
  control.members[self.value()].restored.store(1, std::memory_order_release);
  FutexBump(notifier);
}

}  // namespace shardmesh
