#include "worker/step/step_buckets.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"
#include "local/memory/futex.h"
#include "worker/control/residency.h"
#include "worker/step/step_declarations.h"
#include "worker/step/step_members.h"

namespace shardmesh {

absl::Status StepBuckets::Check(int bucket, bool gradients) const {
  if (!view_.plan->bucketed()) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", view_.job->name,
                     " has full residency: nothing is said of single buckets; create it with residency bucket"));
  }
  if (bucket < 0 || bucket >= view_.num_buckets()) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", bucket, " is none of job ", view_.job->name, "'s: 0 to ", view_.num_buckets() - 1));
  }
  if (gradients && view_.plan->buckets()[bucket].frozen) {
    return absl::InvalidArgumentError(absl::StrCat("bucket ", bucket, " of job ", view_.job->name,
                                                   " is of frozen parameters, which have no gradients"));
  }
  return absl::OkStatus();
}

bool StepBuckets::HasShard(Slot slot, int bucket, int shard, Step step) const {
  const ResidencyTable table(view_.control, *view_.plan);
  return table.gradient_shard(bucket, slot.value(), shard).load(std::memory_order_acquire) >= step.value() ||
         table.bucket(bucket).reduced.load(std::memory_order_acquire) >= step.value();
}

bool StepBuckets::Has(Slot slot, int bucket, Step step) const {
  if (ResidencyTable(view_.control, *view_.plan).elsewhere(bucket, slot.value()).load(std::memory_order_acquire) >=
      step.value()) {
    return true;
  }
  for (int shard = 0; shard < view_.plan->num_shards(); ++shard) {
    if (!HasShard(slot, bucket, shard, step)) return false;
  }
  return true;
}

bool StepBuckets::HasPushed(Slot slot, int bucket, Step step) const {
  for (int shard = 0; shard < view_.plan->num_shards(); ++shard) {
    if (StepDeclarations(view_).IsPushedHere(slot, shard) && !HasShard(slot, bucket, shard, step)) return false;
  }
  return true;
}

// That a slot which is declared complete has declared every bucket.
absl::Status StepBuckets::CheckAllDeclared(Slot slot, Step step) const {
  for (int b = 0; b < view_.num_buckets(); ++b) {
    if (view_.plan->buckets()[b].frozen || Has(slot, b, step) || HasPushed(slot, b, step)) continue;
    return absl::FailedPreconditionError(absl::StrCat("slot ", slot.value(), " of step ", step.value(),
                                                      " lacks the gradients of bucket ", b, "; declare it first"));
  }
  return absl::OkStatus();
}

absl::Status StepBuckets::ShardReady(Slot slot, int bucket, int shard, Step step) const {
  ASSIGN_OR_RETURN(const std::optional<StepOutcome> outcome, StepDeclarations(view_).CheckStep(slot, step));
  if (outcome.has_value()) return absl::OkStatus();
  ResidencyTable(view_.control, *view_.plan)
      .gradient_shard(bucket, slot.value(), shard)
      .store(step.value(), std::memory_order_release);
  FutexBump(*view_.notifier);
  return absl::OkStatus();
}

absl::StatusOr<bool> StepBuckets::Declare(const BucketDeclaration& declaration) const {
  RETURN_IF_ERROR(Check(declaration.bucket, /*gradients=*/true));
  if (declaration.slots.empty()) return absl::InvalidArgumentError("a bucket of no slot; name at least one");
  bool all = true;
  for (Slot slot : declaration.slots) {
    ASSIGN_OR_RETURN(const std::optional<StepOutcome> outcome,
                     StepDeclarations(view_).CheckStep(slot, declaration.step));
    if (outcome.has_value()) return true;
    const bool has = Has(slot, declaration.bucket, declaration.step);
    if (!declaration.in_place && HasPushed(slot, declaration.bucket, declaration.step)) continue;
    if (!has && !declaration.in_place) {
      return absl::FailedPreconditionError(absl::StrCat("slot ", slot.value(), " of step ", declaration.step.value(),
                                                        " lacks gradient shards of bucket ", declaration.bucket,
                                                        "; push them first"));
    }
    all = all && has;
  }
  for (const auto& [slot, tensor] : declaration.non_finite) {
    RETURN_IF_ERROR(StepDeclarations(view_).CheckNonFinite(declaration.slots, declaration.step, slot, tensor));
  }
  if (all) return true;  // the first declaration counts, with what it said of gradients that are not finite
  for (const auto& [slot, tensor] : declaration.non_finite)
    StepDeclarations(view_).NoteNonFinite(slot, tensor, declaration.step);
  const ResidencyTable table(view_.control, *view_.plan);
  for (Slot slot : declaration.slots) {
    for (int shard = 0; shard < view_.plan->num_shards(); ++shard) {
      table.gradient_shard(declaration.bucket, slot.value(), shard)
          .store(declaration.step.value(), std::memory_order_release);
    }
  }
  FutexBump(*view_.notifier);
  Traced(view_.trace, declaration.slots, declaration.step, declaration.bucket);
  return false;
}

int StepBuckets::BucketsAhead(Slot slot, Step step) const {
  const ResidencyTable table(view_.control, *view_.plan);
  int ahead = 0;
  for (int b = 0; b < view_.num_buckets(); ++b) {
    if (view_.plan->buckets()[b].frozen || table.bucket(b).reduced.load(std::memory_order_acquire) >= step.value())
      continue;
    ahead += Has(slot, b, step);
  }
  return ahead;
}

// Whether nothing that this slot has declared can be summed before one of those who wait goes on.
bool StepBuckets::Stuck(Slot slot, Step step) const {
  const ResidencyTable table(view_.control, *view_.plan);
  for (int b = 0; b < view_.num_buckets(); ++b) {
    if (view_.plan->buckets()[b].frozen || table.bucket(b).reduced.load(std::memory_order_acquire) >= step.value())
      continue;
    if (!Has(slot, b, step)) continue;
    bool complete = true;
    for (int other = 0; other < view_.job->num_slots; ++other) {
      if (Has(Slot(other), b, step)) continue;
      complete = false;
      if (!table.Waits(other) && table.waiting_elsewhere(other).load() == 0) {
        return false;  // it may bring the bucket
      }
    }
    if (complete) return false;  // it is being summed
  }
  return true;
}

bool StepBuckets::MayGoOn(absl::Span<const Slot> slots, Step step) const {
  for (Slot slot : slots) {
    if (BucketsAhead(slot, step) > view_.job->prefetch_buckets && !Stuck(slot, step)) return false;
  }
  return true;
}

// Who waits may be what others wait for.
void StepBuckets::SetWaiting(absl::Span<const Slot> slots, bool waiting) const {
  if (!view_.plan->bucketed()) return;
  const ResidencyTable table(view_.control, *view_.plan);
  for (Slot slot : slots) table.waiting(slot.value(), view_.self.value()).fetch_add(waiting ? 1 : -1);
  if (waiting) FutexBump(view_.control->finished);
}

std::string StepBuckets::WaitFor(absl::Span<const Slot> slots, Step step) const {
  const ResidencyTable table(view_.control, *view_.plan);
  for (int b = 0; b < view_.num_buckets(); ++b) {
    if (view_.plan->buckets()[b].frozen || table.bucket(b).reduced.load() >= step.value()) continue;
    if (!std::any_of(slots.begin(), slots.end(), [&](Slot slot) { return Has(slot, b, step); })) continue;
    std::vector<int> missing;
    for (int s = 0; s < view_.job->num_slots; ++s) {
      if (!Has(Slot(s), b, step)) missing.push_back(s);
    }
    if (missing.empty()) continue;
    return absl::StrCat("bucket ", b, " lacks slots ", absl::StrJoin(missing, ","));
  }
  return "no slot is missing, the workers are at it";
}

absl::Status StepBuckets::AwaitSums(absl::Span<const Slot> slots, Step step, absl::Duration timeout) const {
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(timeout);
  while (true) {
    const uint32_t word = view_.control->finished.load(std::memory_order_acquire);
    if (view_.committed_step() >= step || MayGoOn(slots, step)) return absl::OkStatus();
    RETURN_IF_ERROR(StepMembers(view_).Health());
    const int64_t left = deadline - MonotonicNanos();
    if (left <= 0) {
      return absl::DeadlineExceededError(absl::StrCat("the slots are more than ", view_.job->prefetch_buckets,
                                                      " buckets ahead of step ", step.value(), "'s sums after ",
                                                      absl::FormatDuration(timeout), "; ", WaitFor(slots, step)));
    }
    FutexWait(view_.control->finished, word, absl::Nanoseconds(left));
  }
}

absl::Status StepBuckets::Acquire(int bucket) const {
  RETURN_IF_ERROR(CheckUsable(bucket));
  ResidencyTable(view_.control, *view_.plan).call_uses(bucket, view_.self.value()).fetch_add(1);
  if (!Holds(bucket)) FutexBump(*view_.notifier);
  return absl::OkStatus();
}

void StepBuckets::Release(int bucket) const {
  if (ResidencyTable(view_.control, *view_.plan).call_uses(bucket, view_.self.value()).fetch_sub(1) == 1)
    FutexBump(*view_.notifier);
}

bool StepBuckets::Holds(int bucket) const {
  return ResidencyTable(view_.control, *view_.plan).bucket(bucket).held.load() == kBucketHeld;
}

absl::Status StepBuckets::Await(int bucket, absl::Duration timeout) const {
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(timeout);
  while (true) {
    const uint32_t word = view_.control->finished.load(std::memory_order_acquire);
    if (Holds(bucket)) return absl::OkStatus();
    RETURN_IF_ERROR(StepMembers(view_).Health());
    const int64_t left = deadline - MonotonicNanos();
    if (left <= 0) {
      return absl::DeadlineExceededError(absl::StrCat("bucket ", bucket, " of job ", view_.job->name,
                                                      " was not gathered within ", absl::FormatDuration(timeout)));
    }
    FutexWait(view_.control->finished, word, absl::Nanoseconds(left));
  }
}

// True: nobody uses it, nobody will see its pages. One who acquires it meanwhile finds it held, or waits for
// kGatherBucket.
// The last incarnation of the lead may have been killed anywhere in here, or while it gave the pages back.
bool StepBuckets::DropIfUnused(int bucket) const {
  const ResidencyTable table(view_.control, *view_.plan);
  std::atomic<int32_t>& held = table.bucket(bucket).held;
  const int32_t now = held.load();
  if (now == kBucketLeaving) return true;
  if (now == kBucketAbsent || (now == kBucketHeld && table.IsUsed(bucket))) return false;
  held.store(kBucketAsked);
  if (!table.IsUsed(bucket)) {
    held.store(kBucketLeaving);
    return true;
  }
  held.store(kBucketHeld);
  FutexBump(view_.control->finished);
  return false;
}

bool StepBuckets::TakeBack(Slot slot) const {
  const int64_t open = view_.committed_step().value() + 1;
  bool summed = false;
  for (int b = 0; b < view_.num_buckets(); ++b) {
    const ResidencyTable table(view_.control, *view_.plan);
    if (view_.plan->buckets()[b].frozen) continue;
    if (open > 0 && table.bucket(b).reduced.load(std::memory_order_acquire) >= open) {
      summed = true;
      continue;
    }
    table.elsewhere(b, slot.value()).store(0, std::memory_order_release);
    for (int p = 0; p < view_.plan->num_shards(); ++p) {
      table.gradient_shard(b, slot.value(), p).store(0, std::memory_order_release);
    }
  }
  return summed;
}

// Bucket by bucket what OpenSlots says of a whole step. What is summed is summed: for that bucket the slot has brought
// its part of the step, whoever wrote it.
std::optional<Step> StepBuckets::Open(absl::Span<const Slot> slots, int64_t open) const {
  if (open < 1) return std::nullopt;
  const ResidencyTable table(view_.control, *view_.plan);
  bool pending = false, whole = true, summed = false;
  for (int b = 0; b < view_.num_buckets(); ++b) {
    if (view_.plan->buckets()[b].frozen) continue;
    if (table.bucket(b).reduced.load(std::memory_order_acquire) >= open) {
      summed = true;
      continue;
    }
    const auto has = [&](Slot slot) { return Has(slot, b, Step(open)); };
    if (std::all_of(slots.begin(), slots.end(), has)) {
      pending = true;
      continue;
    }
    whole = false;
    for (Slot slot : slots) {  // nobody but the caller can complete it
      for (int shard = 0; shard < view_.plan->num_shards(); ++shard) {
        table.gradient_shard(b, slot.value(), shard).store(open - 1, std::memory_order_release);
      }
    }
  }
  for (Slot slot : slots) {
    if (view_.control->slots[slot.value()].declared.load() != open) whole = false;
  }
  if (whole) return Step(open);
  for (Slot slot : slots) {
    int64_t expected = open;
    view_.control->slots[slot.value()].declared.compare_exchange_strong(expected, open - 1);
    if (!summed && !pending) view_.control->slots[slot.value()].nonfinite.store(0);
  }
  return pending ? std::make_optional(Step(open)) : std::nullopt;
}

absl::Status StepBuckets::CheckUsable(int bucket) const {
  RETURN_IF_ERROR(Check(bucket, /*gradients=*/false));
  if (view_.committed_step().value() != kNoStep) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("job ", view_.job->name, " has no initial weights yet"));
}

absl::Status StepBuckets::Use(int bucket, Slot slot, uint64_t word) const {
  RETURN_IF_ERROR(StepDeclarations(view_).CheckSlot(slot));
  RETURN_IF_ERROR(CheckUsable(bucket));
  ResidencyTable(view_.control, *view_.plan).session_uses(bucket, slot.value()).store(word);
  if (UsesIn(word) == 0 || !Holds(bucket)) FutexBump(*view_.notifier);
  return absl::OkStatus();
}

uint64_t StepBuckets::UsesOf(int bucket, Slot slot) const {
  return view_.plan->bucketed() ? ResidencyTable(view_.control, *view_.plan).session_uses(bucket, slot.value()).load()
                                : 0;
}

void StepBuckets::DropUses(absl::Span<const int> slots, uint64_t holder) const {
  for (const int slot : slots) {
    if (!StepDeclarations(view_).CheckSlot(Slot(slot)).ok() ||
        (view_.control->slots[slot].holder.load() & ~kLeaving) != holder)
      continue;
    for (int b = 0; b < view_.num_buckets(); ++b)
      ResidencyTable(view_.control, *view_.plan).session_uses(b, slot).store(0);
  }
  FutexBump(*view_.notifier);
}

// Calls ended with the process, and those that waited in them.
void StepBuckets::TakeOverUses() const {
  if (!view_.plan->bucketed()) return;
  const ResidencyTable table(view_.control, *view_.plan);
  for (int b = 0; b < view_.num_buckets(); ++b) table.call_uses(b, view_.self.value()).store(0);
  for (int s = 0; s < view_.job->num_slots; ++s) table.waiting(s, view_.self.value()).store(0);
}

void StepBuckets::Dropped(int bucket) const {
  ResidencyTable(view_.control, *view_.plan).bucket(bucket).held.store(kBucketAbsent);
}

}  // namespace shardmesh
