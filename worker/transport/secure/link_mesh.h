// ConnectMesh: one connection of every two ranks of a group, over TLS or in the clear. Both ends have proved to each
// other that they know the job's secret (handshake.h), before anybody else reads a byte.
//
// Each rank listens at a port of its own until it is connected, and dials the ranks before it, whose addresses it has
// from the rendezvous. Strangers (port scanners, other certificates, other secrets, ranks of another epoch, connections
// that say nothing) are refused, with a line in the log; they take nobody's place and end nothing.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/transport/rendezvous.h"
#include "worker/transport/secure/secure_options.h"
#include "worker/transport/secure/stream.h"
#include "worker/transport/secure/tls_stream.h"

namespace shardmesh {

// Element p is the connection with rank p; that of this rank is null. `tls` null: in the clear.
//   InvalidArgument: this host's address.
//   Unavailable: a rank did not come in time, or is gone. PermissionDenied: a rank that this one dialed has another
//   secret, or one of both does not accept the other's certificate. FailedPrecondition: a rank has another version,
//   epoch or size. DataLoss: who listens at a rank's address speaks something else. All name the rank.
//   Errors of the rendezvous, which is asked all the while whether the ranks still want to meet.
absl::StatusOr<std::vector<std::unique_ptr<Stream>>> ConnectMesh(Rendezvous& rendezvous, const SecureOptions& options,
                                                                 const TlsContext* tls);

}  // namespace shardmesh
