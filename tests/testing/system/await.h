// Await: waits in a test for what another process does. Tests only.
#pragma once

#include "absl/time/time.h"
#include "core/base/clock.h"
#include "tests/testing/system/process.h"

namespace shardmesh::testing {

// Looks at `done` until it holds. False: it did not once within `timeout`. What held once may not any more.
template <typename Done>
bool Await(const Done& done, absl::Duration timeout = absl::Seconds(30),
           absl::Duration pause = absl::Milliseconds(10)) {
  const absl::Time deadline = MonotonicNow() + timeout;
  while (!done()) {
    if (MonotonicNow() >= deadline) return false;
    Pause(pause);
  }
  return true;
}

}  // namespace shardmesh::testing
