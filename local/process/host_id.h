// HostId: equal for processes that can reach each other's memory and UNIX sockets: the kernel's boot id and the network
// namespace ("c0ffee..-4026531840"). Containers on one machine with own network namespaces count as separate hosts;
// let them share one namespace to share memory. Thread-safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardmesh {

// Unavailable: /proc is not mounted.
absl::StatusOr<std::string> HostId();

// Whether the id of a worker's host, "ID" or "ID/NAME", is of the host `id`. Names divide one host's workers, as if
// they were on several.
bool IsOnHost(absl::string_view worker_host_id, absl::string_view id);

}  // namespace shardmesh
