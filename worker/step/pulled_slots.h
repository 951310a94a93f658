// PulledSlots: the rules over PulledWords (pulled_words.h) for one open step: which slot is taken next, what is
// finished, what is merged. A view, without memory of its own. Changes are for the lead's engine thread; each can be
// repeated by that member's next incarnation, from wherever this one ended.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "worker/control/control_block.h"

namespace shardmesh {

// Slots [first, first + count) of the tree: a subtree.
struct SlotRange {
  int first = 0, count = 0;
};

// Everything that there is of a step's gradients: by the slot that it begins with, the partial sum or result there.
struct Frontier {
  int count[kMaxSlots] = {};   // slots that it has; 0: nothing begins here
  int source[kMaxSlots] = {};  // a partial sum >= 0, or a window: -1 - (seat * kWindowsOfSeat + window)

  // Whether all slots of a subtree are there.
  bool Covers(SlotRange range) const;
  // The same, and every one of them is a result in a window.
  bool AllResults(SlotRange range) const;
};

// Whether the trainer in a seat of this host is connected: a worker stands in for it (worker/doors/seat_session.h).
inline bool IsConnected(const ControlBlock& control, int seat) {
  const uint64_t holder = control.slots[seat].holder.load();
  const int rank = AttachedTo(holder);
  return rank >= 0 && rank < kMaxHostRanks && control.members[rank].pid.load() == control.slots[seat].holder_pid.load();
}

class PulledSlots {
 public:
  // `control`, `job` and `plan` outlive the object; `step` is the open one.
  PulledSlots(ControlBlock* control, const JobSpec& job, const Plan& plan, int64_t step)
      : control_(control), words_(control->pull), job_(job), plan_(plan), step_(step) {}

  struct Grant {
    int slot = 0, window = 0;
  };
  // The slot that the seat writes: the one that it has and nobody finished, or the next open one. nullopt: there is
  // none, no window is free, or too many gradients are alive.
  std::optional<Grant> Take(int seat, int64_t now_nanos);

  enum class Result { kAccepted, kSame, kDiffers };  // of a second result: the same gradients, or others
  // Whether the seat writes the slot, or its result of it counted.
  bool Has(int seat, int slot) const;
  // Whether the result that counts is the seat's, and has these gradients.
  bool Counted(int seat, int slot, uint64_t digest) const;
  bool IsFinished(int slot) const { return StateOf(slot) >= SlotState::kFinished; }
  // The result of a slot. REQUIRES: Has(seat, slot).
  Result Finish(int seat, int slot, uint64_t digest, int64_t tokens);

  // In the lead's next incarnation: its last one may have ended in Take, when a trainer had a slot that did not count
  // as taken.
  void EndTakes(int64_t now_nanos);
  // Of a job on one host: slots that are not finished in time are open again; so are those of trainers that are gone.
  // How many.
  int Reopen(int64_t now_nanos);
  // The same where others say it: by seat its holder now (control_block.h), and whether its slot is late.
  struct SeatNow {
    uint64_t holder = 0;
    bool late = false;
  };
  int Reopen(absl::Span<const SeatNow> seats);
  // Whether the seat has a slot that it should have finished before.
  bool IsLate(int seat, int64_t now_nanos) const;
  // The window in which the seat writes the slot. nullopt: none.
  std::optional<int> WrittenWindow(int seat, int slot) const;
  // The slot that Take gave the seat and nobody has finished. nullopt: none.
  std::optional<Grant> Given(int seat) const;

  // What is to be summed next: the largest subtree that is there in several gradient shards; else the result of a
  // trainer that waits for a window. nullopt: nothing. FreePartial: where to.
  std::optional<SlotRange> NextMerge() const;
  int FreePartial() const;
  void Merged(SlotRange range, int partial);

  // The partial sum that has all slots; -1: there is none yet.
  int Root() const;
  Frontier Sums() const;
  int Live() const;  // gradients: being written, finished, or summed

  // (slot, seat) of those that a trainer writes.
  std::vector<std::pair<int, int>> Taken() const;
  // For messages: "2 open, 5 taken (trainer pid 17)".
  std::string WaitsFor() const;

 private:
  SlotState StateOf(int slot) const { return SlotState(BitsOf(words_.slots[slot].state.load(), step_)); }
  void SetState(int slot, SlotState state) { words_.slots[slot].state.store(OfStep(step_, int(state))); }
  WindowState WindowOf(int seat, int window, int* slot = nullptr) const;
  void SetWindow(int seat, int window, WindowState state, int slot);
  int WindowWith(int seat, WindowState state, int slot = -1) const;  // -1: none
  std::optional<SlotRange> Largest(const Frontier& sums, SlotRange range) const;
  bool Owns(int seat, int slot) const;
  void Leave(int seat, int window, int slot);
  void Abandon(int seat);
  void NotePeak();

  ControlBlock* const control_;
  PulledWords& words_;
  const JobSpec& job_;
  const Plan& plan_;
  const int64_t step_;
};

}  // namespace shardmesh
