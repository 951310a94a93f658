// absl::Status <-> grpc::Status. The codes are the same numbers; messages are kept.
// Pure functions, thread-safe.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace shardmesh {

// Status messages travel in HTTP/2 trailers, which a peer limits to 8 KiB unless told otherwise, and every byte that is
// not printable ASCII takes three there. A message that would take more than this many bytes is cut and ends in "...".
inline constexpr size_t kMaxWireMessageBytes = 4096;

// What a service returns. Payloads are not carried.
grpc::Status ToGrpc(const absl::Status& status);

// What a caller received. Codes that the transport itself can give (UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED, UNKNOWN,
// INTERNAL, UNIMPLEMENTED) have `peer_and_method` put before their message, e.g. "10.0.0.1:7000 Shard.Pull: ...":
// gRPC's own text names neither. The service's other answers are passed on as they are. A code outside 0..16 becomes
// kUnknown.
absl::Status FromGrpc(const grpc::Status& status, absl::string_view peer_and_method);

}  // namespace shardmesh
