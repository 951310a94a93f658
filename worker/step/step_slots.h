// StepSlots: who may write a slot. A slot has one writer: an attached trainer that holds it, or pushes of connected
// ones, of each gradient shard one at a time. A part of StepProtocol; thread-safe.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "worker/step/step_view.h"

namespace shardmesh {

// Sessions attached to one member, by holder (without kLeaving): the slots that each holds.
struct SessionsHere {
  std::map<uint64_t, std::vector<int>> staying, leaving;  // leaving: the trainer is gone, its slots not free yet
};

// Whether declarations of connected trainers are under way for a slot.
bool IsBeingDeclared(const SlotWords& slot);

class StepSlots {
 public:
  explicit StepSlots(const StepView& view) : view_(view) {}

  // One push of a gradient shard at a time, whichever replica receives it: false when one is under way. Check the step
  // after this: while the claim is held, only its owner can bring that gradient shard, so the step that was open then
  // stays open.
  bool ClaimPush(Slot slot, int shard, Rank receiver) const;
  void ReleasePush(Slot slot, int shard) const;

  // FailedPrecondition names who has it. Aborted: a push or a declaration of it is under way. `holder` is
  // (rank + 1) << 32 | session. Of a job on several hosts the slot is asked for, and not taken yet.
  absl::Status Take(Slot slot, uint64_t holder) const;
  // Of a job on several hosts: waits until the leads have given all these slots, which are open then; Open is for jobs
  // on one host. FailedPrecondition, Aborted: another host's trainer has one, or just had. DeadlineExceeded.
  // Unavailable: aborted.
  absl::Status AwaitGiven(absl::Span<const Slot> slots, uint64_t holder, absl::Duration timeout) const;
  // No effect when somebody else has it, or there is no such slot. Leave: it is still held, by nobody's session; to be
  // given with holder | kLeaving.
  void Leave(Slot slot, uint64_t holder) const;
  void Give(Slot slot, uint64_t holder) const;
  // Waits until no trainer is attached to any of the slots, as far as is known here. That one has gone is seen a moment
  // later, here as on another host: one that has just ended its session is no reason to refuse anything yet.
  void AwaitFree(absl::Span<const Slot> slots, absl::Duration timeout) const;
  // How long that may take: until a closed connection is seen, a round of the leads, and some.
  static constexpr absl::Duration kHolderLag = absl::Milliseconds(300);
  // Makes the windows of slots that the caller has taken its own to write again. Their last writer may have declared
  // the open step and died: what it declared is taken back, unless every gradient shard of all these slots is there.
  // Then other slots may complete the step at any moment: the step that the caller has to await before it writes, and
  // calls this again. Gradient shards that were pushed and not declared are taken back, too. Who declares the step
  // again must say the same learning rates. With bucket residency each bucket is taken back or awaited for itself; one
  // that is summed stays declared.
  std::optional<Step> Open(absl::Span<const Slot> slots) const;
  uint64_t HolderOf(Slot slot) const;  // on whichever host
  SessionsHere Sessions() const;       // of this member

  // The leads give the slot to a trainer of this host or another one: gradient shards that connected trainers brought
  // for the open step do not count any more. REQUIRES: it is declared nowhere, and no push of it is under way.
  void TakeShardsBack(Slot slot) const;
  // Whoever asked for the slot here (the word `asked`) has it, or may not have it.
  void EndAsking(Slot slot, uint64_t asked, bool given) const;

 private:
  absl::Status HeldElsewhere(Slot slot) const;

  const StepView& view_;
};

}  // namespace shardmesh
