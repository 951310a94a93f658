// Of StepProtocol: slots that are pulled: taken, finished, and summed as they come.
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

int StepProtocol::ReopenSlots(int64_t now_nanos) {
  if (local_.num_hosts > 1) return 0;  // the leads do, together
  return committed_step().value() == kNoStep ? 0 : Pulled().Reopen(now_nanos);
}

absl::StatusOr<std::optional<PulledSlots::Grant>> StepProtocol::TakeNext(int seat, int64_t now_nanos) {
  if (committed_step().value() == kNoStep) return std::optional<PulledSlots::Grant>();
  RETURN_IF_ERROR(CheckLast(committed_step().next()));
  return local_.num_hosts > 1 ? Pulled().Given(seat) : Pulled().Take(seat, now_nanos);
}

void StepProtocol::SetWaits(int seat, bool waits, int64_t now_nanos) {
  SeatWords& words = control_->pull.seats[seat];
  if (waits) {
    words.waits_since_nanos.store(now_nanos);
  } else if (words.waits.load() != 0) {
    words.idle_nanos.fetch_add(now_nanos - words.waits_since_nanos.load());
  }
  words.waits.store(waits ? 1 : 0);
}

absl::Status StepProtocol::CheckTokens(int64_t tokens, Slot slot) const {
  if (!job_->token_weights) {
    if (tokens == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("slot ", slot.value(), " has ", tokens, " tokens, and job ",
                                                   job_->name, " no token weights; leave them out"));
  }
  if (tokens >= 0 && tokens <= kMaxTokens) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("slot ", slot.value(), " has ", tokens, " tokens; it is 0 to ", kMaxTokens));
}

// Whether a step is being made of slots, by a command that lets weights change.
bool StepProtocol::IsStepped(Step step) const {
  if (decided() == 0 || command().step != step.value()) return false;
  return command().kind == CommandKind::kStep || command().kind == CommandKind::kQuantize;
}

// What a trainer is told that was too late.
absl::Status StepProtocol::TakenBack(const FinishedSlot& finished) const {
  return absl::AbortedError(
      absl::StrCat("slot ", finished.slot.value(), " of step ", finished.step.value(),
                   " was taken back, and another trainer finished it; the last committed step is ",
                   committed_step().value(), ": take another slot"));
}

// What is wrong with a result, whoever brings it. REQUIRES: a slot of the job.
absl::Status StepProtocol::CheckFinished(const FinishedSlot& finished) const {
  if (finished.step != committed_step().next()) {
    return absl::FailedPreconditionError(absl::StrCat("step ", finished.step.value(), " is ahead: job ", job_->name,
                                                      " committed step ", committed_step().value()));
  }
  RETURN_IF_ERROR(CheckTokens(finished.tokens, finished.slot));
  RETURN_IF_ERROR(CheckLossScale(finished.step, finished.loss_scale));
  if (!finished.non_finite.has_value()) return absl::OkStatus();
  return CheckNonFinite({finished.slot}, finished.step, finished.slot, *finished.non_finite);
}

absl::StatusOr<std::optional<PulledSlots::Result>> StepProtocol::FinishSlot(int seat, const FinishedSlot& finished) {
  const int slot = finished.slot.value();
  if (slot < 0 || slot >= job_->num_slots) {
    return absl::InvalidArgumentError(
        absl::StrCat("slot ", slot, " is none of job ", job_->name, "'s: 0 to ", job_->num_slots - 1));
  }
  RETURN_IF_ERROR(Health());
  ASSIGN_OR_RETURN(const bool counts, MayFinish(seat, finished));
  if (!counts) return std::make_optional(PulledSlots::Result::kAccepted);
  RETURN_IF_ERROR(CheckFinished(finished));
  ASSIGN_OR_RETURN(const std::vector<double> rates, LearningRatesOf(finished.learning_rates));
  RETURN_IF_ERROR(ClaimSettings(Slot(seat), finished.step, rates, finished.loss_scale));
  if (local_.num_hosts > 1) {
    seat_requests_[seat].finished = finished;
    seat_requests_[seat].result.reset();
    return std::optional<PulledSlots::Result>();
  }
  ASSIGN_OR_RETURN(const PulledSlots::Result result, CountFinished(seat, finished));
  return std::make_optional(result);
}

std::optional<absl::StatusOr<PulledSlots::Result>> StepProtocol::ResultOf(int seat) {
  return std::exchange(seat_requests_[seat].result, std::nullopt);
}

// False: the call is repeated, and the result counted before. An error: it cannot count.
absl::StatusOr<bool> StepProtocol::MayFinish(int seat, const FinishedSlot& finished) const {
  const int slot = finished.slot.value();
  const PulledSlots table(control_, *job_, *plan_, finished.step.value());
  const bool open = finished.step > committed_step() && !IsStepped(finished.step);
  // This call was repeated, after its answer was lost.
  if (!open && table.Counted(seat, slot, finished.digest)) return false;
  if (!open) return TakenBack(finished);
  if (table.Has(seat, slot) || finished.step != committed_step().next()) return true;  // a later step is refused next
  if (table.IsFinished(slot)) return TakenBack(finished);
  return absl::InvalidArgumentError(absl::StrCat("slot ", slot, " of step ", finished.step.value(),
                                                 " was not taken by this trainer; take one first"));
}

absl::StatusOr<PulledSlots::Result> StepProtocol::CountFinished(int seat, const FinishedSlot& finished) {
  ASSIGN_OR_RETURN(const bool counts, MayFinish(seat, finished));
  if (!counts) return PulledSlots::Result::kAccepted;
  const int slot = finished.slot.value();
  PulledSlots table(control_, *job_, *plan_, finished.step.value());
  // Before the result counts: whoever sees that sees this. A second result's gradients do not count, nor those of one
  // that was lost with its trainer and the lead.
  if (!table.IsFinished(slot)) {
    const bool finite = !finished.non_finite.has_value();
    control_->slots[slot].nonfinite.store(finite ? 0 : NonFiniteWord(finished.step.value(), *finished.non_finite),
                                          std::memory_order_release);
  }
  return table.Finish(seat, slot, finished.digest, finished.tokens);
}

}  // namespace shardmesh
