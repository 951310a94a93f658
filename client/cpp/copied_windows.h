// The windows of a connected trainer, which are its process's own memory: what is pushed from there, and pulled to it.
// Pure functions over the arguments; thread-safe.
#pragma once

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "core/base/ids.h"
#include "core/job/plan.h"
#include "local/memory/segment.h"

namespace shardmesh {

// Another mapping of weights that this process pulls, which callers may write to: ForgetWrites() drops that. REQUIRES:
// `weights` is mapped read-write. ResourceExhausted: no descriptor, or no room.
absl::StatusOr<Segment> MapToDropWrites(const Segment& weights);

// A shard's gradient of a gradient window, bucket after bucket; borrowed.
std::vector<absl::string_view> PartsOf(const Plan& plan, const char* window, int shard);

// Weights of the committed step of the worker at `rank` into a window, all or those of a bucket, for a slot that keeps
// them from changing (PullRequest.for_slot): of which step they are. Errors of Shard.Pull; Aborted also: they are of
// another plan. On an error the window may hold bytes of several steps.
absl::StatusOr<Step> PullWeights(const Job& job, Rank rank, int slot, std::optional<int> bucket, char* window,
                                 absl::Time deadline);

}  // namespace shardmesh
