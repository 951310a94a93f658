// Of StepProtocol: what trainers say, and whether it may be said: steps, slots, pieces, learning rates, gradients that
// are not finite.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/status.h"
#include "local/futex.h"
#include "worker/step_protocol.h"

namespace shardmesh {
namespace {

// Words that only grow: a call that was held up may not take a newer step back.
void StoreMax(std::atomic<int64_t>& word, int64_t value) {
  int64_t current = word.load(std::memory_order_acquire);
  while (current < value && !word.compare_exchange_weak(current, value, std::memory_order_acq_rel)) {
  }
}

}  // namespace

absl::Status StepProtocol::CheckSlot(Slot slot) const {
  if (slot.value() >= 0 && slot.value() < job_->num_slots) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("slot ", slot.value(), " is none of job ", job_->name, "'s: 0 to ", job_->num_slots - 1));
}

absl::StatusOr<std::optional<StepOutcome>> StepProtocol::CheckStep(Slot slot, Step step) const {
  RETURN_IF_ERROR(CheckSlot(slot));
  const Step committed = committed_step();
  if (step.value() < 1) {
    return absl::InvalidArgumentError(absl::StrCat("step ", step.value(), "; steps are numbered from 1"));
  }
  if (committed.value() == kNoStep) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", job_->name, " has no initial weights yet; push them first"));
  }
  if (step <= committed) return OutcomeOf(step);
  RETURN_IF_ERROR(Health());
  if (step > committed.next()) {
    return absl::FailedPreconditionError(absl::StrCat("step ", step.value(), " is ahead: job ", job_->name,
                                                      " committed step ", committed.value(), ", the next is ",
                                                      committed.value() + 1));
  }
  return std::optional<StepOutcome>();
}

absl::Status StepProtocol::PieceReady(Slot slot, int shard, Step step) {
  ASSIGN_OR_RETURN(const std::optional<StepOutcome> outcome, CheckStep(slot, step));
  if (outcome.has_value()) return absl::OkStatus();
  StoreMax(page_->pieces[slot.value()][shard], step.value());
  FutexBump(page_->doorbell);
  return absl::OkStatus();
}

bool StepProtocol::HasPiece(Slot slot, int shard, Step step) const {
  return page_->pieces[slot.value()][shard].load(std::memory_order_acquire) >= step.value();
}

void StepProtocol::NoteNonFinite(Slot slot, int tensor, Step step) {
  StoreMax(page_->slots[slot.value()].nonfinite, NonFiniteWord(step.value(), tensor));
}

// One for each group of the job.
absl::StatusOr<std::vector<double>> StepProtocol::LearningRatesOf(const Declaration& declaration) const {
  const std::vector<double>& given = declaration.learning_rates;
  if (given.size() > 1 && static_cast<int>(given.size()) != job_->num_groups()) {
    return absl::InvalidArgumentError(absl::StrCat(given.size(), " learning rates for the ", job_->num_groups(),
                                                   " parameter groups of job ", job_->name,
                                                   "; give one for all, or one for each"));
  }
  std::vector<double> rates;
  for (int g = 0; g < job_->num_groups(); ++g) {
    OptimizerHyper hyper = job_->group(g);
    if (!given.empty()) hyper.lr = given.size() == 1 ? given[0] : given[g];
    RETURN_IF_ERROR(job_->ValidateGroup(g, hyper));
    rates.push_back(hyper.lr);
  }
  return rates;
}

// The first slot to declare a step fixes its learning rates; the others must say the same.
absl::Status StepProtocol::ClaimLearningRates(Slot slot, Step step, absl::Span<const double> rates) {
  const uint64_t claim = static_cast<uint64_t>(step.value()) << 16 | static_cast<uint64_t>(slot.value());
  uint64_t current = page_->lr_claim.load(std::memory_order_acquire);
  while (current >> 16 < static_cast<uint64_t>(step.value())) {
    // Written before the claim: whoever sees the claim sees the rates. A slot has one writer, so this is no race.
    for (size_t g = 0; g < rates.size(); ++g) {
      page_->slots[slot.value()].learning_rates[g].store(rates[g], std::memory_order_release);
    }
    if (page_->lr_claim.compare_exchange_weak(current, claim, std::memory_order_acq_rel)) return absl::OkStatus();
  }
  if (current >> 16 > static_cast<uint64_t>(step.value())) return absl::OkStatus();  // this step is over
  const int first = static_cast<int>(current & 0xffff);
  for (size_t g = 0; g < rates.size(); ++g) {
    const double fixed = page_->slots[first].learning_rates[g].load(std::memory_order_acquire);
    if (fixed == rates[g]) continue;
    const std::string group = rates.size() == 1 ? "" : absl::StrCat(" for group ", g);
    if (first == slot.value()) {  // this slot's own claim, repeated
      return absl::InvalidArgumentError(absl::StrCat("slot ", first, " declared step ", step.value(),
                                                     " with learning rate ", fixed, group, " before, and now ",
                                                     rates[g]));
    }
    return absl::InvalidArgumentError(absl::StrCat("slot ", slot.value(), " says learning rate ", rates[g], group,
                                                   " for step ", step.value(), ", slot ", first, " said ", fixed,
                                                   "; all slots of a step must agree"));
  }
  return absl::OkStatus();
}

absl::Status StepProtocol::CheckNonFinite(const Declaration& declaration, Slot slot, int tensor) const {
  if (std::find(declaration.slots.begin(), declaration.slots.end(), slot) == declaration.slots.end()) {
    return absl::InvalidArgumentError(absl::StrCat("a gradient of slot ", slot.value(),
                                                   " that is not finite, in a call that does not declare this slot"));
  }
  if (tensor < 0 || tensor >= static_cast<int>(job_->parameters.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", tensor, " is none of job ", job_->name, "'s: 0 to ", job_->parameters.size() - 1));
  }
  if (job_->parameters[tensor].frozen) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", tensor, " (\"", job_->parameters[tensor].name,
                                                   "\") is frozen: it has no gradient that could be not finite"));
  }
  if (job_->non_finite == NonFinitePolicy::kSkip) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("slot ", slot.value(), " of step ", declaration.step.value(),
                                                 ": the gradient of \"", job_->parameters[tensor].name,
                                                 "\" is not finite, or not below FLT_MAX / ", job_->num_slots,
                                                 "; write it again with finite values"));
}

absl::StatusOr<std::optional<StepOutcome>> StepProtocol::Declare(const Declaration& declaration) {
  if (declaration.slots.empty()) return absl::InvalidArgumentError("a step without slots; name at least one");
  for (Slot slot : declaration.slots) {
    ASSIGN_OR_RETURN(std::optional<StepOutcome> outcome, CheckStep(slot, declaration.step));
    if (outcome.has_value()) return outcome;
  }
  for (const auto& [slot, tensor] : declaration.non_finite) RETURN_IF_ERROR(CheckNonFinite(declaration, slot, tensor));
  ASSIGN_OR_RETURN(const std::vector<double> rates, LearningRatesOf(declaration));
  for (Slot slot : declaration.slots) RETURN_IF_ERROR(ClaimLearningRates(slot, declaration.step, rates));
  for (const auto& [slot, tensor] : declaration.non_finite) NoteNonFinite(slot, tensor, declaration.step);
  // From here on nothing is refused: a declaration that is leaves no mark.
  for (Slot slot : declaration.slots) {
    for (int shard = 0; shard < plan_->num_shards() && declaration.in_place; ++shard) {
      StoreMax(page_->pieces[slot.value()][shard], declaration.step.value());
    }
    StoreMax(page_->slots[slot.value()].declared, declaration.step.value());
  }
  FutexBump(page_->doorbell);
  return std::optional<StepOutcome>();
}

}  // namespace shardmesh
