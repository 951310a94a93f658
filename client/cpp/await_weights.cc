#include "client/cpp/await_weights.h"

#include <optional>

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
    ASSIGN_OR_RETURN(const std::optional<v1::GetStatusReply::Job> status, job.StatusAt(rank, limit));
    if (status.has_value() && status->committed_step() >= 0) return Step(status->committed_step());
    RETURN_IF_ERROR(job.CheckNotOver());  // a worker that was left out may have the job as it was
    if (MonotonicNow() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat("job ", job.spec().name, " got no initial weights within ",
                                                      absl::FormatDuration(timeout),
                                                      "; one trainer must call Initialize"));
    }
    Pause(absl::Milliseconds(10));
  }
}

}  // namespace shardmesh
