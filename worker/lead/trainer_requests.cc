#include "worker/lead/trainer_requests.h"

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/fault_point.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kCommitLag = absl::Seconds(1);  // between the hosts of a job; far less, unless one is stopped
}  // namespace

absl::StatusOr<std::optional<StepOutcome>> TrainerRequests::Declare(const v1::StepRequest& request,
                                                                    bool attached) const {
  RETURN_IF_ERROR(protocol_.members().CheckEpoch(request.epoch()));
  if (!attached) RETURN_IF_ERROR(ErrorAt(FaultPoint::kStepCalled));
  const Declaration declaration = DeclarationOf(request, /*in_place=*/attached);
  // What an attached trainer knows, its host has committed; and the host's lead itself declares for it.
  if (!attached) {
    AwaitCommitBefore(declaration.step);
    ASSIGN_OR_RETURN(std::optional<StepOutcome> outcome, AwaitMayDeclare(declaration));
    if (outcome.has_value()) return outcome;
  }
  return protocol_.declarations().Declare(declaration);
}

absl::StatusOr<std::optional<StepOutcome>> TrainerRequests::AwaitMayDeclare(const Declaration& declaration) const {
  const StepDeclarations declarations = protocol_.declarations();
  for (Slot slot : declaration.slots) {  // who is told that waits for nothing
    ASSIGN_OR_RETURN(std::optional<StepOutcome> outcome, declarations.CheckStep(slot, declaration.step));
    if (outcome.has_value()) return outcome;
  }
  protocol_.slots().AwaitFree(declaration.slots, StepSlots::kHolderLag);
  for (Slot slot : declaration.slots) {
    for (int shard = 0; shard < protocol_.plan().num_shards() && !protocol_.plan().bucketed(); ++shard) {
      // Whether a gradient shard that another host takes is there yet is not known here: the step waits for it.
      if (!declarations.IsPushedHere(slot, shard)) continue;
      if (declarations.HasGradientShard(slot, shard, declaration.step)) continue;
      return absl::FailedPreconditionError(absl::StrCat("slot ", slot.value(), " of step ", declaration.step.value(),
                                                        " lacks the gradient of shard ", shard, "; push it first"));
    }
  }
  return std::optional<StepOutcome>();
}

absl::StatusOr<bool> TrainerRequests::DeclareBucket(const v1::DeclareBucketRequest& request, bool attached) const {
  RETURN_IF_ERROR(protocol_.members().CheckEpoch(request.epoch()));
  BucketDeclaration declaration;
  declaration.step = Step(request.step());
  declaration.bucket = request.bucket();
  declaration.in_place = attached;
  for (int slot : request.slots()) declaration.slots.push_back(Slot(slot));
  for (const v1::NonFinite& bad : request.non_finite())
    declaration.non_finite.emplace_back(Slot(bad.slot()), bad.tensor());
  return protocol_.buckets().Declare(declaration);
}

void TrainerRequests::AwaitCommitBefore(Step step) const {
  const bool under_way = protocol_.decided() > protocol_.committed();
  if (protocol_.local().alone() || !under_way || step != Step(protocol_.committed_step().value() + 2)) return;
  protocol_.outcomes().AwaitCommit(Step(step.value() - 1), kCommitLag).status().IgnoreError();
}

absl::Status TrainerRequests::CheckStands(const v1::StepRequest& request) const {
  for (const int slot : request.slots()) {
    RETURN_IF_ERROR(protocol_.declarations().CheckStands({Slot(slot)}, Step(request.step())));
  }
  return absl::OkStatus();
}

v1::StepReply TrainerRequests::ToReply(const StepOutcome& outcome) const {
  v1::StepReply reply;
  reply.set_step(outcome.step.value());
  reply.set_already_applied(outcome.already_applied);
  reply.set_skipped(outcome.skipped);
  reply.set_gradient_norm(outcome.norm);
  reply.set_peak_gradients(outcome.peak);
  if (outcome.no_tokens) {
    reply.set_skip_reason("no slot had a token");
  } else if (outcome.skipped) {
    const bool known =
        outcome.bad_tensor >= 0 && outcome.bad_tensor < static_cast<int>(protocol_.job().parameters.size());
    reply.set_skip_reason(absl::StrCat("slot ", outcome.bad_slot.value(), ": gradient of \"",
                                       known ? protocol_.job().parameters[outcome.bad_tensor].name : "?",
                                       "\" is not finite (NaN, infinite, or >= FLT_MAX / slots)"));
  }
  return reply;
}

}  // namespace shardmesh
