// What carries bytes between hosts over links of several speeds: SecureGroup over TLS and in the clear, and Gloo,
// against raw TCP. Two ranks, one in each of two network namespaces, send each other the same bytes at the same time.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "bench/harness/harness.h"
#include "bench/harness/two_namespaces.h"

namespace shardmesh::bench {

// 10^6 bytes a second each way; 0: as fast as the machine carries them.
inline constexpr int kLinks[] = {100, 250, 500, 0};
inline constexpr double kTlsOfRaw = 0.9;  // goal, where the link is the bound

// Adds for each link the times, and the processor seconds for a GB, of every way against raw TCP. Every byte of every
// way is looked at first. Leaves the link as fast as it can be. Errors of the groups, and what was wrong with a byte.
absl::Status AddLinkRows(TwoNamespaces& hosts, int64_t bytes, int rounds, Report& report);

}  // namespace shardmesh::bench
