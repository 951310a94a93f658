// Secrets that only the programs of a service know: of a worker's incarnation, of a job, of a group of hosts, of a
// grant, a lease or a folder. Who shows the right one is who it says it is. Pure but for RandomBytes, thread-safe.
// Secrets belong in no log line, no error and no description of a job.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace shardmesh {

inline constexpr size_t kMaxSecretBytes = 64;  // of one that another program sends

// `bytes` (at most 256) of the kernel's randomness. Dies if the kernel gives none: a secret that can be guessed
// protects nothing.
std::string RandomBytes(size_t bytes);
// 16 of them.
std::string RandomSecret();

// Whether both are the same; empty equals empty. Takes the same time wherever they differ; their lengths are no secret.
bool SameSecret(absl::string_view a, absl::string_view b);

}  // namespace shardmesh
