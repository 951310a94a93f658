#include "worker/step/step_protocol.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/plain_text.h"
#include "core/base/status.h"
#include "local/futex.h"
#include "worker/control/damage.h"

namespace shardmesh {

StepProtocol::StepProtocol(ControlBlock* control, std::atomic<uint32_t>* notifier, const JobSpec* job, const Plan* plan,
                           std::vector<std::string> names, std::optional<HostRanks> local, Rank self)
    : control_(control),
      job_(job),
      plan_(plan),
      names_(std::move(names)),
      notifier_(notifier),
      local_(local.value_or(HostRanks::OneHost(plan->num_ranks()))),
      self_(self),
      publications_(control, job, self),
      groups_(control, *plan),
      seat_requests_(job->num_trainers) {}

std::optional<StepOutcome> StepProtocol::OutcomeOf(Step step) const {
  if (step > committed_step()) return std::nullopt;
  StepOutcome outcome;
  outcome.step = step;
  outcome.already_applied = true;
  const OutcomeWords& words = control_->outcomes[step.value() % kOutcomeRing];
  // The words of a step that left the ring may be written meanwhile: they count when the step is the same on both
  // sides.
  const int64_t before = words.step.load(std::memory_order_acquire);
  const int64_t skipped = words.skipped.load(std::memory_order_acquire);
  const double norm = words.norm.load(std::memory_order_acquire);
  const int64_t peak = words.peak.load(std::memory_order_acquire);
  const int64_t after = words.step.load(std::memory_order_acquire);
  if (before == step.value() && after == before && skipped != 0) {
    outcome.skipped = true;
    outcome.no_tokens = skipped - 1 == kNoTokens;
    outcome.bad_slot = Slot(static_cast<int32_t>((skipped - 1) >> 32));
    outcome.bad_tensor = static_cast<int>((skipped - 1) & 0xffffffff);
  }
  if (before == step.value() && after == before) {
    outcome.norm = norm;
    outcome.peak = static_cast<int>(peak);
  }
  return outcome;
}

absl::StatusOr<StepOutcome> StepProtocol::AwaitCommit(Step step, absl::Duration timeout) {
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(timeout);
  while (true) {
    const uint32_t word = control_->finished.load(std::memory_order_acquire);
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
    FutexWait(control_->finished, word, absl::Nanoseconds(left));
  }
}

bool StepProtocol::ClaimPush(Slot slot, int shard, Rank receiver) {
  int32_t nobody = 0;
  return control_->pushes[slot.value()][shard].compare_exchange_strong(nobody, receiver.value() + 1);
}

void StepProtocol::ReleasePush(Slot slot, int shard) { control_->pushes[slot.value()][shard].store(0); }

bool StepProtocol::IsPushedHere(Slot slot, int shard) const {
  return local_.Has(plan_->RankOf({shard, slot.value() % plan_->num_replicas()}));
}

bool IsBeingDeclared(const SlotWords& slot) {
  return std::any_of(std::begin(slot.declaring), std::end(slot.declaring),
                     [](const std::atomic<int32_t>& calls) { return calls.load() != 0; });
}

// Takes the slot, then looks for pushes; a push claims its gradient shard, then looks for a holder: one of them sees
// the other. As with declarations of connected trainers.
absl::Status StepProtocol::TakeSlot(Slot slot, uint64_t holder) {
  RETURN_IF_ERROR(CheckSlot(slot));
  if (control_->elsewhere[slot.value()].holder.load() != 0) return HeldElsewhere(slot);
  SlotWords& words = control_->slots[slot.value()];
  uint64_t current = 0;
  if (words.holder.compare_exchange_strong(current, local_.num_hosts > 1 ? holder | kAsking : holder)) {
    if (IsBeingDeclared(words)) {
      GiveSlot(slot, holder);
      return absl::AbortedError(
          absl::StrCat("a connected trainer declares slot ", slot.value(), "; attach again when it has"));
    }
    for (int shard = 0; shard < plan_->num_shards(); ++shard) {
      const int32_t receiver = control_->pushes[slot.value()][shard].load();
      if (receiver == 0) continue;
      GiveSlot(slot, holder);
      return absl::AbortedError(absl::StrCat("rank ", receiver - 1, " receives a push to slot ", slot.value(),
                                             "; attach again when it has ended"));
    }
    if (local_.num_hosts > 1) FutexBump(*notifier_);
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat("slot ", slot.value(), " is written by session ",
                                                    SessionOf(current), " attached to rank ", AttachedTo(current),
                                                    " (trainer pid ", control_->slots[slot.value()].holder_pid.load(),
                                                    ")", "; end that trainer, or take another slot"));
}

void StepProtocol::LeaveSlot(Slot slot, uint64_t holder) {
  if (!CheckSlot(slot).ok()) return;
  control_->slots[slot.value()].holder.compare_exchange_strong(holder, holder | kLeaving);
}

void StepProtocol::GiveSlot(Slot slot, uint64_t holder) {
  if (!CheckSlot(slot).ok()) return;
  std::atomic<uint64_t>& word = control_->slots[slot.value()].holder;
  uint64_t current = word.load();
  while ((current & ~kAsking) == holder && !word.compare_exchange_weak(current, 0)) {
  }
  FutexBump(control_->finished);  // those that wait for it
  FutexBump(*notifier_);          // other hosts are to know
}

absl::Status StepProtocol::AwaitGiven(absl::Span<const Slot> slots, uint64_t holder, absl::Duration timeout) const {
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(timeout);
  while (true) {
    const uint32_t word = control_->finished.load(std::memory_order_acquire);
    bool all = true;
    for (Slot slot : slots) {
      const uint64_t current = control_->slots[slot.value()].holder.load();
      if ((current & ~kAsking) != holder) return HeldElsewhere(slot);
      all = all && current == holder;
    }
    if (all) return absl::OkStatus();
    RETURN_IF_ERROR(Health());
    const int64_t left = deadline - MonotonicNanos();
    if (left <= 0) {
      return absl::DeadlineExceededError(
          absl::StrCat("the other hosts did not let go of slots within ", absl::FormatDuration(timeout)));
    }
    FutexWait(control_->finished, word, absl::Nanoseconds(left));
  }
}

void StepProtocol::TakeShardsBack(Slot slot) {
  const int64_t open = committed_step().value() + 1;
  for (int p = 0; p < plan_->num_shards() && open > 0; ++p) {
    int64_t expected = open;
    control_->gradient_shards[slot.value()][p].compare_exchange_strong(expected, open - 1);
  }
  if (plan_->pulled()) return;  // a seat; that word is a slot's
  if (!TakeBucketsBack(slot)) control_->slots[slot.value()].nonfinite.store(0);
}

void StepProtocol::EndAsking(Slot slot, uint64_t asked, bool given) {
  uint64_t current = asked;  // it may have given up meanwhile
  control_->slots[slot.value()].holder.compare_exchange_strong(current, given ? asked & ~kAsking : 0);
  FutexBump(control_->finished);
}

void StepProtocol::AwaitFree(absl::Span<const Slot> slots, absl::Duration timeout) const {
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(timeout);
  while (true) {
    const uint32_t word = control_->finished.load(std::memory_order_acquire);
    const int64_t left = deadline - MonotonicNanos();
    const auto is_held = [this](Slot slot) { return HolderOf(slot) != 0; };
    if (left <= 0 || std::none_of(slots.begin(), slots.end(), is_held)) return;
    FutexWait(control_->finished, word, absl::Nanoseconds(left));
  }
}

// A slot that lacks a gradient shard stays incomplete while the caller holds it, since nobody else may bring one: so
// the lead cannot decide the open step, and the words and windows of all its slots are the caller's.
std::optional<Step> StepProtocol::OpenSlots(absl::Span<const Slot> slots) {
  const int64_t open = committed_step().value() + 1;
  if (plan_->bucketed()) return OpenBuckets(slots, open);
  if (plan_->pulled()) return std::nullopt;  // seats: what their last trainers wrote is taken back by the lead
  bool incomplete = false;
  for (Slot slot : slots) {
    incomplete = incomplete || control_->slots[slot.value()].declared.load() < open;
    for (int p = 0; p < plan_->num_shards(); ++p) {
      incomplete = incomplete || control_->gradient_shards[slot.value()][p].load() < open;
    }
  }
  if (open < 1) return std::nullopt;
  if (!incomplete) return Step(open);
  for (Slot slot : slots) {
    int64_t expected = open;
    control_->slots[slot.value()].declared.compare_exchange_strong(expected, open - 1);
    TakeShardsBack(slot);
  }
  return std::nullopt;
}

uint64_t StepProtocol::HolderOf(Slot slot) const {
  const uint64_t here = control_->slots[slot.value()].holder.load();
  return here != 0 ? here : control_->elsewhere[slot.value()].holder.load();
}

absl::Status StepProtocol::HeldElsewhere(Slot slot) const {
  const uint64_t far = control_->elsewhere[slot.value()].holder.load();
  if (far == 0) {
    return absl::AbortedError(
        absl::StrCat("slot ", slot.value(), " was taken by a trainer on another host; attach again if it is free now"));
  }
  return absl::FailedPreconditionError(absl::StrCat("slot ", slot.value(), " is written by session ", SessionOf(far),
                                                    " attached to rank ", AttachedTo(far),
                                                    ", on another host; end that trainer, or take another slot"));
}

void StepProtocol::TakeBack(Slot slot, Step step, Refusal why) {
  SlotWords& words = control_->slots[slot.value()];
  int64_t expected = step.value();
  if (!words.declared.compare_exchange_strong(expected, step.value() - 1)) return;
  for (int p = 0; p < plan_->num_shards(); ++p) {
    expected = step.value();
    control_->gradient_shards[slot.value()][p].compare_exchange_strong(expected, step.value() - 1);
  }
  words.nonfinite.store(0);
  words.refused.store(RefusedWord(step.value(), why));
  FutexBump(control_->finished);
}

void StepProtocol::TakeSettings(Step step, absl::Span<const double> rates, double loss_scale) {
  for (size_t g = 0; g < rates.size(); ++g) groups_.said_elsewhere()[g].store(rates[g]);
  control_->elsewhere_loss_scale.store(loss_scale);
  const uint64_t claim = control_->settings_claim.exchange(static_cast<uint64_t>(step.value()) << 16 | kRatesElsewhere);
  if (claim >> 16 != static_cast<uint64_t>(step.value())) return;
  const GroupTable::Rate* const said = ClaimedRates(claim);
  bool same = ClaimedLossScale(claim).load() == loss_scale;
  for (size_t g = 0; g < rates.size(); ++g) same = same && said[g].load() == rates[g];
  for (int s = 0; s < job_->num_slots && !same; ++s) TakeBack(Slot(s), step, Refusal::kOtherRates);
}

absl::Status StepProtocol::CheckStands(absl::Span<const Slot> slots, Step step) const {
  for (Slot slot : slots) {
    if (!CheckSlot(slot).ok()) continue;
    const int64_t refused = control_->slots[slot.value()].refused.load();
    if (refused != RefusedWord(step.value(), Refusal::kOtherRates)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "slot ", slot.value(), " said other learning rates, or another loss scale, for step ", step.value(),
        " than a slot on another host (there ", groups_.said_elsewhere()[0].load(), " for group 0, loss scale ",
        control_->elsewhere_loss_scale.load(), "); all slots of a ", "step must agree"));
  }
  return absl::OkStatus();
}

void StepProtocol::InitialShardReady(Rank rank, uint64_t push_id) {
  control_->members[rank.value()].initial_id.store(push_id, std::memory_order_release);
  FutexBump(*notifier_);
}

void StepProtocol::LoadedReady(Rank rank, uint64_t load_id, Step step) {
  control_->members[rank.value()].loaded_step.store(step.value(), std::memory_order_release);
  control_->members[rank.value()].loaded_id.store(load_id, std::memory_order_release);
  FutexBump(*notifier_);
}

void StepProtocol::SignOfLife(Rank rank, int64_t now_nanos, int64_t pid, bool retained) {
  control_->members[rank.value()].pid.store(pid, std::memory_order_relaxed);
  control_->members[rank.value()].alive_nanos.store(now_nanos, std::memory_order_release);
  control_->members[rank.value()].retained.store(retained ? 1 : 0,
                                             std::memory_order_release);  // then: who is kept can be silent
}

bool StepProtocol::ComesBack(int rank) const { return control_->members[rank].retained.load() != 0; }

void StepProtocol::CheckPeers(Rank self, int64_t now_nanos, absl::Duration timeout) {
  for (int r = 0; r < num_ranks(); ++r) {
    const int64_t alive = control_->members[r].alive_nanos.load(std::memory_order_acquire);
    if (r == self.value() || alive == 0) continue;
    if (now_nanos - alive > absl::ToInt64Nanoseconds(timeout)) Abort(AbortReason::kSilent, r, self);
  }
}

void StepProtocol::Abort(AbortReason reason, int about, Rank reporter, int device) {
  uint64_t none = 0;
  control_->abort.compare_exchange_strong(none, AbortWord(reason, about, reporter.value(), device));
  FutexBump(*notifier_);
  FutexBump(control_->decision);
  FutexBump(control_->finished);
}

void StepProtocol::AbortFor(AbortReason reason, int about, absl::string_view cause) {
  if (control_->abort.load() != 0) return;
  const std::string plain = PlainText(cause, kMaxCause - 1);
  plain.copy(control_->cause, plain.size());
  control_->cause[plain.size()] = 0;
  Abort(reason, about, Rank(local_.first()));
}

std::string StepProtocol::CauseOf() const {
  return control_->cause[0] == 0 ? "see its log" : std::string(control_->cause, strnlen(control_->cause, kMaxCause));
}

std::string StepProtocol::DamageOf(int rank) const {
  const Damage damage = Damage::Of(rank < num_ranks() ? control_->members[rank].damage.load() : 0);
  return damage.what == Damage::kNone ? "see its log" : damage.ToString(*job_);
}

// What the replicas' comparison after the last committed step has found, and since when it may be so.
std::string StepProtocol::DifferenceFrom(int rank) const {
  const int64_t step = committed_step().value(), every = std::max(job_->check_every, 1);
  return absl::StrCat("holds the same shard as ", rank < num_ranks() ? names_[rank] : "?", " (rank ", rank,
                      ") with other bits at step ", step, ": versions after step ",
                      std::max<int64_t>(step - 1, 0) / every * every, ", when they were equal, may be wrong");
}

std::optional<Rank> StepProtocol::Lost() const {
  const uint64_t word = control_->abort.load(std::memory_order_acquire);
  const AbortReason reason = ReasonOf(word);
  const bool ended = reason == AbortReason::kSilent || reason == AbortReason::kGone || reason == AbortReason::kLeft ||
                     reason == AbortReason::kUnreachable;
  if (word == 0 || !ended || AboutOf(word) >= num_ranks()) return std::nullopt;
  return Rank(AboutOf(word));
}

absl::Status StepProtocol::Health() const {
  const uint64_t word = control_->abort.load(std::memory_order_acquire);
  if (word == 0) return absl::OkStatus();
  const int about = AboutOf(word);
  std::string saw = "failed", remedy = "delete the job and create it again";
  if (Lost().has_value() && local_.num_hosts == 1 && plan_->num_replicas() > 1) {
    remedy = "open the job again: where the others have a copy of each shard it goes on without that worker";
  }
  std::string seen = absl::StrCat(", seen by rank ", ReporterOf(word));
  absl::StatusCode code = absl::StatusCode::kUnavailable;
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
    case AbortReason::kUnreachable:
      saw = "is not reached by other hosts any more (killed or stopped, or the link between them broke)";
      break;
    case AbortReason::kNotMet:
      saw = absl::StrCat("could not meet the workers of other hosts: ", CauseOf());
      break;
    case AbortReason::kBadFacts:
      saw = absl::StrCat("said for its host what cannot be: ", CauseOf());
      remedy = "check that all workers are of one build, then delete the job and create it again";
      break;
    case AbortReason::kReformed:
      saw = "goes on at a later epoch, since a member was lost or it was brought to another mesh";
      seen = "";
      remedy = "open the job again";
      break;
    case AbortReason::kInternal:
      saw = "met an internal error (see its log)";
      break;
    case AbortReason::kDevice:
      saw = absl::StrCat("could not finish its part of the step on CUDA device ", DeviceOf(word), " (see its log)");
      remedy = "restart that worker, then delete the job and create it again";
      break;
    case AbortReason::kDamaged:
      code = absl::StatusCode::kDataLoss;
      saw = absl::StrCat("found silent corruption (", DamageOf(about), ")");
      remedy = "have its machine's memory and processor checked, then delete the job and create it again";
      break;
    case AbortReason::kDiffers:
      code = absl::StatusCode::kDataLoss;
      saw = DifferenceFrom(ReporterOf(word));
      seen = "";
      remedy = absl::StrCat(plan_->num_replicas() > 2 ? "have its machine's memory and processor checked"
                                                      : "one of the two is wrong: have both machines checked",
                            ", then delete the job and create it again");
      break;
  }
  // The word may be another host's: it may name ranks that the job does not have.
  const std::string who = about < num_ranks() ? absl::StrCat("worker ", names_[about], " (rank ", about, ", pid ",
                                                             control_->members[about].pid.load(), ")")
                                              : absl::StrCat("rank ", about, ", which is none of ", num_ranks(), ",");
  return absl::Status(code, absl::StrCat(who, " of job ", job_->name, " ", saw, seen, "; the last committed step is ",
                                         committed_step().value(), "; ", remedy));
}

}  // namespace shardmesh
