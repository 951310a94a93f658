// PeerUser: whose process is at the other end of a connection that never leaves this machine.
//
// A UNIX socket says so itself (SO_PEERCRED). Of a TCP connection over loopback the kernel's table of sockets knows it:
// both ends are sockets of this machine, and each has the user that made it. Thread-safe; a few system calls, none of
// which waits for the peer.
#pragma once

#include <sys/types.h>

#include "absl/status/statusor.h"

namespace shardmesh {

// The user that made the peer's socket, as this process's user namespace numbers it.
//   NotFound: the peer has closed its socket; the kernel no longer says whose it was. Unimplemented: the peer is not on
//   this machine, or this kernel does not tell (it has neither sock_diag nor /proc/net/tcp).
absl::StatusOr<uid_t> PeerUser(int fd);

// What PeerUser asks when the kernel has no sock_diag: the text tables in /proc/net. For its test.
absl::StatusOr<uid_t> PeerUserFromTables(int fd);

}  // namespace shardmesh
