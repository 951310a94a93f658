#include "worker/step/step_outcomes.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/fault_point.h"
#include "core/base/status.h"
#include "local/memory/futex.h"
#include "worker/step/step_members.h"

namespace shardmesh {

std::optional<StepOutcome> StepOutcomes::OutcomeOf(Step step) const {
  if (step > view_.committed_step()) return std::nullopt;
  StepOutcome outcome;
  outcome.step = step;
  outcome.already_applied = true;
  const OutcomeWords& words = view_.control->outcomes[step.value() % kOutcomeRing];
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

absl::StatusOr<StepOutcome> StepOutcomes::AwaitCommit(Step step, absl::Duration timeout) const {
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(timeout);
  while (true) {
    const uint32_t word = view_.control->finished.load(std::memory_order_acquire);
    if (std::optional<StepOutcome> outcome = OutcomeOf(step)) {
      outcome->already_applied = false;
      return *outcome;
    }
    RETURN_IF_ERROR(StepMembers(view_).Health());
    const int64_t left = deadline - MonotonicNanos();
    if (left <= 0) {
      return absl::DeadlineExceededError(absl::StrCat("step ", step.value(), " was not committed within ",
                                                      absl::FormatDuration(timeout), "; ", WaitsFor(step)));
    }
    FutexWait(view_.control->finished, word, absl::Nanoseconds(left));
  }
}

bool StepOutcomes::IsComplete(int slot, Step step) const {
  const ElsewhereWords& elsewhere = view_.control->elsewhere[slot];
  bool complete = std::max(view_.control->slots[slot].declared.load(), elsewhere.declared.load()) >= step.value();
  const uint64_t far = elsewhere.declared.load() >= step.value() ? elsewhere.gradient_shards.load() : 0;
  for (int p = 0; p < view_.plan->num_shards() && !view_.plan->bucketed(); ++p) {
    complete = complete && (view_.control->gradient_shards[slot][p].load() >= step.value() || (far >> p & 1) != 0);
  }
  return complete;
}

std::vector<MissingSlot> StepOutcomes::MissingSlots(Step step) const {
  std::vector<MissingSlot> missing;
  if (view_.plan->pulled()) {
    for (const auto& [slot, seat] : view_.Pulled().Taken()) {
      const int64_t pid = IsConnected(*view_.control, seat) ? 0 : view_.control->slots[seat].holder_pid.load();
      missing.push_back({slot, view_.control->slots[seat].holder.load(), pid});
    }
    return missing;
  }
  for (int s = 0; s < view_.job->num_slots; ++s) {
    if (IsComplete(s, step)) continue;
    const uint64_t holder = view_.control->slots[s].holder.load();
    missing.push_back({s, holder, view_.control->slots[s].holder_pid.load(), view_.control->elsewhere[s].holder.load(),
                       view_.control->slots[s].times_left.load()});
  }
  return missing;
}

std::string StepOutcomes::WaitsFor(Step step) const {
  if (view_.plan->pulled()) return view_.Pulled().WaitsFor();
  std::vector<std::string> missing;
  for (const MissingSlot& each : MissingSlots(step)) {
    missing.push_back(each.holder != 0 ? absl::StrCat(each.slot, " (trainer pid ", each.pid, ")")
                      : each.far_holder != 0
                          ? absl::StrCat(each.slot, " (a trainer attached to rank ", AttachedTo(each.far_holder), ")")
                          : absl::StrCat(each.slot));
  }
  return missing.empty() ? "no slot is missing, the workers are at it"
                         : absl::StrCat("missing slots: ", absl::StrJoin(missing, ","));
}

void StepOutcomes::Record(const Command& command) const {
  OutcomeWords& outcome = view_.control->outcomes[command.step % kOutcomeRing];
  const bool skipped = command.kind == CommandKind::kStep && !command.apply;
  outcome.step.store(kNoStep, std::memory_order_release);
  Reach(FaultPoint::kOutcomeOpen);
  outcome.skipped.store(skipped ? command.nonfinite + 1 : 0, std::memory_order_release);
  const bool normed = view_.control->norm_step.load(std::memory_order_acquire) == command.step;
  outcome.norm.store(normed ? view_.control->norm.load(std::memory_order_acquire) : 0, std::memory_order_release);
  outcome.peak.store(BitsOf(view_.control->pull.peak.load(), command.step), std::memory_order_release);
  outcome.step.store(command.step, std::memory_order_release);
}

}  // namespace shardmesh
