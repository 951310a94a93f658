// DeadlineIn: when a gRPC call, a wait for a channel or a server's shutdown is to end. DeadlineOf: when a call ends
// that a server serves. Thread-safe.
//
// It is on gRPC's monotonic clock. A time point of the wall clock, which gRPC's examples take, would end early or
// late if somebody set that clock between here and the call.
#pragma once

#include <grpc/support/time.h>

#include <algorithm>

#include "absl/time/time.h"
#include "core/base/clock.h"

namespace shardmesh {

// `timeout` from now; one that is negative counts as none.
inline gpr_timespec DeadlineIn(absl::Duration timeout) {
  const absl::Duration longest = absl::Hours(24 * 365);  // what is longer than that is added up by nobody
  const int64_t nanos = absl::ToInt64Nanoseconds(std::clamp(timeout, absl::ZeroDuration(), longest));
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_nanos(nanos, GPR_TIMESPAN));
}

// On the scale of MonotonicNow() (core/base/clock.h); of ServerContextBase::raw_deadline(). Not by Abseil's wall time,
// which shows for seconds what the wall clock was before it was set.
inline absl::Time DeadlineOf(gpr_timespec raw) {
  const gpr_timespec deadline = gpr_convert_clock_type(raw, GPR_CLOCK_MONOTONIC);
  const gpr_timespec left = gpr_time_sub(deadline, gpr_now(GPR_CLOCK_MONOTONIC));
  return MonotonicNow() + absl::Seconds(left.tv_sec) + absl::Nanoseconds(left.tv_nsec);
}

}  // namespace shardmesh
