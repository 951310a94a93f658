// Await: waits in a test for what another thread or process does. Tests only.
#pragma once

#include <functional>

#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/sync.h"

namespace shardmesh {

inline constexpr absl::Duration kLong = absl::Seconds(60);

// Looks at `done` until it holds, or for kLong.
inline bool Await(const std::function<bool()>& done) {
  Mutex mu;
  CondVar never;
  const absl::Time deadline = MonotonicNow() + kLong;
  while (!done()) {  // what was so once may not be any more
    if (MonotonicNow() >= deadline) return false;
    MutexLock lock(mu);
    never.WaitFor(mu, absl::Milliseconds(5));
  }
  return true;
}

}  // namespace shardmesh
