// FairShare: that one caller does not take all of something that callers share. Pure, thread-safe.
//
// As long as a quarter of the room is free everybody may take. After that only those who have less than a quarter of
// the room may, so that there is some for others whatever one does.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace shardmesh {

struct Share {
  int64_t own = 0;   // that the caller has
  int64_t used = 0;  // that anybody has
  int64_t room = 0;
};

// OK: the caller may take more, as far as others are concerned; whether there is room is not looked at. An empty
// `caller` (CallerKey of caller_share.h) is not capped. ResourceExhausted: the rule above; `what`: "leases of job x",
// and `remedy` say in the message what is shared and what would be right.
absl::Status CheckShare(absl::string_view caller, const Share& share, absl::string_view what, absl::string_view remedy);

}  // namespace shardmesh
