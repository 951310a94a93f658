// KeyedLinks: TCP connections of every two ranks of a group. Both ends have shown that they know a key which is the
// group's own, before anybody else reads a byte: who uses the connections need not expect strangers.
//
// Rank 0 makes the key and gives it to the others at the rendezvous, which only ranks can read. Each rank listens at
// one port and connects to the ranks before it. The one that connects says first who it is, with the first half of the
// key; the one that listens answers with the second half. Strangers (port scanners, health checks, connections that say
// nothing) are dropped, and take nobody's place. What crosses is not encrypted.
#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "local/descriptor/fd.h"
#include "worker/transport/group.h"
#include "worker/transport/rendezvous.h"

namespace shardmesh {

struct LinkOptions {
  int rank = 0, size = 1;
  RankNames names;               // of ranks in messages
  std::string key;               // of the group at the rendezvous; not used before
  sockaddr_storage address = {};  // of this host, as peers see it; the port is chosen
  int links = 1;                 // connections of every two ranks
  absl::Duration timeout = absl::Seconds(30);
};

// Connection l with rank p is the result's element p * links + l; those with this rank are empty. They do not block and
// are closed on exec.
//   Unavailable: a rank did not come in time, is gone, or is not who it should be; it is named. InvalidArgument: this
//   host's address. Errors of the rendezvous, which is asked all the while whether the ranks still want to meet.
absl::StatusOr<std::vector<UniqueFd>> ConnectRanks(Rendezvous& rendezvous, const LinkOptions& options);

}  // namespace shardmesh
