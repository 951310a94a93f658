// Restarts: how long to wait before a program that ended is started again: not at all after a long run; longer and
// longer while it ends soon after each start, as one does whose flags or surroundings are wrong. Not thread-safe.
#pragma once

#include <algorithm>

#include "absl/time/time.h"

namespace shardmesh {

class Restarts {
 public:
  // What to wait after a run of that length; at most `longest`.
  absl::Duration WaitAfter(absl::Duration run, absl::Duration longest = absl::InfiniteDuration()) {
    wait_ = run >= kLongRun ? absl::ZeroDuration() : std::clamp(2 * wait_, kFirstWait, kLongestWait);
    return std::min(wait_, longest);
  }

 private:
  const absl::Duration kLongRun = absl::Seconds(10), kFirstWait = absl::Milliseconds(100),
                       kLongestWait = absl::Seconds(5);
  absl::Duration wait_;
};

}  // namespace shardmesh
