// Of StepProtocol: the buckets of jobs with bucket residency: which are declared, summed, used and held.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"
#include "local/futex.h"
#include "worker/control/residency.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

absl::Status StepProtocol::CheckBucket(int bucket, bool gradients) const {
  if (!plan_->bucketed()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job ", job_->name, " has full residency: nothing is said of single buckets; create it with residency bucket"));
  }
  if (bucket < 0 || bucket >= num_buckets()) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", bucket, " is none of job ", job_->name, "'s: 0 to ", num_buckets() - 1));
  }
  if (gradients && plan_->buckets()[bucket].frozen) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", bucket, " of job ", job_->name, " is of frozen parameters, which have no gradients"));
  }
  return absl::OkStatus();
}

bool StepProtocol::HasBucketShard(Slot slot, int bucket, int shard, Step step) const {
  const ResidencyTable table(control_, *plan_);
  return table.gradient_shard(bucket, slot.value(), shard).load(std::memory_order_acquire) >= step.value() ||
         table.bucket(bucket).reduced.load(std::memory_order_acquire) >= step.value();
}

bool StepProtocol::HasBucket(Slot slot, int bucket, Step step) const {
  if (ResidencyTable(control_, *plan_).elsewhere(bucket, slot.value()).load(std::memory_order_acquire) >=
      step.value()) {
    return true;
  }
  for (int shard = 0; shard < plan_->num_shards(); ++shard) {
    if (!HasBucketShard(slot, bucket, shard, step)) return false;
  }
  return true;
}

bool StepProtocol::HasPushedBucket(Slot slot, int bucket, Step step) const {
  for (int shard = 0; shard < plan_->num_shards(); ++shard) {
    if (IsPushedHere(slot, shard) && !HasBucketShard(slot, bucket, shard, step)) return false;
  }
  return true;
}

// That a slot which is declared complete has declared every bucket.
absl::Status StepProtocol::CheckBuckets(Slot slot, Step step) const {
  for (int b = 0; b < num_buckets(); ++b) {
    if (plan_->buckets()[b].frozen || HasBucket(slot, b, step) || HasPushedBucket(slot, b, step)) continue;
    return absl::FailedPreconditionError(absl::StrCat("slot ", slot.value(), " of step ", step.value(),
                                                      " lacks the gradients of bucket ", b, "; declare it first"));
  }
  return absl::OkStatus();
}

absl::Status StepProtocol::BucketShardReady(Slot slot, int bucket, int shard, Step step) {
  ASSIGN_OR_RETURN(const std::optional<StepOutcome> outcome, CheckStep(slot, step));
  if (outcome.has_value()) return absl::OkStatus();
  ResidencyTable(control_, *plan_)
      .gradient_shard(bucket, slot.value(), shard)
      .store(step.value(), std::memory_order_release);
  FutexBump(*notifier_);
  return absl::OkStatus();
}

absl::StatusOr<bool> StepProtocol::DeclareBucket(const BucketDeclaration& declaration) {
  RETURN_IF_ERROR(CheckBucket(declaration.bucket, /*gradients=*/true));
  if (declaration.slots.empty()) return absl::InvalidArgumentError("a bucket of no slot; name at least one");
  bool all = true;
  for (Slot slot : declaration.slots) {
    ASSIGN_OR_RETURN(const std::optional<StepOutcome> outcome, CheckStep(slot, declaration.step));
    if (outcome.has_value()) return true;
    const bool has = HasBucket(slot, declaration.bucket, declaration.step);
    if (!declaration.in_place && HasPushedBucket(slot, declaration.bucket, declaration.step)) continue;
    if (!has && !declaration.in_place) {
      return absl::FailedPreconditionError(absl::StrCat("slot ", slot.value(), " of step ", declaration.step.value(),
                                                        " lacks gradient shards of bucket ", declaration.bucket,
                                                        "; push them first"));
    }
    all = all && has;
  }
  for (const auto& [slot, tensor] : declaration.non_finite) {
    RETURN_IF_ERROR(CheckNonFinite(declaration.slots, declaration.step, slot, tensor));
  }
  if (all) return true;  // the first declaration counts, with what it said of gradients that are not finite
  for (const auto& [slot, tensor] : declaration.non_finite) NoteNonFinite(slot, tensor, declaration.step);
  const ResidencyTable table(control_, *plan_);
  for (Slot slot : declaration.slots) {
    for (int shard = 0; shard < plan_->num_shards(); ++shard) {
      table.gradient_shard(declaration.bucket, slot.value(), shard)
          .store(declaration.step.value(), std::memory_order_release);
    }
  }
  FutexBump(*notifier_);
  return false;
}

int StepProtocol::BucketsAhead(Slot slot, Step step) const {
  const ResidencyTable table(control_, *plan_);
  int ahead = 0;
  for (int b = 0; b < num_buckets(); ++b) {
    if (plan_->buckets()[b].frozen || table.bucket(b).reduced.load(std::memory_order_acquire) >= step.value()) continue;
    ahead += HasBucket(slot, b, step);
  }
  return ahead;
}

// Whether nothing that this slot has declared can be summed before one of those who wait goes on.
bool StepProtocol::Stuck(Slot slot, Step step) const {
  const ResidencyTable table(control_, *plan_);
  for (int b = 0; b < num_buckets(); ++b) {
    if (plan_->buckets()[b].frozen || table.bucket(b).reduced.load(std::memory_order_acquire) >= step.value()) continue;
    if (!HasBucket(slot, b, step)) continue;
    bool complete = true;
    for (int other = 0; other < job_->num_slots; ++other) {
      if (HasBucket(Slot(other), b, step)) continue;
      complete = false;
      if (table.waiting(other).load() == 0 && table.waiting_elsewhere(other).load() == 0) {
        return false;  // it may bring the bucket
      }
    }
    if (complete) return false;  // it is being summed
  }
  return true;
}

bool StepProtocol::MayGoOn(absl::Span<const Slot> slots, Step step) const {
  for (Slot slot : slots) {
    if (BucketsAhead(slot, step) > job_->prefetch_buckets && !Stuck(slot, step)) return false;
  }
  return true;
}

// Who waits may be what others wait for.
void StepProtocol::SetWaiting(absl::Span<const Slot> slots, bool waiting) {
  if (!plan_->bucketed()) return;
  const ResidencyTable table(control_, *plan_);
  for (Slot slot : slots) table.waiting(slot.value()).fetch_add(waiting ? 1 : -1);
  if (waiting) FutexBump(control_->finished);
}

std::string StepProtocol::BucketsWaitFor(absl::Span<const Slot> slots, Step step) const {
  const ResidencyTable table(control_, *plan_);
  for (int b = 0; b < num_buckets(); ++b) {
    if (plan_->buckets()[b].frozen || table.bucket(b).reduced.load() >= step.value()) continue;
    if (!std::any_of(slots.begin(), slots.end(), [&](Slot slot) { return HasBucket(slot, b, step); })) continue;
    std::vector<int> missing;
    for (int s = 0; s < job_->num_slots; ++s) {
      if (!HasBucket(Slot(s), b, step)) missing.push_back(s);
    }
    if (missing.empty()) continue;
    return absl::StrCat("bucket ", b, " lacks slots ", absl::StrJoin(missing, ","));
  }
  return "no slot is missing, the workers are at it";
}

absl::Status StepProtocol::AwaitBuckets(absl::Span<const Slot> slots, Step step, absl::Duration timeout) {
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(timeout);
  while (true) {
    const uint32_t word = control_->finished.load(std::memory_order_acquire);
    if (committed_step() >= step || MayGoOn(slots, step)) return absl::OkStatus();
    RETURN_IF_ERROR(Health());
    const int64_t left = deadline - MonotonicNanos();
    if (left <= 0) {
      return absl::DeadlineExceededError(
          absl::StrCat("the slots are more than ", job_->prefetch_buckets, " buckets ahead of step ", step.value(),
                       "'s sums after ", absl::FormatDuration(timeout), "; ", BucketsWaitFor(slots, step)));
    }
    FutexWait(control_->finished, word, absl::Nanoseconds(left));
  }
}

absl::Status StepProtocol::AcquireBucket(int bucket) {
  RETURN_IF_ERROR(CheckBucket(bucket, /*gradients=*/false));
  if (committed_step().value() == kNoStep) {
    return absl::FailedPreconditionError(absl::StrCat("job ", job_->name, " has no initial weights yet"));
  }
  ResidencyTable(control_, *plan_).bucket(bucket).uses.fetch_add(1);
  if (!HoldsBucket(bucket)) FutexBump(*notifier_);
  return absl::OkStatus();
}

void StepProtocol::ReleaseBucket(int bucket) {
  if (ResidencyTable(control_, *plan_).bucket(bucket).uses.fetch_sub(1) == 1) FutexBump(*notifier_);
}

bool StepProtocol::HoldsBucket(int bucket) const {
  return ResidencyTable(control_, *plan_).bucket(bucket).held.load() != 0;
}

absl::Status StepProtocol::AwaitBucket(int bucket, absl::Duration timeout) {
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(timeout);
  while (true) {
    const uint32_t word = control_->finished.load(std::memory_order_acquire);
    if (HoldsBucket(bucket)) return absl::OkStatus();
    RETURN_IF_ERROR(Health());
    const int64_t left = deadline - MonotonicNanos();
    if (left <= 0) {
      return absl::DeadlineExceededError(absl::StrCat("bucket ", bucket, " of job ", job_->name,
                                                      " was not gathered within ", absl::FormatDuration(timeout)));
    }
    FutexWait(control_->finished, word, absl::Nanoseconds(left));
  }
}

// True: nobody uses it, nobody will see its pages. One who acquires it meanwhile finds it held, or waits for a fill.
bool StepProtocol::DropIfUnused(int bucket) {
  BucketWords& words = ResidencyTable(control_, *plan_).bucket(bucket);
  if (words.held.load() == 0 || words.uses.load() != 0) return false;
  words.held.store(0);
  if (words.uses.load() == 0) return true;
  words.held.store(1);
  FutexBump(control_->finished);
  return false;
}

bool StepProtocol::TakeBucketsBack(Slot slot) {
  const int64_t open = committed_step().value() + 1;
  bool summed = false;
  for (int b = 0; b < num_buckets(); ++b) {
    const ResidencyTable table(control_, *plan_);
    if (plan_->buckets()[b].frozen) continue;
    if (open > 0 && table.bucket(b).reduced.load(std::memory_order_acquire) >= open) {
      summed = true;
      continue;
    }
    table.elsewhere(b, slot.value()).store(0, std::memory_order_release);
    for (int p = 0; p < plan_->num_shards(); ++p) {
      table.gradient_shard(b, slot.value(), p).store(0, std::memory_order_release);
    }
  }
  return summed;
}

// Bucket by bucket what OpenSlots says of a whole step. What is summed is summed: for that bucket the slot has brought
// its part of the step, whoever wrote it.
std::optional<Step> StepProtocol::OpenBuckets(absl::Span<const Slot> slots, int64_t open) {
  if (open < 1) return std::nullopt;
  const ResidencyTable table(control_, *plan_);
  bool pending = false, whole = true, summed = false;
  for (int b = 0; b < num_buckets(); ++b) {
    if (plan_->buckets()[b].frozen) continue;
    if (table.bucket(b).reduced.load(std::memory_order_acquire) >= open) {
      summed = true;
      continue;
    }
    const auto has = [&](Slot slot) { return HasBucket(slot, b, Step(open)); };
    if (std::all_of(slots.begin(), slots.end(), has)) {
      pending = true;
      continue;
    }
    whole = false;
    for (Slot slot : slots) {  // nobody but the caller can complete it
      for (int shard = 0; shard < plan_->num_shards(); ++shard) {
        table.gradient_shard(b, slot.value(), shard).store(open - 1, std::memory_order_release);
      }
    }
  }
  for (Slot slot : slots) {
    if (control_->slots[slot.value()].declared.load() != open) whole = false;
  }
  if (whole) return Step(open);
  for (Slot slot : slots) {
    int64_t expected = open;
    control_->slots[slot.value()].declared.compare_exchange_strong(expected, open - 1);
    if (!summed && !pending) control_->slots[slot.value()].nonfinite.store(0);
  }
  return pending ? std::make_optional(Step(open)) : std::nullopt;
}

}  // namespace shardmesh
