// CallerKey: who counts as one caller where callers share something that is scarce (fair_share.h). Thread-safe.
#pragma once

#include <grpcpp/server_context.h>

#include <functional>
#include <string>

#include "absl/strings/string_view.h"

namespace shardmesh {

// `CN=reader` of a caller with a certificate that has a common name, wherever it calls from; else `address 10.0.0.1`.
// Empty, and not capped: callers of this host without a certificate, which are one user's (unix:, 127.0.0.0/8, ::1, and
// the addresses of this host's own interfaces).
std::string CallerKey(const grpc::ServerContextBase& context);

// The same of a caller without a certificate, from what gRPC calls its peer: "ipv4:10.0.0.1:4711",
// "ipv6:%5Bfe80::1%25eth0%5D:4711", "unix:/path". `is_own`: whether an address, as inet_ntop writes it, is this host's.
// What is of no such form counts as one caller of its own.
std::string KeyOfPeer(absl::string_view peer, const std::function<bool(const std::string& address)>& is_own);

}  // namespace shardmesh
