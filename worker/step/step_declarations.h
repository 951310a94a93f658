// StepDeclarations: what trainers say of a step, and whether it may be said: slots, gradient shards, learning rates,
// tokens, gradients that are not finite. A part of StepProtocol; thread-safe.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/shardmesh/v1/shard.pb.h"
#include "worker/step/step_outcomes.h"
#include "worker/step/step_view.h"

namespace shardmesh {

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
// What a trainer's request says. Nothing of it is checked yet.
Declaration DeclarationOf(const v1::StepRequest& request, bool in_place);

class StepDeclarations {
 public:
  explicit StepDeclarations(const StepView& view) : view_(view) {}

  // Marks one shard's gradient of a slot as lying in memory. Errors as Declare.
  absl::Status GradientShardReady(Slot slot, int shard, Step step) const;
  // Whether that gradient shard lies there already (a repeated push), or on another host, as far as is known here.
  bool HasGradientShard(Slot slot, int shard, Step step) const;
  // Whether a push of that gradient shard comes to this host.
  bool IsPushedHere(Slot slot, int shard) const;
  // Notes that a pushed gradient is not finite, before its gradient shard is marked ready.
  void NoteNonFinite(Slot slot, int tensor, Step step) const;

  // Declares slots complete; the step waits for their gradient shards too. nullopt: declared, wait for the commit. An
  // outcome: the step was committed before. Nothing is declared on an error.
  //   FailedPrecondition: a future step, or no initial weights. InvalidArgument: a slot that is not the job's, no slot,
  //   learning rates or a loss scale other than the step's first, neither one rate nor one for each group, or a loss
  //   scale out of range; a non-finite gradient of another slot, of no tensor or of a frozen one, or any under policy
  //   fail. FailedPrecondition, too: not in_place, and an attached trainer has the slot. ResourceExhausted: a step
  //   beyond kMaxStep. Unavailable: aborted. FailedPrecondition, too: slots are pulled.
  absl::StatusOr<std::optional<StepOutcome>> Declare(const Declaration& declaration) const;
  // The same check, without declaring.
  absl::StatusOr<std::optional<StepOutcome>> CheckStep(Slot slot, Step step) const;
  // OK while a declaration of these slots for the step stands. What Declare would have returned, had it known what
  // another host's slots had said: it was taken back.
  absl::Status CheckStands(absl::Span<const Slot> slots, Step step) const;
  // What another host's slots said of the open step comes first from now on; declarations on this host that differ are
  // taken back. `rates`: one for each group. For the lead.
  void TakeSettings(Step step, absl::Span<const double> rates, double loss_scale) const;

  // Of what other parts are told, too: InvalidArgument, ResourceExhausted (CheckLast), with what would be right.
  absl::Status CheckSlot(Slot slot) const;
  absl::Status CheckLast(Step step) const;
  absl::Status CheckTokens(int64_t tokens, Slot slot) const;
  absl::Status CheckLossScale(Step step, double scale) const;
  absl::Status CheckNonFinite(absl::Span<const Slot> declared, Step step, Slot slot, int tensor) const;
  absl::StatusOr<std::vector<double>> LearningRatesOf(const std::vector<double>& given) const;
  // InvalidArgument: the step's first slot said other rates, or another loss scale.
  absl::Status ClaimSettings(Slot slot, Step step, absl::Span<const double> rates, double loss_scale) const;

 private:
  absl::Status CheckAllTokens(const Declaration& declaration) const;
  absl::StatusOr<std::optional<StepOutcome>> DeclareSlots(const Declaration& declaration) const;
  absl::Status CompareWithElsewhere(const Declaration& declaration, absl::Span<const double> rates) const;
  absl::Status CompareSettings(Slot slot, int first, Step step, absl::Span<const double> rates,
                               double loss_scale) const;
  // Rates and loss scale that a claim (settings_claim) stands for.
  const GroupTable::Rate* ClaimedRates(uint64_t claim) const;
  const std::atomic<double>& ClaimedLossScale(uint64_t claim) const;
  void TakeBack(Slot slot, Step step, Refusal why) const;

  const StepView& view_;
};

}  // namespace shardmesh
