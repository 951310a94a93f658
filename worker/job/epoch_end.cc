#include "worker/job/epoch_end.h"

#include "core/base/status.h"

namespace shardmesh {

// Gradients are there as long as windows are: trainers that were told of the abort do not write them any more.
absl::Status EpochEnd::Run(absl::Span<const Rank> members, const std::atomic<bool>& cancelled, absl::Duration timeout,
                           const std::function<void()>& aborted) {
  MutexLock running_lock(running_mu_);
  if (ending().has_value()) return absl::OkStatus();
  protocol_.members().Abort(AbortReason::kReformed, rank_.value(), rank_);
  aborted();
  engine_.Stop();
  ControlBlock& control = *protocol_.control();
  TellStopped(control, rank_);
  ASSIGN_OR_RETURN(const Ending ending, AwaitEnding(
                                            control, members, [&] { return cancelled.load(); }, timeout));
  const uint64_t done = control.members[rank_.value()].done.load(std::memory_order_acquire);
  if (done > ending.seq) {
    return absl::FailedPreconditionError("it went on with a step while the others ended the epoch");
  }
  if (ending.steps && done != ending.seq) {
    RETURN_IF_ERROR(pass_.Run(control.commands[ending.seq % 2], ending.seq, nullptr).status());
  }
  MutexLock lock(mu_);
  ending_ = ending;
  return absl::OkStatus();
}

std::optional<Ending> EpochEnd::ending() const {
  MutexLock lock(mu_);
  return ending_;
}

void EpochEnd::StopEngine() {
  MutexLock running_lock(running_mu_);
  engine_.Stop();
}

}  // namespace shardmesh
