// StepProtocol: the rules over a ControlPage (control_page.h): declaring slots, deciding, committing, publishing,
// aborting. No threads and no memory of its own: every object over the same page is a view of the same state.
//
// Thread-safe between threads and processes, with two exceptions: Decide and Commit are for the lead's engine thread.
// Calls that wait take a time limit and end early on abort.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/ids.h"
#include "core/job.h"
#include "core/layout.h"
#include "worker/control_page.h"

namespace shardmesh {

// What became of a step.
struct StepOutcome {
  Step step;
  bool already_applied = false;
  bool skipped = false;
  Slot bad_slot;       // with skipped
  int bad_tensor = 0;  // with skipped
  double norm = 0;     // of all gradients before clipping, where the job clips them
};

struct Declaration {
  std::vector<Slot> slots;
  Step step;
  std::vector<double> learning_rates;  // one for all parameter groups, or one for each; empty: the job's
  // Gradients that are not finite: (slot, tensor).
  std::vector<std::pair<Slot, int>> non_finite;
  bool in_place = false;  // the slots' windows hold every shard's piece: they are marked ready with the declaration
};

class StepProtocol {
 public:
  // `page` and `job` must outlive the object. `names` are the members' worker names by rank, for messages.
  StepProtocol(ControlPage* page, const JobSpec* job, const Plan* plan, std::vector<std::string> names);

  // ---- trainers ----
  // Marks one shard's piece of a slot as lying in memory. Errors as Declare.
  absl::Status PieceReady(Slot slot, int shard, Step step);
  // Whether that piece lies there already (a repeated push).
  bool HasPiece(Slot slot, int shard, Step step) const;
  // Notes that a pushed gradient is not finite, before its piece is marked ready.
  void NoteNonFinite(Slot slot, int tensor, Step step);
  // Declares slots complete; the step waits for their pieces too. nullopt: declared, wait for the commit. An outcome:
  // the step was committed before. Nothing is declared on an error.
  //   FailedPrecondition: a future step, or no initial weights. InvalidArgument: a slot that is not the job's, no slot,
  //   learning rates other than the step's first, or neither one nor one for each group; a non-finite gradient of
  //   another slot, of no tensor or of a frozen one, or any under policy fail. Unavailable: aborted.
  absl::StatusOr<std::optional<StepOutcome>> Declare(const Declaration& declaration);
  // The same check, without declaring.
  absl::StatusOr<std::optional<StepOutcome>> CheckStep(Slot slot, Step step) const;
  // Waits until `step` is committed. DeadlineExceeded: it was not (nothing is lost: wait again; the message names the
  // slots that are missing). Unavailable: aborted.
  absl::StatusOr<StepOutcome> AwaitCommit(Step step, absl::Duration timeout);
  std::optional<StepOutcome> OutcomeOf(Step step) const;  // nullopt: not committed
  // What a step that is not committed waits for, for messages: "missing slots: 1 (trainer pid 4242),3".
  std::string WaitsFor(Step step) const;

  // One push of a piece at a time, whichever replica receives it: false when one is under way. Check the step after
  // this: while the claim is held, only its owner can bring that piece, so the step that was open then stays open.
  bool ClaimPush(Slot slot, int shard, Rank receiver);
  void ReleasePush(Slot slot, int shard);

  // A slot has one writer. FailedPrecondition names who has it. Aborted: a push to it is under way.
  // `holder` is (rank + 1) << 32 | session.
  absl::Status TakeSlot(Slot slot, uint64_t holder);
  void GiveSlot(Slot slot, uint64_t holder);  // no effect when somebody else has it, or there is no such slot
  // Makes the windows of slots that the caller has taken its own to write again. Their last writer may have declared
  // the open step and died: what it declared is taken back, unless every piece of all these slots is there. Then other
  // slots may complete the step at any moment: the step that the caller has to await before it writes, and calls this
  // again. Who declares the step again must say the same learning rates.
  std::optional<Step> OpenSlots(absl::Span<const Slot> slots);
  uint64_t HolderOf(Slot slot) const;

  // ---- initial weights ----
  void InitialPieceReady(Rank rank, uint64_t push_id);

  // ---- the lead's engine ----
  // The next command, if everything that it waits for is there: it is written and decided. REQUIRES: all are done with
  // the one before.
  bool Decide();
  // Whether every member has executed the newest command.
  bool AllDone() const;
  std::vector<int> NotDone() const;
  // Publishes, records the outcome and commits the newest command; a step that coded weights are to be gathered of is
  // committed with the command that gathers them. REQUIRES: AllDone().
  void Commit();

  // ---- every engine ----
  uint64_t decided() const { return page_->decided.load(std::memory_order_acquire); }
  uint64_t committed() const { return page_->committed.load(std::memory_order_acquire); }
  Step committed_step() const { return Step(page_->committed_step_plus_one.load(std::memory_order_acquire) - 1); }
  const Command& command() const { return page_->command; }
  void Done(Rank rank, uint64_t seq);

  // ---- digests ----
  uint64_t AskForDigest();
  // nullopt: not computed yet. DataLoss: replicas differ.
  absl::StatusOr<std::optional<std::pair<Step, uint64_t>>> DigestOf(uint64_t ticket) const;

  // ---- publications ----
  std::vector<Step> Published() const;  // ascending
  // Pins the buffer that holds `step`; its bytes stay until Unpin. nullopt: no buffer holds it.
  std::optional<int> Pin(Step step);
  void Unpin(int buffer);

  // ---- failure ----
  void SignOfLife(Rank rank, int64_t now_nanos, int64_t pid);
  // Aborts when a member that has come was silent for longer than `timeout`.
  void CheckPeers(Rank self, int64_t now_nanos, absl::Duration timeout);
  // The first cause stays.
  void Abort(AbortReason reason, int about, Rank reporter);
  // OK, or Unavailable naming the member that is gone and what to do.
  absl::Status Health() const;

  ControlPage* page() const { return page_; }
  int num_ranks() const { return plan_->num_ranks(); }

 private:
  absl::Status CheckSlot(Slot slot) const;
  absl::Status CheckNonFinite(const Declaration& declaration, Slot slot, int tensor) const;
  absl::StatusOr<std::vector<double>> LearningRatesOf(const Declaration& declaration) const;
  absl::Status ClaimLearningRates(Slot slot, Step step, absl::Span<const double> rates);
  bool SlotsComplete(int64_t step) const;
  uint64_t CompleteInitialId() const;
  int ChoosePublication(int64_t step);
  void Issue(const Command& command);
  void SummarizeDigest();
  bool DecideStep(Command& command);
  bool GatherFollows() const;
  void CommitStep(const Command& command);

  ControlPage* const page_;
  const JobSpec* const job_;
  const Plan* const plan_;
  const std::vector<std::string> names_;
};

}  // namespace shardmesh
