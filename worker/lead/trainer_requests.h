// TrainerRequests: what trainers ask of a job, attached or connected, as what it means to the rules of a step. The lead
// calls it for attached trainers (step_mail.h), the RPC adapters for connected ones. Thread-safe. Errors are those of
// shard.proto.
#pragma once

#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/ids.h"
#include "proto/shardmesh/v1/shard.pb.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

class TrainerRequests {
 public:
  explicit TrainerRequests(const StepProtocol& protocol) : protocol_(protocol) {}  // which outlives the object

  // StepRequest -> StepDeclarations::Declare. `attached`: the slots' windows hold every gradient shard, which are marked
  // ready too; else a missing gradient shard is FailedPrecondition.
  absl::StatusOr<std::optional<StepOutcome>> Declare(const v1::StepRequest& request, bool attached) const;
  // DeclareBucketRequest -> StepBuckets::Declare. True: it was declared before.
  absl::StatusOr<bool> DeclareBucket(const v1::DeclareBucketRequest& request, bool attached) const;
  // Whether what was declared stands (StepDeclarations::CheckStands).
  absl::Status CheckStands(const v1::StepRequest& request) const;
  v1::StepReply ToReply(const StepOutcome& outcome) const;

  // Hosts commit a step one after the other, a moment apart: where one has told a trainer of it, and that is at the
  // next step already, this one may not have. Waits for that moment; whoever checks the step then says what is wrong.
  void AwaitCommitBefore(Step step) const;

 private:
  // Of a connected trainer: waits for a moment until no attached one has the slots. FailedPrecondition: a gradient shard
  // is missing. An outcome, and other errors: as Declare.
  absl::StatusOr<std::optional<StepOutcome>> AwaitMayDeclare(const Declaration& declaration) const;

  const StepProtocol& protocol_;
};

}  // namespace shardmesh
