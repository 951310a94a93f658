#include "worker/step/step_slots.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "local/memory/futex.h"
#include "worker/step/step_buckets.h"
#include "worker/step/step_declarations.h"
#include "worker/step/step_members.h"

namespace shardmesh {

bool IsBeingDeclared(const SlotWords& slot) {
  return std::any_of(std::begin(slot.declaring), std::end(slot.declaring),
                     [](const std::atomic<int32_t>& calls) { return calls.load() != 0; });
}

bool StepSlots::ClaimPush(Slot slot, int shard, Rank receiver) const {
  int32_t nobody = 0;
  return view_.control->pushes[slot.value()][shard].compare_exchange_strong(nobody, receiver.value() + 1);
}

void StepSlots::ReleasePush(Slot slot, int shard) const { view_.control->pushes[slot.value()][shard].store(0); }

// Takes the slot, then looks for pushes; a push claims its gradient shard, then looks for a holder: one of them sees
// the other. As with declarations of connected trainers.
absl::Status StepSlots::Take(Slot slot, uint64_t holder) const {
  RETURN_IF_ERROR(StepDeclarations(view_).CheckSlot(slot));
  if (view_.control->elsewhere[slot.value()].holder.load() != 0) return HeldElsewhere(slot);
  SlotWords& words = view_.control->slots[slot.value()];
  uint64_t current = 0;
  if (words.holder.compare_exchange_strong(current, view_.local.alone() ? holder : holder | kAsking)) {
    if (IsBeingDeclared(words)) {
      Give(slot, holder);
      return absl::AbortedError(
          absl::StrCat("a connected trainer declares slot ", slot.value(), "; attach again when it has"));
    }
    for (int shard = 0; shard < view_.plan->num_shards(); ++shard) {
      const int32_t receiver = view_.control->pushes[slot.value()][shard].load();
      if (receiver == 0) continue;
      Give(slot, holder);
      return absl::AbortedError(absl::StrCat("rank ", receiver - 1, " receives a push to slot ", slot.value(),
                                             "; attach again when it has ended"));
    }
    if (!view_.local.alone()) FutexBump(*view_.notifier);
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("slot ", slot.value(), " is written by session ", SessionOf(current), " attached to rank ",
                   AttachedTo(current), " (trainer pid ", view_.control->slots[slot.value()].holder_pid.load(), ")",
                   "; end that trainer, or take another slot"));
}

void StepSlots::Leave(Slot slot, uint64_t holder) const {
  if (!StepDeclarations(view_).CheckSlot(slot).ok()) return;
  view_.control->slots[slot.value()].holder.compare_exchange_strong(holder, holder | kLeaving);
}

void StepSlots::Give(Slot slot, uint64_t holder) const {
  if (!StepDeclarations(view_).CheckSlot(slot).ok()) return;
  std::atomic<uint64_t>& word = view_.control->slots[slot.value()].holder;
  uint64_t current = word.load();
  while ((current & ~kAsking) == holder && !word.compare_exchange_weak(current, 0)) {
  }
  FutexBump(view_.control->finished);  // those that wait for it
  FutexBump(*view_.notifier);          // other hosts are to know
}

absl::Status StepSlots::AwaitGiven(absl::Span<const Slot> slots, uint64_t holder, absl::Duration timeout) const {
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(timeout);
  while (true) {
    const uint32_t word = view_.control->finished.load(std::memory_order_acquire);
    bool all = true;
    for (Slot slot : slots) {
      const uint64_t current = view_.control->slots[slot.value()].holder.load();
      if ((current & ~kAsking) != holder) return HeldElsewhere(slot);
      all = all && current == holder;
    }
    if (all) return absl::OkStatus();
    RETURN_IF_ERROR(StepMembers(view_).Health());
    const int64_t left = deadline - MonotonicNanos();
    if (left <= 0) {
      return absl::DeadlineExceededError(
          absl::StrCat("the other hosts did not let go of slots within ", absl::FormatDuration(timeout)));
    }
    FutexWait(view_.control->finished, word, absl::Nanoseconds(left));
  }
}

void StepSlots::TakeShardsBack(Slot slot) const {
  const int64_t open = view_.committed_step().value() + 1;
  for (int p = 0; p < view_.plan->num_shards() && open > 0; ++p) {
    int64_t expected = open;
    view_.control->gradient_shards[slot.value()][p].compare_exchange_strong(expected, open - 1);
  }
  if (view_.plan->pulled()) return;  // a seat; that word is a slot's
  if (!StepBuckets(view_).TakeBack(slot)) view_.control->slots[slot.value()].nonfinite.store(0);
}

void StepSlots::EndAsking(Slot slot, uint64_t asked, bool given) const {
  uint64_t current = asked;  // it may have given up meanwhile
  view_.control->slots[slot.value()].holder.compare_exchange_strong(current, given ? asked & ~kAsking : 0);
  FutexBump(view_.control->finished);
}

void StepSlots::AwaitFree(absl::Span<const Slot> slots, absl::Duration timeout) const {
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(timeout);
  while (true) {
    const uint32_t word = view_.control->finished.load(std::memory_order_acquire);
    const int64_t left = deadline - MonotonicNanos();
    const auto is_held = [this](Slot slot) { return HolderOf(slot) != 0; };
    if (left <= 0 || std::none_of(slots.begin(), slots.end(), is_held)) return;
    FutexWait(view_.control->finished, word, absl::Nanoseconds(left));
  }
}

// A slot that lacks a gradient shard stays incomplete while the caller holds it, since nobody else may bring one: so
// the lead cannot decide the open step, and the words and windows of all its slots are the caller's.
std::optional<Step> StepSlots::Open(absl::Span<const Slot> slots) const {
  const int64_t open = view_.committed_step().value() + 1;
  if (view_.plan->pulled()) return std::nullopt;  // seats: what their last trainers wrote is taken back by the lead
  if (view_.plan->bucketed()) return StepBuckets(view_).Open(slots, open);
  bool incomplete = false;
  for (Slot slot : slots) {
    incomplete = incomplete || view_.control->slots[slot.value()].declared.load() < open;
    for (int p = 0; p < view_.plan->num_shards(); ++p) {
      incomplete = incomplete || view_.control->gradient_shards[slot.value()][p].load() < open;
    }
  }
  if (open < 1) return std::nullopt;
  if (!incomplete) return Step(open);
  for (Slot slot : slots) {
    int64_t expected = open;
    view_.control->slots[slot.value()].declared.compare_exchange_strong(expected, open - 1);
    TakeShardsBack(slot);
  }
  return std::nullopt;
}

uint64_t StepSlots::HolderOf(Slot slot) const {
  const uint64_t here = view_.control->slots[slot.value()].holder.load();
  return here != 0 ? here : view_.control->elsewhere[slot.value()].holder.load();
}

absl::Status StepSlots::HeldElsewhere(Slot slot) const {
  const uint64_t far = view_.control->elsewhere[slot.value()].holder.load();
  if (far == 0) {
    return absl::AbortedError(
        absl::StrCat("slot ", slot.value(), " was taken by a trainer on another host; attach again if it is free now"));
  }
  return absl::FailedPreconditionError(absl::StrCat("slot ", slot.value(), " is written by session ", SessionOf(far),
                                                    " attached to rank ", AttachedTo(far),
                                                    ", on another host; end that trainer, or take another slot"));
}

SessionsHere StepSlots::Sessions() const {
  SessionsHere sessions;
  std::set<uint64_t> leaving;
  for (int s = 0; s < view_.job->num_writers(); ++s) {
    const uint64_t word = view_.control->slots[s].holder.load(), holder = word & ~kLeaving;
    if (holder == 0 || AttachedTo(holder) != view_.self.value()) continue;
    sessions.staying[holder].push_back(s);
    if (word != holder) leaving.insert(holder);
  }
  for (const uint64_t holder : leaving) sessions.leaving.insert(sessions.staying.extract(holder));
  return sessions;
}

}  // namespace shardmesh
