// Of StepProtocol: slots that are pulled: taken, finished, and summed as they come.
#include "absl/strings/str_cat.h"
#include "core/status.h"
#include "worker/step_protocol.h"

namespace shardmesh {

int StepProtocol::ReopenSlots(int64_t now_nanos) {
  return committed_step().value() == kNoStep ? 0 : Pulled().Reopen(now_nanos);
}

std::optional<PulledSlots::Grant> StepProtocol::TakeNext(int seat, int64_t now_nanos) {
  if (committed_step().value() == kNoStep || !Health().ok()) return std::nullopt;
  return Pulled().Take(seat, now_nanos);
}

void StepProtocol::SetWaits(int seat, bool waits, int64_t now_nanos) {
  SeatWords& words = page_->pull.seats[seat];
  if (waits) {
    words.waits_since_nanos.store(now_nanos);
  } else {
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

absl::StatusOr<PulledSlots::Result> StepProtocol::FinishSlot(int seat, const FinishedSlot& finished) {
  const Slot slot = finished.slot;
  const Step committed = committed_step();
  if (slot.value() < 0 || slot.value() >= job_->num_slots) {
    return absl::InvalidArgumentError(
        absl::StrCat("slot ", slot.value(), " is none of job ", job_->name, "'s: 0 to ", job_->num_slots - 1));
  }
  RETURN_IF_ERROR(Health());
  if (finished.step <= committed) {
    return absl::AbortedError(absl::StrCat("slot ", slot.value(), " of step ", finished.step.value(),
                                           " was taken back, and the step went on with another trainer's result; the "
                                           "last committed step is ",
                                           committed.value(), ": take another slot"));
  }
  if (finished.step != committed.next()) {
    return absl::FailedPreconditionError(absl::StrCat("step ", finished.step.value(), " is ahead: job ", job_->name,
                                                      " committed step ", committed.value()));
  }
  RETURN_IF_ERROR(CheckTokens(finished.tokens, slot));
  if (finished.non_finite.has_value()) {
    RETURN_IF_ERROR(CheckNonFinite({slot}, finished.step, slot, *finished.non_finite));
  }
  Declaration settings;
  settings.learning_rates = finished.learning_rates;
  settings.loss_scale = finished.loss_scale;
  ASSIGN_OR_RETURN(const std::vector<double> rates, LearningRatesOf(settings));
  RETURN_IF_ERROR(CheckLossScale(finished.step, finished.loss_scale));
  PulledSlots table = Pulled();
  if (!table.Has(seat, slot.value())) {
    return absl::InvalidArgumentError(absl::StrCat("slot ", slot.value(), " of step ", finished.step.value(),
                                                   " was not taken by this trainer, or taken back; take one first"));
  }
  RETURN_IF_ERROR(ClaimSettings(Slot(seat), finished.step, rates, finished.loss_scale));
  // Before the result counts: whoever sees that sees this. A second result's gradients do not count, nor those of one
  // that was lost with its trainer and the lead.
  if (!table.IsFinished(slot.value())) {
    const bool finite = !finished.non_finite.has_value();
    page_->slots[slot.value()].nonfinite.store(finite ? 0 : NonFiniteWord(finished.step.value(), *finished.non_finite),
                                               std::memory_order_release);
  }
  return table.Finish(seat, slot.value(), finished.digest, finished.tokens);
}

bool StepProtocol::DecideMerge(Command& command) const {
  if (!plan_->pulled()) return false;
  const PulledSlots table = Pulled();
  const std::optional<SlotRange> next = table.NextMerge();
  command.partial = next.has_value() ? table.FreePartial() : -1;
  if (command.partial < 0) return false;
  command.kind = CommandKind::kMerge;
  command.first_slot = next->first;
  command.num_slots = next->count;
  return true;
}

// What the sum of gradients is divided by, but for the loss scale; 0: no slot has a token.
double StepProtocol::Divisor() const {
  if (!job_->token_weights) return job_->num_slots;
  int64_t tokens = 0;
  for (int s = 0; s < job_->num_slots; ++s) tokens += page_->slots[s].tokens.load();
  return static_cast<double>(tokens);
}

}  // namespace shardmesh
