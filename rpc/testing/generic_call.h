// GenericCall: one request and one reply, as bytes, of any method. For the standard services (health, reflection),
// whose message classes the distribution does not ship. Tests only. Thread-safe.
#pragma once

#include <grpcpp/channel.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace shardmesh::testing {

// Waits at most 10 s. `method` is "/package.Service/Method". Of a stream of replies only the first is read.
absl::StatusOr<std::string> GenericCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                                        const std::string& request);

}  // namespace shardmesh::testing
