// The version of the API in this folder, which programs tell each other before anything else (v1::ProtocolVersion).
// Pure functions, thread-safe.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "proto/shardmesh/v1/job.pb.h"

namespace shardmesh {

inline constexpr int kProtocolMajor = 1;  // another one: messages mean something else
inline constexpr int kProtocolMinor = 3;  // more fields or calls than the one before

v1::ProtocolVersion OwnProtocol();

// `who`: "the caller", "the coordinator". FailedPrecondition: it speaks another major version; both are named.
absl::Status CheckProtocol(const v1::ProtocolVersion& theirs, absl::string_view who);

}  // namespace shardmesh
