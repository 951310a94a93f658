// HostId: equal for processes that can reach each other's memory and UNIX sockets: the kernel's boot id and the network
// namespace ("c0ffee..-4026531840"). Containers on one machine with own network namespaces count as separate hosts;
// let them share one namespace to share memory. Thread-safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace shardmesh {

// Unavailable: /proc is not mounted.
absl::StatusOr<std::string> HostId();

}  // namespace shardmesh
