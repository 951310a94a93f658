// What harm comes to this process at a fault point (core/base/fault_point.h), as the environment says:
//
//   SHARDMESH_FAULT=NAME:POINT:ACTION:NTH     w1:chunk-stepped:kill:3
//
// (Several, one for each process, divided by commas.)
// When process NAME is at POINT for the NTH time it is killed (SIGKILL), or stopped (SIGSTOP), or waits 300 ms (delay),
// or meets an error there, RESOURCE_EXHAUSTED (error; at points that can fail). Without the variable, or in another
// process, nothing happens. `shardctl faults` (//client/cli:shardctl_with_faults) lists the points.
// SHARDMESH_FAULT_ONCE=FILE: only the incarnation that makes this file comes to harm; those after it do not.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace shardmesh::testing {

// Once in a process, before it has threads. InvalidArgument: SHARDMESH_FAULT says nothing that can be done.
absl::Status PlanFault(const std::string& name);

}  // namespace shardmesh::testing
