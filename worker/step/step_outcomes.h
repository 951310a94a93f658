// StepOutcomes: what became of a step, and what one waits for. A part of StepProtocol; thread-safe.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/step/step_view.h"

namespace shardmesh {

// What became of a step.
struct StepOutcome {
  Step step;
  bool already_applied = false;
  bool skipped = false;
  bool no_tokens = false;  // with skipped: no slot had one; else a gradient was not finite:
  Slot bad_slot;           // with skipped
  int bad_tensor = 0;      // with skipped
  int peak = 0;            // with pulled slots: most gradients alive at a time
  double norm = 0;         // of all gradients before clipping, where the job clips them
};

// A slot that a step waits for. Of pulled slots: one that a trainer has taken and not finished.
struct MissingSlot {
  int slot = 0;
  uint64_t holder = 0;      // its trainer's session on this host; 0: none
  int64_t pid = 0;          // of the trainer that has it, or had it last; 0: unknown
  uint64_t far_holder = 0;  // the session on another host; 0: none
  uint32_t times_left = 0;  // sessions of this host that had it and ended
};

class StepOutcomes {
 public:
  explicit StepOutcomes(const StepView& view) : view_(view) {}

  std::optional<StepOutcome> OutcomeOf(Step step) const;  // nullopt: not committed
  // Waits until `step` is committed. DeadlineExceeded: it was not (nothing is lost: wait again; the message names the
  // slots that are missing). Unavailable: aborted.
  absl::StatusOr<StepOutcome> AwaitCommit(Step step, absl::Duration timeout) const;
  // What a step that is not committed waits for, for messages: "missing slots: 1 (trainer pid 4242),3".
  std::string WaitsFor(Step step) const;
  std::vector<MissingSlot> MissingSlots(Step step) const;
  // Writes the outcome of the step that the command makes. For the lead, as part of its commit.
  void Record(const Command& command) const;

 private:
  bool IsComplete(int slot, Step step) const;

  const StepView& view_;
};

}  // namespace shardmesh
