#include "worker/step_protocol.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/status.h"
#include "local/futex.h"

namespace shardmesh {

StepProtocol::StepProtocol(ControlPage* page, const JobSpec* job, const Plan* plan, std::vector<std::string> names)
    : page_(page), job_(job), plan_(plan), names_(std::move(names)) {}

std::optional<StepOutcome> StepProtocol::OutcomeOf(Step step) const {
  if (step > committed_step()) return std::nullopt;
  StepOutcome outcome;
  outcome.step = step;
  outcome.already_applied = true;
  const OutcomeWords& words = page_->outcomes[step.value() % kOutcomeRing];
  // The words of a step that left the ring may be written meanwhile: they count when the step is the same on both
  // sides.
  const int64_t before = words.step.load(std::memory_order_acquire);
  const int64_t skipped = words.skipped.load(std::memory_order_acquire);
  const double norm = words.norm.load(std::memory_order_acquire);
  const int64_t after = words.step.load(std::memory_order_acquire);
  if (before == step.value() && after == before && skipped != 0) {
    outcome.skipped = true;
    outcome.bad_slot = Slot(static_cast<int32_t>((skipped - 1) >> 32));
    outcome.bad_tensor = static_cast<int>((skipped - 1) & 0xffffffff);
  }
  if (before == step.value() && after == before) outcome.norm = norm;
  return outcome;
}

std::string StepProtocol::WaitsFor(Step step) const {
  std::vector<std::string> missing;
  for (int s = 0; s < job_->num_slots; ++s) {
    bool complete = page_->slots[s].declared.load() >= step.value();
    for (int p = 0; p < plan_->num_shards(); ++p) complete = complete && page_->pieces[s][p].load() >= step.value();
    if (complete) continue;
    const bool held = page_->slots[s].holder.load() != 0;
    missing.push_back(held ? absl::StrCat(s, " (trainer pid ", page_->slots[s].holder_pid.load(), ")")
                           : absl::StrCat(s));
  }
  return missing.empty() ? "no slot is missing, the workers are at it"
                         : absl::StrCat("missing slots: ", absl::StrJoin(missing, ","));
}

absl::StatusOr<StepOutcome> StepProtocol::AwaitCommit(Step step, absl::Duration timeout) {
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(timeout);
  while (true) {
    const uint32_t word = page_->finished.load(std::memory_order_acquire);
    if (std::optional<StepOutcome> outcome = OutcomeOf(step)) {
      outcome->already_applied = false;
      return *outcome;
    }
    RETURN_IF_ERROR(Health());
    const int64_t left = deadline - MonotonicNanos();
    if (left <= 0) {
      return absl::DeadlineExceededError(absl::StrCat("step ", step.value(), " was not committed within ",
                                                      absl::FormatDuration(timeout), "; ", WaitsFor(step)));
    }
    FutexWait(page_->finished, word, absl::Nanoseconds(left));
  }
}

bool StepProtocol::ClaimPush(Slot slot, int shard, Rank receiver) {
  int32_t nobody = 0;
  return page_->pushes[slot.value()][shard].compare_exchange_strong(nobody, receiver.value() + 1);
}

void StepProtocol::ReleasePush(Slot slot, int shard) { page_->pushes[slot.value()][shard].store(0); }

// Takes the slot, then looks for pushes; a push claims its piece, then looks for a holder: one of them sees the other.
absl::Status StepProtocol::TakeSlot(Slot slot, uint64_t holder) {
  RETURN_IF_ERROR(CheckSlot(slot));
  uint64_t current = 0;
  if (page_->slots[slot.value()].holder.compare_exchange_strong(current, holder)) {
    for (int shard = 0; shard < plan_->num_shards(); ++shard) {
      const int32_t receiver = page_->pushes[slot.value()][shard].load();
      if (receiver == 0) continue;
      GiveSlot(slot, holder);
      return absl::AbortedError(absl::StrCat("rank ", receiver - 1, " receives a push to slot ", slot.value(),
                                             "; attach again when it has ended"));
    }
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "slot ", slot.value(), " is written by session ", current & 0xffffffff, " attached to rank ", (current >> 32) - 1,
      " (trainer pid ", page_->slots[slot.value()].holder_pid.load(), ")", "; end that trainer, or take another slot"));
}

void StepProtocol::GiveSlot(Slot slot, uint64_t holder) {
  if (!CheckSlot(slot).ok()) return;
  page_->slots[slot.value()].holder.compare_exchange_strong(holder, 0);
}

// A slot that lacks a piece stays incomplete while the caller holds it, since nobody else may bring one: so the lead
// cannot decide the open step, and the words and windows of all its slots are the caller's.
std::optional<Step> StepProtocol::OpenSlots(absl::Span<const Slot> slots) {
  const int64_t open = committed_step().value() + 1;
  bool declared = false, incomplete = false;
  for (Slot slot : slots) {
    declared = declared || page_->slots[slot.value()].declared.load() == open;
    for (int p = 0; p < plan_->num_shards(); ++p) {
      incomplete = incomplete || page_->pieces[slot.value()][p].load() < open;
    }
  }
  if (open < 1 || !declared) return std::nullopt;
  if (!incomplete) return Step(open);
  for (Slot slot : slots) {
    SlotWords& words = page_->slots[slot.value()];
    int64_t expected = open;
    words.declared.compare_exchange_strong(expected, open - 1);
    for (int p = 0; p < plan_->num_shards(); ++p) {
      expected = open;
      page_->pieces[slot.value()][p].compare_exchange_strong(expected, open - 1);
    }
    words.nonfinite.store(0);
  }
  return std::nullopt;
}

uint64_t StepProtocol::HolderOf(Slot slot) const { return page_->slots[slot.value()].holder.load(); }

void StepProtocol::InitialPieceReady(Rank rank, uint64_t push_id) {
  page_->members[rank.value()].initial_id.store(push_id, std::memory_order_release);
  FutexBump(page_->doorbell);
}

void StepProtocol::SignOfLife(Rank rank, int64_t now_nanos, int64_t pid) {
  page_->members[rank.value()].pid.store(pid, std::memory_order_relaxed);
  page_->members[rank.value()].alive_nanos.store(now_nanos, std::memory_order_release);
}

void StepProtocol::CheckPeers(Rank self, int64_t now_nanos, absl::Duration timeout) {
  for (int r = 0; r < num_ranks(); ++r) {
    const int64_t alive = page_->members[r].alive_nanos.load(std::memory_order_acquire);
    if (r == self.value() || alive == 0) continue;
    if (now_nanos - alive > absl::ToInt64Nanoseconds(timeout)) Abort(AbortReason::kSilent, r, self);
  }
}

void StepProtocol::Abort(AbortReason reason, int about, Rank reporter) {
  uint64_t none = 0;
  page_->abort.compare_exchange_strong(none, AbortWord(reason, about, reporter.value()));
  FutexBump(page_->doorbell);
  FutexBump(page_->decision);
  FutexBump(page_->finished);
}

absl::Status StepProtocol::Health() const {
  const uint64_t word = page_->abort.load(std::memory_order_acquire);
  if (word == 0) return absl::OkStatus();
  const int about = AboutOf(word);
  absl::string_view saw = "failed";
  switch (ReasonOf(word)) {
    case AbortReason::kSilent:
      saw = "gave no sign of life within the heartbeat time-out (killed or stopped)";
      break;
    case AbortReason::kGone:
      saw = "is gone (its connection closed)";
      break;
    case AbortReason::kLate:
      saw = "did not finish its part of the step within the time limit";
      break;
    case AbortReason::kLeft:
      saw = "left (it was told to stop)";
      break;
    case AbortReason::kInternal:
      saw = "met an internal error (see its log)";
      break;
  }
  return absl::UnavailableError(absl::StrCat("worker ", names_[about], " (rank ", about, ", pid ",
                                             page_->members[about].pid.load(), ") of job ", job_->name, " ", saw,
                                             ", seen by rank ", ReporterOf(word), "; the last committed step is ",
                                             committed_step().value(), "; delete the job and create it again"));
}

}  // namespace shardmesh
