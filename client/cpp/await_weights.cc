#include "client/cpp/await_weights.h"

#include "absl/strings/str_cat.h"
#include "client/cpp/next_incarnation.h"
#include "core/base/clock.h"
#include "core/base/status.h"

namespace shardmesh {

absl::StatusOr<Step> AwaitCommittedStep(const Job& job, Rank rank, absl::Duration timeout) {
  const absl::Time deadline = MonotonicNow() + timeout;
  while (true) {
    const absl::Duration limit = timeout > absl::ZeroDuration() ? TimeOfCall(deadline, job.options().call_timeout)
                                                                : job.options().opening_call();
    const auto ask = [&] { return job.worker(rank).GetStatus(limit); };
    const bool retained = job.members()[rank.value()].kept();
    ASSIGN_OR_RETURN(const v1::GetStatusReply status, CallAgain(job, rank, job.peer_timeout(), ask));
    bool held = retained;  // its next incarnation may not have the job yet
    for (const v1::GetStatusReply::Job& entry : status.jobs()) {
      if (entry.name() != job.spec().name) continue;
      held = true;
      if (entry.epoch() != job.epoch().value()) {
        return absl::AbortedError(absl::StrCat("epoch ", job.epoch().value(), " of job ", entry.name(),
                                               " is over; now ", entry.epoch(), ": open the job again"));
      }
      if (!entry.error().empty()) return absl::UnavailableError(entry.error());
      if (entry.committed_step() >= 0) return Step(entry.committed_step());
    }
    if (!held) {
      return absl::UnavailableError(absl::StrCat("worker ", job.members()[rank.value()].worker(), " does not hold job ",
                                                 job.spec().name, " any more; open the job again"));
    }
    if (MonotonicNow() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat("job ", job.spec().name, " got no initial weights within ",
                                                      absl::FormatDuration(timeout),
                                                      "; one trainer must call Initialize"));
    }
    Pause(absl::Milliseconds(10));
  }
}

}  // namespace shardmesh
