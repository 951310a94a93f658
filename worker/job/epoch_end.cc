#include "worker/job/epoch_end.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "local/memory/futex.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kSlice = absl::Milliseconds(20);

// FailedPrecondition: not all gradients of the step have come to this host, and nobody brings them any more.
absl::Status CheckGradients(const StepProtocol& protocol, int64_t step) {
  if (protocol.local().alone()) return absl::OkStatus();
  const auto buckets = static_cast<int>(protocol.plan().buckets().size());
  const uint64_t here = protocol.control()->gradients_here.load(std::memory_order_acquire);
  if (Reaches(here, BucketWord(static_cast<uint64_t>(step), buckets))) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("step ", step,
                                                    " was decided, and its gradients had not all come to ",
                                                    "this host when the epoch ended; restore a checkpoint"));
}

}  // namespace

// Gradients are there as long as windows are: trainers that were told of the abort do not write them any more.
absl::Status EpochEnd::Run(const EpochMembers& members, const std::atomic<bool>& cancelled, absl::Duration timeout,
                           const std::function<void()>& aborted) {
  MutexLock running_lock(running_mu_);
  if (ending().has_value()) return absl::OkStatus();
  // Without replicas a command that is open has to end: its gradients may still be on their way to another host. With
  // replicas the leads may be those that were lost, and nobody here was told yet.
  const bool replicas = protocol_.plan().num_replicas() > 1;
  if (!replicas || !members.lost) AwaitQuiet(cancelled, replicas ? timeout / 2 : timeout);
  protocol_.members().Abort(AbortReason::kReformed, rank_.value(), rank_);
  aborted();
  engine_.Stop();
  ControlBlock& control = *protocol_.control();
  TellStopped(control, rank_);
  ASSIGN_OR_RETURN(const std::optional<Ending> ending, Agree(
                                                           members, [&] { return cancelled.load(); }, timeout));
  if (!ending.has_value()) return absl::OkStatus();
  const uint64_t done = control.members[rank_.value()].done.load(std::memory_order_acquire);
  if (done > ending->seq) {
    return absl::FailedPreconditionError("it went on with a step while the others ended the epoch");
  }
  if (ending->steps && done != ending->seq) {
    RETURN_IF_ERROR(CheckGradients(protocol_, ending->step));
    RETURN_IF_ERROR(pass_.Run(control.commands[ending->seq % 2], ending->seq, nullptr).status());
  }
  MutexLock lock(mu_);
  ending_ = ending;
  return absl::OkStatus();
}

// If a member is lost meanwhile the job is aborted for that, and what the others have decided is agreed on behind it.
void EpochEnd::AwaitQuiet(const std::atomic<bool>& cancelled, absl::Duration timeout) const {
  if (protocol_.local().alone()) return;
  ControlBlock& control = *protocol_.control();
  control.ends.store(1);
  FutexBump(protocol_.notifier());
  const absl::Time deadline = MonotonicNow() + timeout;
  while (control.abort.load() == 0 && !cancelled.load() && MonotonicNow() < deadline) {
    const uint32_t seen = control.finished.load(std::memory_order_acquire);
    if (control.abort.load() == 0) FutexWait(control.finished, seen, kSlice);
  }
}

absl::StatusOr<std::optional<Ending>> EpochEnd::Agree(const EpochMembers& members,
                                                      const std::function<bool()>& cancelled,
                                                      absl::Duration timeout) const {
  ControlBlock& control = *protocol_.control();
  const HostRanks& ranks = protocol_.local();
  if (ranks.alone()) return AwaitEnding(control, members.givers, cancelled, timeout);
  std::vector<Rank> here;
  std::set<int> others;
  for (const Rank giver : members.givers) {
    if (ranks.Has(giver)) {
      here.push_back(giver);
    } else {
      others.insert(ranks.HostOf(giver));
    }
  }
  if (here.empty() && !members.givers.empty()) return std::nullopt;
  RETURN_IF_ERROR(AwaitEnding(control, here, cancelled, timeout).status());
  if (here.empty() || *std::min_element(here.begin(), here.end()) != rank_) {
    return AwaitEnded(control, cancelled, timeout);
  }
  return EndTogether(protocol_, {others.begin(), others.end()}, members.ask);
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
