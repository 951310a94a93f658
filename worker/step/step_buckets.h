// StepBuckets: the buckets of jobs with bucket residency (worker/control/residency.h): which are declared, summed, used
// and held. A part of StepProtocol; thread-safe.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "worker/step/step_view.h"

namespace shardmesh {

// That a bucket's gradients of some slots are complete.
struct BucketDeclaration {
  std::vector<Slot> slots;
  Step step;
  int bucket = 0;
  // Gradients that are not finite: (slot, tensor).
  std::vector<std::pair<Slot, int>> non_finite;
  bool in_place = false;  // as Declaration's
};

class StepBuckets {
 public:
  explicit StepBuckets(const StepView& view) : view_(view) {}

  // Declares a bucket of slots: once all slots have, it is summed, and their pages are given back. True: it was
  // declared before by all of them, or the step is committed. Nothing is declared on an error.
  //   FailedPrecondition: a future step, a job with full residency, or a gradient shard is missing (and not in_place).
  //   InvalidArgument: no such bucket, or a frozen one; slots and gradients as StepDeclarations::Declare. Unavailable:
  //   aborted.
  absl::StatusOr<bool> Declare(const BucketDeclaration& declaration) const;
  // One shard's gradient of one bucket, as GradientShardReady and HasGradientShard of declarations. REQUIRES: such a
  // slot, bucket and shard.
  absl::Status ShardReady(Slot slot, int bucket, int shard, Step step) const;
  bool HasShard(Slot slot, int bucket, int shard, Step step) const;
  // FailedPrecondition: a slot that is declared complete has not declared every bucket. OK with full residency.
  absl::Status CheckAllDeclared(Slot slot, Step step) const;
  // Whether all of `slots` may have another bucket: at most prefetch_buckets of theirs are declared and not summed, or
  // every slot that those wait for waits as well (SetWaiting), so that without one more nobody would go on.
  bool MayGoOn(absl::Span<const Slot> slots, Step step) const;
  void SetWaiting(absl::Span<const Slot> slots, bool waiting) const;
  // Waits for it. DeadlineExceeded: says which slots are missing in which bucket.
  absl::Status AwaitSums(absl::Span<const Slot> slots, Step step, absl::Duration timeout) const;
  std::string WaitFor(absl::Span<const Slot> slots, Step step) const;  // for messages

  // A use of a bucket of the parameter window, by a call that this member answers: while there is one the bucket stays,
  // and steps rewrite it. It ends with the member's incarnation.
  //   FailedPrecondition: no initial weights, or full residency. InvalidArgument: no such bucket.
  absl::Status Acquire(int bucket) const;
  void Release(int bucket) const;  // REQUIRES: acquired before
  bool Holds(int bucket) const;    // whether the window holds it; stays so while it is acquired
  // Waits for it. REQUIRES: acquired. DeadlineExceeded; Unavailable: aborted.
  absl::Status Await(int bucket, absl::Duration timeout) const;
  // Uses by an attached session, said under its first slot: a UseWord, that of its newest request. They stay until
  // DropUses, also over incarnations of this member. For the thread that answers the session. UsesOf: 0 with full
  // residency. Errors as Acquire.
  absl::Status Use(int bucket, Slot slot, uint64_t word) const;
  uint64_t UsesOf(int bucket, Slot slot) const;
  // The session is gone: of the slots that `holder` has still, and before they are given back.
  void DropUses(absl::Span<const int> slots, uint64_t holder) const;
  // In this member's next incarnation: uses by calls, and waits, ended with the last one (StepMembers::TakeOver).
  void TakeOverUses() const;
  // Takes buckets that nobody uses out of the window and calls `give_back` with each. For the lead between commands.
  template <typename GiveBack>
  void DropUnused(const GiveBack& give_back) const {
    for (int b = 0; b < view_.num_buckets(); ++b) {
      if (!DropIfUnused(b)) continue;
      give_back(b);
      Dropped(b);
    }
  }

  // Of the open step: buckets of a slot that are not summed do not count any more. True: one is summed.
  bool TakeBack(Slot slot) const;
  // Bucket by bucket what StepSlots::Open says of a whole step, `open`.
  std::optional<Step> Open(absl::Span<const Slot> slots, int64_t open) const;

 private:
  absl::Status Check(int bucket, bool gradients) const;
  // Whether all gradient shards are there, on this host or, as far as is known here, on others; those that are pushed
  // here.
  bool Has(Slot slot, int bucket, Step step) const;
  bool HasPushed(Slot slot, int bucket, Step step) const;
  int BucketsAhead(Slot slot, Step step) const;
  bool Stuck(Slot slot, Step step) const;
  absl::Status CheckUsable(int bucket) const;  // that it may be acquired
  bool DropIfUnused(int bucket) const;
  void Dropped(int bucket) const;

  const StepView& view_;
};

}  // namespace shardmesh
