// Addresses of sockets: as ranks write them at a rendezvous ("10.0.0.2 41000"), and of a host's name. Thread-safe.
#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace shardmesh {

struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

// Empty: it is of neither IPv4 nor IPv6.
std::string AddressText(const SocketAddress& address);
// InvalidArgument: `text` is not what AddressText writes, or its port is 0.
absl::StatusOr<SocketAddress> ParseAddress(const std::string& text);

// All addresses of a host's name or number, with port 0; empty: of this host's name. InvalidArgument: it has none.
absl::StatusOr<std::vector<SocketAddress>> AddressesOf(const std::string& host);

}  // namespace shardmesh
