#include "worker/step_protocol.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/status.h"
#include "local/futex.h"

namespace shardmesh {
namespace {

uint64_t BitsOf(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

double DoubleOf(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Words that only grow: a call that was held up may not take a newer step back.
void StoreMax(std::atomic<int64_t>& word, int64_t value) {
  int64_t current = word.load(std::memory_order_acquire);
  while (current < value && !word.compare_exchange_weak(current, value, std::memory_order_acq_rel)) {
  }
}

constexpr int kTensorBits = 24;
static_assert(kMaxParameters < (1 << kTensorBits));

}  // namespace

StepProtocol::StepProtocol(ControlPage* page, const JobSpec* job, const Plan* plan, std::vector<std::string> names)
    : page_(page), job_(job), plan_(plan), names_(std::move(names)) {}

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
  StoreMax(page_->slots[slot.value()].nonfinite, step.value() << kTensorBits | (tensor + 1));
}

// The first slot to declare a step fixes its learning rate; the others must say the same.
absl::Status StepProtocol::ClaimLearningRate(Slot slot, Step step, double learning_rate) {
  AdamWHyper hyper = job_->optimizer;
  hyper.lr = learning_rate;
  RETURN_IF_ERROR(Validate(hyper));
  const uint64_t claim = static_cast<uint64_t>(step.value()) << 16 | static_cast<uint64_t>(slot.value());
  uint64_t current = page_->lr_claim.load(std::memory_order_acquire);
  while (true) {
    if (current >> 16 > static_cast<uint64_t>(step.value())) return absl::OkStatus();  // this step is over
    if (current >> 16 == static_cast<uint64_t>(step.value())) {
      const int first = static_cast<int>(current & 0xffff);
      if (first == slot.value()) {  // this slot's own claim, repeated
        const double before = DoubleOf(page_->slots[first].lr_bits.load(std::memory_order_acquire));
        if (before == learning_rate) return absl::OkStatus();
        return absl::InvalidArgumentError(absl::StrCat("slot ", first, " declared step ", step.value(),
                                                       " with learning rate ", before, " before, and now ",
                                                       learning_rate));
      }
      const double fixed = DoubleOf(page_->slots[first].lr_bits.load(std::memory_order_acquire));
      if (fixed == learning_rate) return absl::OkStatus();
      return absl::InvalidArgumentError(absl::StrCat("slot ", slot.value(), " says learning rate ", learning_rate,
                                                     " for step ", step.value(), ", slot ", first, " said ", fixed,
                                                     "; all slots of a step must agree"));
    }
    // Written before the claim: whoever sees the claim sees the rate. A slot has one writer, so this is no race.
    page_->slots[slot.value()].lr_bits.store(BitsOf(learning_rate), std::memory_order_release);
    if (page_->lr_claim.compare_exchange_weak(current, claim, std::memory_order_acq_rel)) return absl::OkStatus();
  }
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
  for (Slot slot : declaration.slots)
    RETURN_IF_ERROR(ClaimLearningRate(slot, declaration.step, declaration.learning_rate));
  for (const auto& [slot, tensor] : declaration.non_finite) NoteNonFinite(slot, tensor, declaration.step);
  for (Slot slot : declaration.slots) StoreMax(page_->slots[slot.value()].declared, declaration.step.value());
  FutexBump(page_->doorbell);
  return std::optional<StepOutcome>();
}

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
  const int64_t after = words.step.load(std::memory_order_acquire);
  if (before == step.value() && after == before && skipped != 0) {
    outcome.skipped = true;
    outcome.bad_slot = Slot(static_cast<int32_t>((skipped - 1) >> 32));
    outcome.bad_tensor = static_cast<int>((skipped - 1) & 0xffffffff);
  }
  return outcome;
}

std::string StepProtocol::MissingSlots(int64_t step) const {
  std::vector<std::string> missing;
  for (int s = 0; s < job_->num_slots; ++s) {
    bool complete = page_->slots[s].declared.load() >= step;
    for (int p = 0; p < plan_->num_shards(); ++p) complete = complete && page_->pieces[s][p].load() >= step;
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
                                                      absl::FormatDuration(timeout), "; ", MissingSlots(step.value())));
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

uint64_t StepProtocol::HolderOf(Slot slot) const { return page_->slots[slot.value()].holder.load(); }

void StepProtocol::InitialPieceReady(Rank rank, uint64_t push_id) {
  page_->members[rank.value()].initial_id.store(push_id, std::memory_order_release);
  FutexBump(page_->doorbell);
}

// The id of the set of which every member has its piece; 0: there is none yet.
uint64_t StepProtocol::CompleteInitialId() const {
  const uint64_t id = page_->members[0].initial_id.load(std::memory_order_acquire);
  for (int r = 1; r < num_ranks(); ++r) {
    if (page_->members[r].initial_id.load(std::memory_order_acquire) != id) return 0;
  }
  return id;
}

bool StepProtocol::SlotsComplete(int64_t step) const {
  for (int s = 0; s < job_->num_slots; ++s) {
    if (page_->slots[s].declared.load(std::memory_order_acquire) != step) return false;
    for (int p = 0; p < plan_->num_shards(); ++p) {
      if (page_->pieces[s][p].load(std::memory_order_acquire) != step) return false;
    }
  }
  return true;
}

// The buffer for this step's version: the one that holds the older version, unless somebody reads it: then this version
// is not published (training does not wait for readers).
int StepProtocol::ChoosePublication(int64_t step) {
  if (step % job_->publish_every != 0) return -1;
  PublicationWords* publications = page_->publications;
  const int target = publications[0].version_plus_one.load() <= publications[1].version_plus_one.load() ? 0 : 1;
  if (publications[target].pins.load() != 0) return -1;
  const int64_t before = publications[target].version_plus_one.exchange(0);
  if (publications[target].pins.load() == 0) return target;
  publications[target].version_plus_one.store(before);
  return -1;
}

void StepProtocol::Issue(const Command& command) {
  page_->command = command;
  page_->decided.fetch_add(1, std::memory_order_release);
  FutexBump(page_->decision);
}

bool StepProtocol::Decide() {
  if (page_->abort.load() != 0) return false;
  Command command;
  const int64_t committed = committed_step().value();
  command.step = committed + 1;
  command.parity = page_->parity.load(std::memory_order_acquire);
  if (committed == kNoStep) {
    command.initial_id = CompleteInitialId();
    if (command.initial_id == 0) return false;
    command.kind = CommandKind::kInit;
    command.publish = ChoosePublication(0);
  } else if (SlotsComplete(command.step)) {
    command.kind = CommandKind::kStep;
    command.apply = 1;
    for (int s = 0; s < job_->num_slots && command.apply; ++s) {
      const int64_t word = page_->slots[s].nonfinite.load(std::memory_order_acquire);
      if (word >> kTensorBits != command.step) continue;
      command.apply = 0;
      command.nonfinite = int64_t{s} << 32 | ((word & ((1 << kTensorBits) - 1)) - 1);
    }
    AdamWHyper hyper = job_->optimizer;
    const uint64_t claim = page_->lr_claim.load(std::memory_order_acquire);
    hyper.lr = DoubleOf(page_->slots[claim & 0xffff].lr_bits.load(std::memory_order_acquire));
    auto scalars = ComputeAdamWScalars(hyper, command.step);  // validated when it was claimed
    if (!scalars.ok()) return false;
    command.scalars = *scalars;
    if (command.apply) command.publish = ChoosePublication(command.step);
  } else if (page_->digest_wanted.load() > page_->digest_done.load()) {
    command.kind = CommandKind::kDigest;
    command.step = committed;
    command.nonfinite = static_cast<int64_t>(page_->digest_wanted.load());
  } else {
    return false;
  }
  Issue(command);
  return true;
}

void StepProtocol::Done(Rank rank, uint64_t seq) {
  page_->members[rank.value()].done.store(seq, std::memory_order_release);
  FutexBump(page_->doorbell);
}

bool StepProtocol::AllDone() const {
  const uint64_t seq = decided();
  for (int r = 0; r < num_ranks(); ++r) {
    if (page_->members[r].done.load(std::memory_order_acquire) != seq) return false;
  }
  return true;
}

std::vector<int> StepProtocol::NotDone() const {
  std::vector<int> ranks;
  for (int r = 0; r < num_ranks(); ++r) {
    if (page_->members[r].done.load(std::memory_order_acquire) != decided()) ranks.push_back(r);
  }
  return ranks;
}

// Adds one replica of every shard up, and compares the others with it.
void StepProtocol::SummarizeDigest() {
  uint64_t sum = 0, differs = 0;
  for (int shard = 0; shard < plan_->num_shards(); ++shard) {
    const int first = plan_->RankOf({shard, 0}).value();
    sum += page_->members[first].digest.load(std::memory_order_acquire);
    for (int replica = 1; replica < plan_->num_replicas(); ++replica) {
      const int other = plan_->RankOf({shard, replica}).value();
      if (page_->members[other].digest.load() == page_->members[first].digest.load()) continue;
      differs = static_cast<uint64_t>(first + 1) << 32 | static_cast<uint64_t>(other + 1);
    }
  }
  page_->digest_value.store(sum);
  page_->digest_step.store(page_->command.step);
  page_->digest_differs.store(differs);
  page_->digest_done.store(static_cast<uint64_t>(page_->command.nonfinite));
}

void StepProtocol::Commit() {
  const Command& command = page_->command;
  if (command.kind == CommandKind::kDigest) {
    SummarizeDigest();
  } else {
    if (command.kind == CommandKind::kStep && command.apply) page_->parity.store(1 - command.parity);
    OutcomeWords& outcome = page_->outcomes[command.step % kOutcomeRing];
    const bool skipped = command.kind == CommandKind::kStep && !command.apply;
    outcome.step.store(kNoStep, std::memory_order_release);
    outcome.skipped.store(skipped ? command.nonfinite + 1 : 0, std::memory_order_release);
    outcome.step.store(command.step, std::memory_order_release);
    if (command.publish >= 0) page_->publications[command.publish].version_plus_one.store(command.step + 1);
    page_->committed_step_plus_one.store(command.step + 1, std::memory_order_release);
  }
  page_->committed.store(decided(), std::memory_order_release);
  FutexBump(page_->finished);
}

uint64_t StepProtocol::AskForDigest() {
  const uint64_t ticket = page_->digest_wanted.fetch_add(1) + 1;
  FutexBump(page_->doorbell);
  return ticket;
}

absl::StatusOr<std::optional<std::pair<Step, uint64_t>>> StepProtocol::DigestOf(uint64_t ticket) const {
  uint64_t done = page_->digest_done.load();
  if (done < ticket) {
    RETURN_IF_ERROR(Health());
    return std::optional<std::pair<Step, uint64_t>>();
  }
  while (true) {  // a newer digest may be stored meanwhile: read until two reads of its ticket agree
    const Step step(page_->digest_step.load());
    const uint64_t value = page_->digest_value.load(), differs = page_->digest_differs.load();
    if (const uint64_t again = page_->digest_done.load(); again != done) {
      done = again;
      continue;
    }
    if (differs == 0) return std::make_optional(std::make_pair(step, value));
    const int a = static_cast<int>(differs >> 32) - 1, b = static_cast<int>(differs & 0xffffffff) - 1;
    return absl::DataLossError(absl::StrCat("replicas differ at step ", step.value(), ": worker ", names_[a], " (rank ",
                                            a, ") and worker ", names_[b], " (rank ", b,
                                            ") hold the same shard with other bits; check their memory"));
  }
}

std::vector<Step> StepProtocol::Published() const {
  std::vector<Step> steps;
  for (const PublicationWords& words : page_->publications) {
    if (const int64_t version = words.version_plus_one.load(); version > 0) steps.push_back(Step(version - 1));
  }
  if (steps.size() == 2 && steps[1] < steps[0]) std::swap(steps[0], steps[1]);
  return steps;
}

std::optional<int> StepProtocol::Pin(Step step) {
  for (int buffer = 0; buffer < kPublicationBuffers; ++buffer) {
    PublicationWords& words = page_->publications[buffer];
    if (words.version_plus_one.load() != step.value() + 1) continue;
    words.pins.fetch_add(1);
    if (words.version_plus_one.load() == step.value() + 1) return buffer;
    words.pins.fetch_sub(1);
  }
  return std::nullopt;
}

void StepProtocol::Unpin(int buffer) { page_->publications[buffer].pins.fetch_sub(1); }

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
