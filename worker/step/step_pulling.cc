#include "worker/step/step_pulling.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "worker/step/step_ahead.h"
#include "worker/step/step_declarations.h"
#include "worker/step/step_members.h"

namespace shardmesh {

int StepPulling::Reopen(int64_t now_nanos) const {
  if (!view_.local.alone()) return 0;  // the leads do, together
  return view_.committed_step().value() == kNoStep ? 0 : view_.Pulled().Reopen(now_nanos);
}

absl::StatusOr<std::optional<PulledSlots::Grant>> StepPulling::TakeNext(int seat, int64_t now_nanos) const {
  if (view_.committed_step().value() == kNoStep) return std::optional<PulledSlots::Grant>();
  RETURN_IF_ERROR(StepDeclarations(view_).CheckLast(view_.committed_step().next()));
  return view_.local.alone() ? view_.Pulled().Take(seat, now_nanos) : view_.Pulled().Given(seat);
}

void StepPulling::SetWaits(int seat, bool waits, int64_t now_nanos) const {
  SeatWords& words = view_.control->pull.seats[seat];
  if (waits) {
    words.waits_since_nanos.store(now_nanos);
  } else if (words.waits.load() != 0) {
    words.idle_nanos.fetch_add(now_nanos - words.waits_since_nanos.load());
  }
  words.waits.store(waits ? 1 : 0);
}

// Whether a step is being made of slots, by a command that lets weights change.
bool StepPulling::IsStepped(Step step) const {
  if (view_.decided() == 0 || view_.command().step != step.value()) return false;
  return view_.command().kind == CommandKind::kStep || view_.command().kind == CommandKind::kQuantize;
}

// What a trainer is told that was too late.
absl::Status StepPulling::TakenBack(const FinishedSlot& finished) const {
  return absl::AbortedError(
      absl::StrCat("slot ", finished.slot.value(), " of step ", finished.step.value(),
                   " was taken back, and another trainer finished it; the last committed step is ",
                   view_.committed_step().value(), ": take another slot"));
}

// What is wrong with a result, whoever brings it. REQUIRES: a slot of the job.
absl::Status StepPulling::CheckFinished(const FinishedSlot& finished) const {
  if (finished.step != view_.committed_step().next()) return Ahead(view_, finished.step);
  RETURN_IF_ERROR(StepDeclarations(view_).CheckTokens(finished.tokens, finished.slot));
  RETURN_IF_ERROR(StepDeclarations(view_).CheckLossScale(finished.step, finished.loss_scale));
  if (!finished.non_finite.has_value()) return absl::OkStatus();
  return StepDeclarations(view_).CheckNonFinite({finished.slot}, finished.step, finished.slot, *finished.non_finite);
}

absl::StatusOr<std::optional<PulledSlots::Result>> StepPulling::Finish(int seat, const FinishedSlot& finished) const {
  const int slot = finished.slot.value();
  if (slot < 0 || slot >= view_.job->num_slots) {
    return absl::InvalidArgumentError(
        absl::StrCat("slot ", slot, " is none of job ", view_.job->name, "'s: 0 to ", view_.job->num_slots - 1));
  }
  RETURN_IF_ERROR(StepMembers(view_).Health());
  ASSIGN_OR_RETURN(const bool counts, MayFinish(seat, finished));
  if (!counts) return std::make_optional(PulledSlots::Result::kAccepted);
  RETURN_IF_ERROR(CheckFinished(finished));
  ASSIGN_OR_RETURN(const std::vector<double> rates, StepDeclarations(view_).LearningRatesOf(finished.learning_rates));
  RETURN_IF_ERROR(StepDeclarations(view_).ClaimSettings(Slot(seat), finished.step, rates, finished.loss_scale));
  if (!view_.local.alone()) {
    seat_requests_[seat].finished = finished;
    seat_requests_[seat].result.reset();
    return std::optional<PulledSlots::Result>();
  }
  ASSIGN_OR_RETURN(const PulledSlots::Result result, CountFinished(seat, finished));
  return std::make_optional(result);
}

std::optional<absl::StatusOr<PulledSlots::Result>> StepPulling::ResultOf(int seat) const {
  return std::exchange(seat_requests_[seat].result, std::nullopt);
}

// False: the call is repeated, and the result counted before. An error: it cannot count.
absl::StatusOr<bool> StepPulling::MayFinish(int seat, const FinishedSlot& finished) const {
  const int slot = finished.slot.value();
  const PulledSlots table(view_.control, *view_.job, *view_.plan, finished.step.value());
  const bool open = finished.step > view_.committed_step() && !IsStepped(finished.step);
  // This call was repeated, after its answer was lost.
  if (!open && table.Counted(seat, slot, finished.digest)) return false;
  if (!open) return TakenBack(finished);
  if (table.Has(seat, slot) || finished.step != view_.committed_step().next())
    return true;  // a later step is refused next
  if (table.IsFinished(slot)) return TakenBack(finished);
  return absl::InvalidArgumentError(absl::StrCat("slot ", slot, " of step ", finished.step.value(),
                                                 " was not taken by this trainer; take one first"));
}

absl::StatusOr<PulledSlots::Result> StepPulling::CountFinished(int seat, const FinishedSlot& finished) const {
  ASSIGN_OR_RETURN(const bool counts, MayFinish(seat, finished));
  if (!counts) return PulledSlots::Result::kAccepted;
  const int slot = finished.slot.value();
  PulledSlots table(view_.control, *view_.job, *view_.plan, finished.step.value());
  // Before the result counts: whoever sees that sees this. A second result's gradients do not count, nor those of one
  // that was lost with its trainer and the lead.
  if (!table.IsFinished(slot)) {
    const bool finite = !finished.non_finite.has_value();
    view_.control->slots[slot].nonfinite.store(finite ? 0 : NonFiniteWord(finished.step.value(), *finished.non_finite),
                                               std::memory_order_release);
  }
  return table.Finish(seat, slot, finished.digest, finished.tokens);
}

}  // namespace shardmesh
