// AwaitCommittedStep: waits until a job has its initial weights, as one worker sees it. Thread-safe.
#pragma once

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"

namespace shardmesh {

// The committed step, at least 0.
//   DeadlineExceeded: no weights yet. Errors of Job::StatusAt and Job::CheckNotOver: that worker will not have them.
absl::StatusOr<Step> AwaitCommittedStep(const Job& job, Rank rank, absl::Duration timeout);

}  // namespace shardmesh
