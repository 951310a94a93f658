// StepProtocol: the rules over a ControlBlock (control_block.h): declaring slots, deciding, committing, publishing,
// aborting. No threads and no memory of its own: every object over the same control block is a view of the same state.
//
// Thread-safe between threads and processes, with two exceptions: Decide and Commit are for the lead's engine thread.
// Calls that wait take a time limit and end early on abort.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/base/ids.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "worker/control/control_block.h"
#include "worker/control/group_table.h"
#include "worker/control/host_ranks.h"
#include "worker/step/facts.h"
#include "worker/step/pulled_slots.h"
#include "worker/step/seat_requests.h"
#include "worker/versions/publications.h"

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

struct Declaration {
  std::vector<Slot> slots;
  Step step;
  std::vector<double> learning_rates;  // one for all parameter groups, or one for each; empty: the job's
  // Gradients that are not finite: (slot, tensor).
  std::vector<std::pair<Slot, int>> non_finite;
  bool in_place = false;  // the slots' windows hold every shard's gradient: they are marked ready with the declaration
  double loss_scale = 1;  // what the gradients were multiplied by
  std::vector<int64_t> tokens;  // of a job with token weights: of each slot
};

// That a bucket's gradients of some slots are complete (jobs with bucket residency).
struct BucketDeclaration {
  std::vector<Slot> slots;
  Step step;
  int bucket = 0;
  // Gradients that are not finite: (slot, tensor).
  std::vector<std::pair<Slot, int>> non_finite;
  bool in_place = false;  // as Declaration's
};

// Sessions attached to one member, by holder (without kLeaving): the slots that each holds.
struct SessionsHere {
  std::map<uint64_t, std::vector<int>> staying, leaving;  // leaving: the trainer is gone, its slots not free yet
};

// A slot that a step waits for. Of pulled slots: one that a trainer has taken and not finished.
struct MissingSlot {
  int slot = 0;
  uint64_t holder = 0;      // its trainer's session on this host; 0: none
  int64_t pid = 0;          // of the trainer that has it, or had it last; 0: unknown
  uint64_t far_holder = 0;  // the session on another host; 0: none
  uint32_t times_left = 0;  // sessions of this host that had it and ended
};

inline constexpr uint32_t kMaxIncarnationsInCommand = 5;

// Whether declarations of connected trainers are under way for a slot.
bool IsBeingDeclared(const SlotWords& slot);

class StepProtocol {
 public:
  // `control`, `notifier`, `job` and `plan` must outlive the object. `notifier`: the word that the lead waits on, the
  // same one for all objects over a control block. `names` are the members' worker names by rank, for messages.
  // `local`: the ranks whose host's control block this is; by default all. `self`: the member that the object works
  // for.
  StepProtocol(ControlBlock* control, std::atomic<uint32_t>* notifier, const JobSpec* job, const Plan* plan,
               std::vector<std::string> names, std::optional<HostRanks> local = std::nullopt, Rank self = Rank(0));

  // ---- trainers ----
  // Marks one shard's gradient of a slot as lying in memory. Errors as Declare.
  absl::Status GradientShardReady(Slot slot, int shard, Step step);
  // Whether that gradient shard lies there already (a repeated push), or on another host, as far as is known here.
  bool HasGradientShard(Slot slot, int shard, Step step) const;
  // Whether a push of that gradient shard comes to this host.
  bool IsPushedHere(Slot slot, int shard) const;
  // Notes that a pushed gradient is not finite, before its gradient shard is marked ready.
  void NoteNonFinite(Slot slot, int tensor, Step step);
  // Declares slots complete; the step waits for their gradient shards too. nullopt: declared, wait for the commit. An
  // outcome: the step was committed before. Nothing is declared on an error.
  //   FailedPrecondition: a future step, or no initial weights. InvalidArgument: a slot that is not the job's, no slot,
  //   learning rates or a loss scale other than the step's first, neither one rate nor one for each group, or a loss
  //   scale out of range; a non-finite gradient of another slot, of no tensor or of a frozen one, or any under policy
  //   fail. FailedPrecondition, too: not in_place, and an attached trainer has the slot. ResourceExhausted: a step
  //   beyond kMaxStep. Unavailable: aborted. Unimplemented: slots are pulled, by attached trainers alone.
  absl::StatusOr<std::optional<StepOutcome>> Declare(const Declaration& declaration);
  // The same check, without declaring.
  absl::StatusOr<std::optional<StepOutcome>> CheckStep(Slot slot, Step step) const;

  // ---- buckets: of jobs with bucket residency (worker/control/residency.h) ----
  // Declares a bucket of slots: once all slots have, it is summed, and their pages are given back. True: it was
  // declared before by all of them, or the step is committed. Nothing is declared on an error.
  //   FailedPrecondition: a future step, a job with full residency, or a gradient shard is missing (and not in_place).
  //   InvalidArgument: no such bucket, or a frozen one; slots and gradients as Declare. Unavailable: aborted.
  absl::StatusOr<bool> DeclareBucket(const BucketDeclaration& declaration);
  // One shard's gradient of one bucket, as GradientShardReady and HasGradientShard. REQUIRES: such a slot, bucket and
  // shard.
  absl::Status BucketShardReady(Slot slot, int bucket, int shard, Step step);
  bool HasBucketShard(Slot slot, int bucket, int shard, Step step) const;
  // Whether all of `slots` may have another bucket: at most prefetch_buckets of theirs are declared and not summed, or
  // every slot that those wait for waits as well (SetWaiting), so that without one more nobody would go on.
  bool MayGoOn(absl::Span<const Slot> slots, Step step) const;
  void SetWaiting(absl::Span<const Slot> slots, bool waiting);
  // Waits for it. DeadlineExceeded: says which slots are missing in which bucket.
  absl::Status AwaitBuckets(absl::Span<const Slot> slots, Step step, absl::Duration timeout);
  std::string BucketsWaitFor(absl::Span<const Slot> slots, Step step) const;  // for messages

  // A use of a bucket of the parameter window: while there is one the bucket stays, and steps rewrite it.
  //   FailedPrecondition: no initial weights, or full residency. InvalidArgument: no such bucket.
  absl::Status AcquireBucket(int bucket);
  void ReleaseBucket(int bucket);      // REQUIRES: acquired before
  bool HoldsBucket(int bucket) const;  // whether the window holds it; stays so while it is acquired
  // Waits for it. REQUIRES: acquired. DeadlineExceeded; Unavailable: aborted.
  absl::Status AwaitBucket(int bucket, absl::Duration timeout);

  // ---- pulled slots (pulled_words.h), for the lead's engine thread: seats are trainers' ----
  // Slots whose trainers are gone or late are open again: how many.
  int ReopenSlots(int64_t now_nanos);
  // The slot of the open step that the seat writes now. nullopt: none yet. ResourceExhausted: it is beyond kMaxStep.
  absl::StatusOr<std::optional<PulledSlots::Grant>> TakeNext(int seat, int64_t now_nanos);
  // Whether its trainer waits for one: then a result of its own is summed for the window.
  void SetWaits(int seat, bool waits, int64_t now_nanos);
  // nullopt: of a job on several hosts the leads count it in their next round (ResultOf). Nothing is finished on an
  // error, and the trainer may finish the slot again.
  //   Aborted: it was taken back, and the step went on without this result. InvalidArgument: a slot that the trainer
  //   did not take, settings as Declare, tokens that are missing, negative or of a job without them, or a gradient that
  //   is not finite under policy fail. FailedPrecondition: a future step. Unavailable: aborted.
  absl::StatusOr<std::optional<PulledSlots::Result>> FinishSlot(int seat, const FinishedSlot& finished);
  // Of a job on several hosts: what became of the slot that the seat finished last; said once. nullopt: not known yet.
  std::optional<absl::StatusOr<PulledSlots::Result>> ResultOf(int seat);
  // Counts it, on every host the same. Errors as FinishSlot.
  absl::StatusOr<PulledSlots::Result> CountFinished(int seat, const FinishedSlot& finished);
  // What trainers of this host asked for. For the lead's thread.
  std::vector<SeatRequest>& seat_requests() { return seat_requests_; }

  // Waits until `step` is committed. DeadlineExceeded: it was not (nothing is lost: wait again; the message names the
  // slots that are missing). Unavailable: aborted.
  absl::StatusOr<StepOutcome> AwaitCommit(Step step, absl::Duration timeout);
  std::optional<StepOutcome> OutcomeOf(Step step) const;  // nullopt: not committed
  // OK while a declaration of these slots for the step stands. What Declare would have returned, had it known what
  // another host's slots had said: it was taken back.
  absl::Status CheckStands(absl::Span<const Slot> slots, Step step) const;
  // What a step that is not committed waits for, for messages: "missing slots: 1 (trainer pid 4242),3".
  std::string WaitsFor(Step step) const;
  std::vector<MissingSlot> MissingSlots(Step step) const;

  // One push of a gradient shard at a time, whichever replica receives it: false when one is under way. Check the step
  // after
  // this: while the claim is held, only its owner can bring that gradient shard, so the step that was open then stays
  // open.
  bool ClaimPush(Slot slot, int shard, Rank receiver);
  void ReleasePush(Slot slot, int shard);

  // A slot has one writer. FailedPrecondition names who has it. Aborted: a push or a declaration of it is under way.
  // `holder` is (rank + 1) << 32 | session. Of a job on several hosts the slot is asked for, and not taken yet.
  absl::Status TakeSlot(Slot slot, uint64_t holder);
  // Of a job on several hosts: waits until the leads have given all these slots, which are open then; OpenSlots is for
  // jobs on one host. FailedPrecondition, Aborted: another host's trainer has one, or just had. DeadlineExceeded.
  // Unavailable: aborted.
  absl::Status AwaitGiven(absl::Span<const Slot> slots, uint64_t holder, absl::Duration timeout) const;
  // No effect when somebody else has it, or there is no such slot. LeaveSlot: it is still held, by nobody's session; to
  // be given with holder | kLeaving.
  void LeaveSlot(Slot slot, uint64_t holder);
  void GiveSlot(Slot slot, uint64_t holder);
  // Waits until no trainer is attached to any of the slots, as far as is known here. That one has gone is seen a moment
  // later, here as on another host: one that has just ended its session is no reason to refuse anything yet.
  void AwaitFree(absl::Span<const Slot> slots, absl::Duration timeout) const;
  // How long that may take: until a closed connection is seen, a round of the leads, and some.
  static constexpr absl::Duration kHolderLag = absl::Milliseconds(300);
  // Makes the windows of slots that the caller has taken its own to write again. Their last writer may have declared
  // the open step and died: what it declared is taken back, unless every gradient shard of all these slots is there.
  // Then other slots may complete the step at any moment: the step that the caller has to await before it writes, and
  // calls this again. Gradient shards that were pushed and not declared are taken back, too. Who declares the step
  // again must say the same learning rates. With bucket residency each bucket is taken
  // back or awaited for itself; one that is summed stays declared.
  std::optional<Step> OpenSlots(absl::Span<const Slot> slots);
  uint64_t HolderOf(Slot slot) const;  // on whichever host

  // ---- initial weights ----
  void InitialShardReady(Rank rank, uint64_t push_id);
  // The member has loaded its shard of a checkpoint of that step; when all have the same, the job begins with it. Of a
  // job on one host.
  void LoadedReady(Rank rank, uint64_t load_id, Step step);

  // ---- the lead's engine ----
  // Of a job on one host: the next command, if everything that it waits for is there: it is written and decided.
  // REQUIRES: all are done with the one before.
  bool Decide();
  // The decision point: writes the command to the control block and decides it. `publication`: that it writes; -1:
  // none. False: it cannot be (the scalars of a group, which were checked when they were declared). REQUIRES as Decide.
  bool Issue(Command command, const Facts& facts, int publication);
  // Of a job on several hosts: a command that the leads agreed on finds no publication free, or its version is there
  // already: answers who asked for it on this host.
  void AnswerPublish(uint64_t ticket, int64_t step);
  // Whether the newest command leads to another one at once (facts.h).
  bool MoreFollows() const;
  // What another host's slots said of the open step comes first from now on; declarations on this host that differ are
  // taken back. `rates`: one for each group.
  void TakeSettings(Step step, absl::Span<const double> rates, double loss_scale);
  // The leads give the slot to a trainer of this host or another one: gradient shards that connected trainers brought
  // for the open step do not count any more. REQUIRES: it is declared nowhere, and no push of it is under way.
  void TakeShardsBack(Slot slot);
  // Whoever asked for the slot here (the word `asked`) has it, or may not have it.
  void EndAsking(Slot slot, uint64_t asked, bool given);
  // Takes buckets that nobody uses out of the window and calls `give_back` with each. For the lead between commands.
  template <typename GiveBack>
  void DropUnused(const GiveBack& give_back) {
    for (int b = 0; b < num_buckets(); ++b) {
      if (DropIfUnused(b)) give_back(b);
    }
  }
  // Whether every member of this host has executed the newest command.
  bool AllDone() const;
  std::vector<int> NotDone() const;
  // Publishes, records the outcome and commits the newest command; a step that quantized weights are to be gathered of
  // is committed with the command that gathers them. REQUIRES: AllDone().
  void Commit();

  // ---- every engine ----
  uint64_t decided() const { return control_->decided.load(std::memory_order_acquire); }
  uint64_t committed() const { return control_->committed.load(std::memory_order_acquire); }
  Step committed_step() const { return Step(control_->committed_step_plus_one.load(std::memory_order_acquire) - 1); }
  const Command& command() const { return control_->commands[decided() % 2]; }
  void Done(Rank rank, uint64_t seq);
  // Of a job on several hosts: waits until the slots' gradients of a bucket are on this host. False: aborted.
  bool AwaitGradients(Step step, int bucket) const;
  // The lead says that those of so many first buckets are; a member, that it is done with so many.
  void GradientsHere(Step step, int buckets);
  void BucketsDone(Rank rank, uint64_t seq, int buckets);
  // Whether every member of this host is done with so many first buckets of a command.
  bool AllBucketsDone(uint64_t seq, int buckets) const;

  // ---- digests ----
  uint64_t AskForDigest();
  // nullopt: not computed yet. DataLoss: replicas differ.
  absl::StatusOr<std::optional<std::pair<Step, uint64_t>>> DigestOf(uint64_t ticket) const;

  // ---- publications ----
  Publications& publications() { return publications_; }
  const Publications& publications() const { return publications_; }
  // Of a job on one host with full residency: asks that the newest committed version is published, which it may be.
  uint64_t AskToPublish();
  // Its step. nullopt: not yet. ResourceExhausted: every publication is held.
  absl::StatusOr<std::optional<Step>> PublishedFor(uint64_t ticket) const;

  // ---- a member's next incarnation ----
  // Takes back what the last incarnation of this member held for a while, and leaves what it said: pins, pushes,
  // declarations that were under way, words it was about to write. Aborts when this incarnation cannot go on: initial
  // weights were lost with the process, or kMaxIncarnationsInCommand incarnations have ended in the open command. REQUIRES:
  // the last incarnation is dead, and no other call of this object before.
  void TakeOver();
  SessionsHere Sessions() const;
  // It goes on. `away_since_nanos`: since when nobody was this member; 0: not known.
  void GoesOn(int64_t now_nanos, int64_t away_since_nanos);

  // ---- failure ----
  // `retained`: a node has all that the member's next incarnation needs.
  void SignOfLife(Rank rank, int64_t now_nanos, int64_t pid, bool retained = false);
  // Whether a member that is gone may be waited for, until CheckPeers says otherwise.
  bool ComesBack(int rank) const;
  // Aborts when a member that has come was silent for longer than `timeout`.
  void CheckPeers(Rank self, int64_t now_nanos, absl::Duration timeout);
  // The first cause stays.
  void Abort(AbortReason reason, int about, Rank reporter, int device = 0);
  // The leads of a job's hosts did not meet (kNotMet), or one of them said what cannot be (kBadFacts), and this is why.
  // For this host's lead, once.
  void AbortFor(AbortReason reason, int about, absl::string_view cause);
  // OK; Unavailable naming the member that is gone and what to do; DataLoss naming where silent corruption was found.
  absl::Status Health() const;
  // The member whose end is why the job was aborted: it died, left, or is not reached any more.
  std::optional<Rank> Lost() const;

  ControlBlock* control() const { return control_; }
  const JobSpec& job() const { return *job_; }
  std::atomic<uint32_t>& notifier() const { return *notifier_; }
  int num_ranks() const { return plan_->num_ranks(); }
  const HostRanks& local() const { return local_; }

 private:
  absl::Status CheckSlot(Slot slot) const;
  bool IsComplete(int slot, Step step) const;
  absl::Status CheckTokens(int64_t tokens, Slot slot) const;
  absl::Status CheckAllTokens(const Declaration& declaration) const;
  absl::Status CheckLossScale(Step step, double scale) const;
  absl::Status CheckLast(Step step) const;
  absl::Status CheckFinished(const FinishedSlot& finished) const;
  absl::Status TakenBack(const FinishedSlot& finished) const;
  bool IsStepped(Step step) const;
  absl::StatusOr<bool> MayFinish(int seat, const FinishedSlot& finished) const;
  PulledSlots Pulled() const { return PulledSlots(control_, *job_, *plan_, committed_step().value() + 1); }
  absl::Status CheckBucket(int bucket, bool gradients) const;
  absl::Status CheckBuckets(Slot slot, Step step) const;
  // Whether all gradient shards are there, on this host or, as far as is known here, on others; those that are pushed
  // here.
  bool HasBucket(Slot slot, int bucket, Step step) const;
  bool HasPushedBucket(Slot slot, int bucket, Step step) const;
  int BucketsAhead(Slot slot, Step step) const;
  bool Stuck(Slot slot, Step step) const;
  int num_buckets() const { return plan_->bucketed() ? static_cast<int>(plan_->buckets().size()) : 0; }
  void TakeOverMember(MemberWords& words);
  bool DropIfUnused(int bucket);
  std::optional<Step> OpenBuckets(absl::Span<const Slot> slots, int64_t open);
  // Of the open step: buckets of a slot that are not summed do not count any more. True: one is summed.
  bool TakeBucketsBack(Slot slot);
  absl::Status CheckNonFinite(absl::Span<const Slot> declared, Step step, Slot slot, int tensor) const;
  absl::StatusOr<std::optional<StepOutcome>> DeclareSlots(const Declaration& declaration);
  absl::StatusOr<std::vector<double>> LearningRatesOf(const std::vector<double>& given) const;
  absl::Status ClaimSettings(Slot slot, Step step, absl::Span<const double> rates, double loss_scale);
  absl::Status CompareWithElsewhere(const Declaration& declaration, absl::Span<const double> rates);
  absl::Status CompareSettings(Slot slot, int first, Step step, absl::Span<const double> rates,
                               double loss_scale) const;
  // Rates and loss scale that a claim (settings_claim) stands for.
  const GroupTable::Rate* ClaimedRates(uint64_t claim) const;
  const std::atomic<double>& ClaimedLossScale(uint64_t claim) const;
  absl::Status HeldElsewhere(Slot slot) const;
  void TakeBack(Slot slot, Step step, Refusal why);
  void SummarizeDigest();
  int RankOfMost(int shard) const;
  std::string CauseOf() const;
  std::string DamageOf(int rank) const;
  std::string DifferenceFrom(int rank) const;
  // Fills in what a step computes with. False: a learning rate that no step can have.
  bool WriteScalars(const Command& command, const Facts& facts);
  void RecordOutcome(const Command& command);
  void CommitStep(const Command& command);

  ControlBlock* const control_;
  const JobSpec* const job_;
  const Plan* const plan_;
  const std::vector<std::string> names_;
  std::atomic<uint32_t>* const notifier_;
  const HostRanks local_;
  const Rank self_;
  Publications publications_;
  const GroupTable groups_;
  std::vector<SeatRequest> seat_requests_;  // of a job with pulled slots on several hosts
};

}  // namespace shardmesh
