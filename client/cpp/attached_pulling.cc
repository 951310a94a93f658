#include "client/cpp/attached_pulling.h"

#include "client/cpp/await_weights.h"
#include "core/base/status.h"

namespace shardmesh {

absl::StatusOr<std::unique_ptr<PullingChannel>> AttachedPulling::Open(std::shared_ptr<Job> job, Rank rank) {
  std::unique_ptr<AttachedPulling> pulling(new AttachedPulling(job, rank));
  ASSIGN_OR_RETURN(pulling->channel_, AttachedChannel::Open(job, rank, {}, AttachOptions{}));
  const Plan& plan = job->plan();
  RETURN_IF_ERROR(pulling->channel_->Map(pulling->channel_->TakeDescriptors(), plan.window_bytes(),
                                         plan.slots().windows_each() * plan.gradient_window_bytes(), pulling->weights_,
                                         pulling->gradients_));
  return pulling;
}

std::optional<int> AttachedPulling::WindowHere(int named) const {
  return named < 0 || named >= job_->plan().slots().windows_each() ? std::nullopt : std::make_optional(named);
}

absl::StatusOr<Step> AttachedPulling::AwaitWeights(absl::Duration timeout) {
  return AwaitCommittedStep(*job_, rank_, timeout);
}

}  // namespace shardmesh
