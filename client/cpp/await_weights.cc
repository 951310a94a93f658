#include "client/cpp/await_weights.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/next_life.h"
#include "core/status.h"

namespace shardmesh {

absl::StatusOr<Step> AwaitCommittedStep(const Job& job, Rank rank, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (true) {
    const auto ask = [&] { return job.worker(rank).GetStatus(job.options().call_timeout); };
    ASSIGN_OR_RETURN(const v1::GetStatusReply status,
                     CallAgain(job.members()[rank.value()].kept(), job.peer_timeout(), ask));
    for (const v1::GetStatusReply::Job& entry : status.jobs()) {
      if (entry.name() != job.spec().name || entry.epoch() != job.epoch().value()) continue;
      if (!entry.error().empty()) return absl::UnavailableError(entry.error());
      if (entry.committed_step() >= 0) return Step(entry.committed_step());
    }
    if (absl::Now() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat("job ", job.spec().name, " got no initial weights within ",
                                                      absl::FormatDuration(timeout),
                                                      "; one trainer must call Initialize"));
    }
    Pause(absl::Milliseconds(10));
  }
}

}  // namespace shardmesh
