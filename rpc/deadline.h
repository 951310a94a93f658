// DeadlineIn: when a gRPC call, a wait for a channel or a server's shutdown is to end. Thread-safe.
//
// It is on gRPC's monotonic clock. A time point of the wall clock, which gRPC's examples take, would end early or
// late if somebody set that clock between here and the call.
#pragma once

#include <grpc/support/time.h>

#include <algorithm>

#include "absl/time/time.h"

namespace shardmesh {

// `timeout` from now; one that is negative counts as none.
inline gpr_timespec DeadlineIn(absl::Duration timeout) {
  const absl::Duration longest = absl::Hours(24 * 365);  // what is longer than that is added up by nobody
  const int64_t nanos = absl::ToInt64Nanoseconds(std::clamp(timeout, absl::ZeroDuration(), longest));
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_nanos(nanos, GPR_TIMESPAN));
}

}  // namespace shardmesh
