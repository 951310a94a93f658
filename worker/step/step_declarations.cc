#include "worker/step/step_declarations.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "local/memory/futex.h"
#include "worker/step/step_ahead.h"
#include "worker/step/step_buckets.h"
#include "worker/step/step_members.h"
#include "worker/step/step_slots.h"

namespace shardmesh {
namespace {

// Words that only grow: a call that was held up may not take a newer step back.
void StoreMax(std::atomic<int64_t>& word, int64_t value) {
  int64_t current = word.load(std::memory_order_acquire);
  while (current < value && !word.compare_exchange_weak(current, value)) {
  }
}

// While there is one, an attached trainer that takes a slot sees that it is being declared.
class Declaring {
 public:
  Declaring(ControlBlock& control, Rank self, absl::Span<const Slot> slots)
      : control_(control), self_(self), slots_(slots) {
    for (Slot slot : slots_) control_.slots[slot.value()].declaring[self_.value()].fetch_add(1);
  }
  ~Declaring() {
    for (Slot slot : slots_) control_.slots[slot.value()].declaring[self_.value()].fetch_sub(1);
  }

 private:
  ControlBlock& control_;
  const Rank self_;
  const absl::Span<const Slot> slots_;
};

}  // namespace

Declaration DeclarationOf(const v1::StepRequest& request, bool in_place) {
  Declaration declaration;
  declaration.step = Step(request.step());
  declaration.in_place = in_place;
  declaration.learning_rates.assign(request.learning_rates().begin(), request.learning_rates().end());
  if (request.has_loss_scale()) declaration.loss_scale = request.loss_scale();
  declaration.tokens.assign(request.tokens().begin(), request.tokens().end());
  for (const int slot : request.slots()) declaration.slots.push_back(Slot(slot));
  for (const v1::NonFinite& bad : request.non_finite()) {
    declaration.non_finite.emplace_back(Slot(bad.slot()), bad.tensor());
  }
  return declaration;
}

absl::Status StepDeclarations::CheckSlot(Slot slot) const {
  if (slot.value() >= 0 && slot.value() < view_.job->num_writers()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("slot ", slot.value(), " is none of job ", view_.job->name,
                                                 "'s: 0 to ", view_.job->num_writers() - 1));
}

absl::Status StepDeclarations::CheckLast(Step step) const {
  if (step.value() <= kMaxStep) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("step ", step.value(),
                                                   " is beyond the last one that a job can have, ", kMaxStep,
                                                   "; pull its weights, and go on in a job that begins with them"));
}

absl::StatusOr<std::optional<StepOutcome>> StepDeclarations::CheckStep(Slot slot, Step step) const {
  if (view_.plan->pulled()) {
    return absl::FailedPreconditionError(absl::StrCat("job ", view_.job->name,
                                                      " has pulled slots: take them one by one (Job::AttachPulling, or "
                                                      "Job::ConnectPulling: Shard.Seat and Shard.Trainer)"));
  }
  RETURN_IF_ERROR(CheckSlot(slot));
  const Step committed = view_.committed_step();
  if (step.value() < 1) {
    return absl::InvalidArgumentError(absl::StrCat("step ", step.value(), "; steps are numbered from 1"));
  }
  RETURN_IF_ERROR(CheckLast(step));
  if (committed.value() == kNoStep) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", view_.job->name, " has no initial weights yet; push them first"));
  }
  if (step <= committed) return StepOutcomes(view_).OutcomeOf(step);
  RETURN_IF_ERROR(StepMembers(view_).Health());
  if (step > committed.next()) return Ahead(view_, step);
  return std::optional<StepOutcome>();
}

absl::Status StepDeclarations::GradientShardReady(Slot slot, int shard, Step step) const {
  ASSIGN_OR_RETURN(const std::optional<StepOutcome> outcome, CheckStep(slot, step));
  if (outcome.has_value()) return absl::OkStatus();
  StoreMax(view_.control->gradient_shards[slot.value()][shard], step.value());
  FutexBump(*view_.notifier);
  return absl::OkStatus();
}

bool StepDeclarations::HasGradientShard(Slot slot, int shard, Step step) const {
  if (view_.control->gradient_shards[slot.value()][shard].load(std::memory_order_acquire) >= step.value()) return true;
  // The bits are cleared before a step is committed: where this one is open, they are of it.
  return step == view_.committed_step().next() &&
         (view_.control->elsewhere[slot.value()].gradient_shards.load() >> shard & 1) != 0;
}

bool StepDeclarations::IsPushedHere(Slot slot, int shard) const {
  return view_.local.Has(view_.plan->RankOf({shard, slot.value() % view_.plan->num_replicas()}));
}

void StepDeclarations::NoteNonFinite(Slot slot, int tensor, Step step) const {
  StoreMax(view_.control->slots[slot.value()].nonfinite, NonFiniteWord(step.value(), tensor));
}

// One for each group of the job.
absl::StatusOr<std::vector<double>> StepDeclarations::LearningRatesOf(const std::vector<double>& given) const {
  if (given.size() > 1 && static_cast<int>(given.size()) != view_.job->num_groups()) {
    return absl::InvalidArgumentError(absl::StrCat(given.size(), " learning rates for the ", view_.job->num_groups(),
                                                   " parameter groups of job ", view_.job->name,
                                                   "; give one for all, or one for each"));
  }
  std::vector<double> rates;
  rates.reserve(view_.job->num_groups());
  for (int g = 0; g < view_.job->num_groups(); ++g) {
    OptimizerHyper hyper = view_.job->group(g);
    if (!given.empty()) hyper.lr = given.size() == 1 ? given[0] : given[g];
    RETURN_IF_ERROR(view_.job->ValidateGroup(g, hyper));
    rates.push_back(hyper.lr);
  }
  return rates;
}

const GroupTable::Rate* StepDeclarations::ClaimedRates(uint64_t claim) const {
  const int slot = static_cast<int>(claim & 0xffff);
  return slot == kRatesElsewhere ? view_.Groups().said_elsewhere() : view_.Groups().said(slot);
}

const std::atomic<double>& StepDeclarations::ClaimedLossScale(uint64_t claim) const {
  const int slot = static_cast<int>(claim & 0xffff);
  return slot == kRatesElsewhere ? view_.control->elsewhere_loss_scale : view_.control->slots[slot].loss_scale;
}

// The first slot to declare a step fixes its learning rates and its loss scale; the others must say the same.
absl::Status StepDeclarations::ClaimSettings(Slot slot, Step step, absl::Span<const double> rates,
                                             double loss_scale) const {
  const uint64_t claim = static_cast<uint64_t>(step.value()) << 16 | static_cast<uint64_t>(slot.value());
  uint64_t current = view_.control->settings_claim.load(std::memory_order_acquire);
  while (current >> 16 < static_cast<uint64_t>(step.value())) {
    // Written before the claim: whoever sees the claim sees them. A slot has one writer, so this is no race.
    GroupTable::Rate* const said = view_.Groups().said(slot.value());
    for (size_t g = 0; g < rates.size(); ++g) said[g].store(rates[g], std::memory_order_release);
    view_.control->slots[slot.value()].loss_scale.store(loss_scale, std::memory_order_release);
    if (view_.control->settings_claim.compare_exchange_weak(current, claim, std::memory_order_acq_rel))
      return absl::OkStatus();
  }
  if (current >> 16 > static_cast<uint64_t>(step.value())) return absl::OkStatus();  // this step is over
  return CompareSettings(slot, static_cast<int>(current & 0xffff), step, rates, loss_scale);
}

absl::Status StepDeclarations::CompareSettings(Slot slot, int first, Step step, absl::Span<const double> rates,
                                               double loss_scale) const {
  const char* const writer = view_.plan->pulled() ? "the trainer in seat " : "slot ";
  const auto differs = [&](absl::string_view what, double fixed, double said, absl::string_view group) {
    if (first == slot.value()) {  // this slot's own claim, repeated
      return absl::InvalidArgumentError(absl::StrCat(writer, first, " declared step ", step.value(), " with ", what,
                                                     " ", fixed, group, " before, and now ", said));
    }
    return absl::InvalidArgumentError(
        absl::StrCat(writer, slot.value(), " says ", what, " ", said, group, " for step ", step.value(), ", ",
                     first == kRatesElsewhere ? "a slot on another host" : absl::StrCat(writer, first), " said ", fixed,
                     "; all slots of a step must agree"));
  };
  for (size_t g = 0; g < rates.size(); ++g) {
    const double fixed = ClaimedRates(static_cast<uint64_t>(first))[g].load(std::memory_order_acquire);
    if (fixed == rates[g]) continue;
    return differs("learning rate", fixed, rates[g], rates.size() == 1 ? "" : absl::StrCat(" for group ", g));
  }
  const double fixed = ClaimedLossScale(static_cast<uint64_t>(first)).load(std::memory_order_acquire);
  return fixed == loss_scale ? absl::OkStatus() : differs("loss scale", fixed, loss_scale, "");
}

absl::Status StepDeclarations::CheckLossScale(Step step, double scale) const {
  if (scale >= kMinLossScale && scale <= kMaxLossScale) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("loss scale ", scale, " of step ", step.value(), "; give one between 2^-64 and 2^64"));
}

absl::Status StepDeclarations::CheckTokens(int64_t tokens, Slot slot) const {
  if (!view_.job->token_weights) {
    if (tokens == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("slot ", slot.value(), " has ", tokens, " tokens, and job ",
                                                   view_.job->name, " no token weights; leave them out"));
  }
  if (tokens >= 0 && tokens <= kMaxTokens) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("slot ", slot.value(), " has ", tokens, " tokens; it is 0 to ", kMaxTokens));
}

absl::Status StepDeclarations::CheckAllTokens(const Declaration& declaration) const {
  const size_t needed = view_.job->token_weights ? declaration.slots.size() : 0;
  if (declaration.tokens.size() != needed) {
    return absl::InvalidArgumentError(absl::StrCat(
        declaration.tokens.size(), " numbers of tokens for ", declaration.slots.size(), " slots of job ",
        view_.job->name, needed == 0 ? ", which has no token weights; leave them out" : "; give one for each"));
  }
  for (size_t i = 0; i < needed; ++i) RETURN_IF_ERROR(CheckTokens(declaration.tokens[i], declaration.slots[i]));
  return absl::OkStatus();
}

absl::Status StepDeclarations::CheckNonFinite(absl::Span<const Slot> declared, Step step, Slot slot, int tensor) const {
  if (std::find(declared.begin(), declared.end(), slot) == declared.end()) {
    return absl::InvalidArgumentError(absl::StrCat("a gradient of slot ", slot.value(),
                                                   " that is not finite, in a call that does not declare this slot"));
  }
  if (tensor < 0 || tensor >= static_cast<int>(view_.job->parameters.size())) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", tensor, " is none of job ", view_.job->name, "'s: 0 to ",
                                                   view_.job->parameters.size() - 1));
  }
  if (view_.job->parameters[tensor].frozen) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", tensor, " (\"", view_.job->parameters[tensor].name,
                                                   "\") is frozen: it has no gradient that could be not finite"));
  }
  if (view_.job->non_finite == NonFinitePolicy::kSkip) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "slot ", slot.value(), " of step ", step.value(), ": the gradient of \"", view_.job->parameters[tensor].name,
      "\" is not finite, or not below FLT_MAX / ", view_.job->num_slots, "; write it again with finite values"));
}

absl::StatusOr<std::optional<StepOutcome>> StepDeclarations::Declare(const Declaration& declaration) const {
  if (declaration.slots.empty()) return absl::InvalidArgumentError("a step without slots; name at least one");
  for (Slot slot : declaration.slots) {
    ASSIGN_OR_RETURN(std::optional<StepOutcome> outcome, CheckStep(slot, declaration.step));
    if (outcome.has_value()) return outcome;
  }
  if (declaration.in_place) return DeclareSlots(declaration);
  const Declaring declaring(*view_.control, view_.self, declaration.slots);
  for (Slot slot : declaration.slots) {
    const uint64_t holder = StepSlots(view_).HolderOf(slot);
    if (holder == 0) continue;
    return absl::FailedPreconditionError(absl::StrCat("slot ", slot.value(), " is written by session ",
                                                      SessionOf(holder), " attached to rank ", AttachedTo(holder),
                                                      "; declare a slot that no trainer is attached to"));
  }
  return DeclareSlots(declaration);
}

absl::StatusOr<std::optional<StepOutcome>> StepDeclarations::DeclareSlots(const Declaration& declaration) const {
  for (const auto& [slot, tensor] : declaration.non_finite) {
    RETURN_IF_ERROR(CheckNonFinite(declaration.slots, declaration.step, slot, tensor));
  }
  for (Slot slot : declaration.slots) RETURN_IF_ERROR(StepBuckets(view_).CheckAllDeclared(slot, declaration.step));
  ASSIGN_OR_RETURN(const std::vector<double> rates, LearningRatesOf(declaration.learning_rates));
  RETURN_IF_ERROR(CheckLossScale(declaration.step, declaration.loss_scale));
  RETURN_IF_ERROR(CheckAllTokens(declaration));
  for (Slot slot : declaration.slots) {
    RETURN_IF_ERROR(ClaimSettings(slot, declaration.step, rates, declaration.loss_scale));
  }
  for (const auto& [slot, tensor] : declaration.non_finite) NoteNonFinite(slot, tensor, declaration.step);
  // From here on nothing is refused: a declaration that is leaves no mark.
  for (size_t i = 0; i < declaration.tokens.size(); ++i) {
    view_.control->slots[declaration.slots[i].value()].tokens.store(declaration.tokens[i]);
  }
  for (Slot slot : declaration.slots) {
    for (int shard = 0; shard < view_.plan->num_shards() && declaration.in_place; ++shard) {
      StoreMax(view_.control->gradient_shards[slot.value()][shard], declaration.step.value());
    }
    view_.control->slots[slot.value()].refused.store(0);
    StoreMax(view_.control->slots[slot.value()].declared, declaration.step.value());
  }
  FutexBump(*view_.notifier);
  RETURN_IF_ERROR(CompareWithElsewhere(declaration, rates));
  Traced(view_.trace, declaration.slots, declaration.step, /*bucket=*/-1);
  return std::optional<StepOutcome>();
}

// The lead takes another host's settings by one exchange of the claim, and then takes back what is declared with
// others. What was declared between the claim and here, it may not have seen.
absl::Status StepDeclarations::CompareWithElsewhere(const Declaration& declaration,
                                                    absl::Span<const double> rates) const {
  const uint64_t elsewhere = static_cast<uint64_t>(declaration.step.value()) << 16 | kRatesElsewhere;
  if (view_.control->settings_claim.load() != elsewhere) return absl::OkStatus();
  const absl::Status same = CompareSettings(declaration.slots[0], static_cast<int>(kRatesElsewhere), declaration.step,
                                            rates, declaration.loss_scale);
  for (size_t i = 0; i < declaration.slots.size() && !same.ok(); ++i) {
    TakeBack(declaration.slots[i], declaration.step, Refusal::kOtherRates);
  }
  return same;
}

void StepDeclarations::TakeBack(Slot slot, Step step, Refusal why) const {
  SlotWords& words = view_.control->slots[slot.value()];
  int64_t expected = step.value();
  if (!words.declared.compare_exchange_strong(expected, step.value() - 1)) return;
  for (int p = 0; p < view_.plan->num_shards(); ++p) {
    expected = step.value();
    view_.control->gradient_shards[slot.value()][p].compare_exchange_strong(expected, step.value() - 1);
  }
  words.nonfinite.store(0);
  words.refused.store(RefusedWord(step.value(), why));
  FutexBump(view_.control->finished);
}

void StepDeclarations::TakeSettings(Step step, absl::Span<const double> rates, double loss_scale) const {
  for (size_t g = 0; g < rates.size(); ++g) view_.Groups().said_elsewhere()[g].store(rates[g]);
  view_.control->elsewhere_loss_scale.store(loss_scale);
  const uint64_t claim =
      view_.control->settings_claim.exchange(static_cast<uint64_t>(step.value()) << 16 | kRatesElsewhere);
  if (claim >> 16 != static_cast<uint64_t>(step.value())) return;
  const GroupTable::Rate* const said = ClaimedRates(claim);
  bool same = ClaimedLossScale(claim).load() == loss_scale;
  for (size_t g = 0; g < rates.size(); ++g) same = same && said[g].load() == rates[g];
  for (int s = 0; s < view_.job->num_slots && !same; ++s) TakeBack(Slot(s), step, Refusal::kOtherRates);
}

absl::Status StepDeclarations::CheckStands(absl::Span<const Slot> slots, Step step) const {
  for (Slot slot : slots) {
    if (!CheckSlot(slot).ok()) continue;
    const int64_t refused = view_.control->slots[slot.value()].refused.load();
    if (refused != RefusedWord(step.value(), Refusal::kOtherRates)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "slot ", slot.value(), " said other learning rates, or another loss scale, for step ", step.value(),
        " than a slot on another host (there ", view_.Groups().said_elsewhere()[0].load(), " for group 0, loss scale ",
        view_.control->elsewhere_loss_scale.load(), "); all slots of a ", "step must agree"));
  }
  return absl::OkStatus();
}

}  // namespace shardmesh
