// PeerPatience: how long a peer may be silent before its worker counts it as dead. After a gap of this process's own
// (the whole machine slept, or this process was stopped) nobody counts as dead for a time-out: the others had the same
// gap, and may run again later than this one.
//
// For one thread.
#pragma once

#include <cstdint>

#include "absl/time/time.h"

namespace shardmesh {

class PeerPatience {
 public:
  // Of a process that looks from now on. Times are nanoseconds of the monotonic clock.
  explicit PeerPatience(int64_t now_nanos) : last_(now_nanos), patient_until_(now_nanos) {}

  // The silence that is allowed at this look: `timeout`, the heartbeat time-out, or so much that nobody is dead. A gap
  // is more than half of `timeout` since the look before. Each look must come at a time not before the last one's.
  absl::Duration At(int64_t now_nanos, absl::Duration timeout) {
    if (absl::Nanoseconds(now_nanos - last_) > timeout / 2) {
      patient_until_ = now_nanos + absl::ToInt64Nanoseconds(timeout);
    }
    last_ = now_nanos;
    return now_nanos < patient_until_ ? absl::Hours(1) : timeout;
  }

 private:
  int64_t last_, patient_until_;
};

}  // namespace shardmesh
