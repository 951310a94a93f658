// What records may say that come out of a state file, which somebody may have edited or a disk may have damaged. A
// record that the coordinator stored passes. Pure functions, thread-safe.
#pragma once

#include "absl/status/status.h"
#include "server/store/records.h"

namespace shardmesh {

// InvalidArgument: a value that the coordinator never stores; the message has the field, the value and what would be
// right.
absl::Status CheckStored(const WorkerRecord& worker);
absl::Status CheckStored(const JobRecord& job);

}  // namespace shardmesh
