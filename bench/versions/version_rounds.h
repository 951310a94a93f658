// What bench/versions measures, one function each; all check that the versions they see are whole. For one thread.
// Errors: of the client; Internal: a version that is not whole; Unavailable: a reader's process ended.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "bench/harness/harness.h"
#include "bench/harness/service.h"

namespace shardmesh::bench {

struct VersionRounds {
  int rounds = 9;
  int steps = 500;  // of a round
};

// How long after a commit, as its trainer sees it, a reader that waits for the version has it: one that maps and one
// that pulls, in turns, of 1 MiB; steps come 2 ms apart.
absl::Status AddCommitToVisible(Service& service, const VersionRounds& rounds, Report& report);

// From one version to another that is there, back and forth, mapped and pulled, of so many MiB.
absl::Status AddSwap(Service& service, const VersionRounds& rounds, int64_t mebibytes, Report& report);

// Steps while `readers` processes are there that all keep one version, and without any, in turns; and what the kernel
// holds of publications more.
absl::Status AddReaders(Service& service, const VersionRounds& rounds, int readers, int64_t mebibytes, Report& report);

}  // namespace shardmesh::bench
