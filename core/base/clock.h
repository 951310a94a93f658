// MonotonicNow and Clock: where time comes from. Thread-safe.
//
// Every wait, deadline and silence is measured by the monotonic clock of the kernel (CLOCK_MONOTONIC), so that nothing
// ends early or late when somebody sets the wall clock. absl::Now() (wall time) is for records that people read, for
// gRPC's deadlines, which gRPC turns into monotonic time at once, and for numbers that must grow over restarts.
#pragma once

#include <time.h>

#include <atomic>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace shardmesh {

// Only differences mean anything: it counts from the start of the machine, not from 1970.
inline absl::Time MonotonicNow() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return absl::TimeFromTimespec(now);
}

// The time of who must be tested with another one: only mains construct RealClock. Monotonic.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() const = 0;
};

class RealClock final : public Clock {
 public:
  absl::Time Now() const override { return MonotonicNow(); }
};

// A clock that a test moves by hand.
class ManualClock final : public Clock {
 public:
  explicit ManualClock(absl::Time start = absl::UnixEpoch() + absl::Hours(24 * 365))
      : nanos_(absl::ToUnixNanos(start)) {}
  absl::Time Now() const override { return absl::FromUnixNanos(nanos_.load()); }
  void Advance(absl::Duration by) { nanos_.fetch_add(absl::ToInt64Nanoseconds(by)); }

 private:
  std::atomic<int64_t> nanos_;
};

}  // namespace shardmesh
