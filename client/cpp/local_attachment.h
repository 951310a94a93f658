// AttachAtWorker: how a process on a worker's host gets the worker's memory. A call grants it a token, a hello with the
// token goes to the worker's UNIX socket, and the answer is a welcome with descriptors. For sessions and readers.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "local/descriptor/fd.h"
#include "local/socket/socket.h"
#include "proto/shardmesh/v1/local.pb.h"
#include "proto/shardmesh/v1/shard.pb.h"

namespace shardmesh {

struct LocalAttachment {
  // What the worker said: not OK if it refuses. A worker that died between the call and the hello has a next
  // incarnation, which does not know the token: PermissionDenied.
  absl::Status said() const { return absl::Status(static_cast<absl::StatusCode>(welcome.code()), welcome.message()); }

  std::string socket_path;
  LocalSocket socket;
  v1::LocalWelcome welcome;
  std::vector<UniqueFd> descriptors;
};

// Unavailable: the worker at `rank` is named, as gone or stopped, with the reason.
absl::Status GoneOrStopped(const Job& job, Rank rank, absl::string_view why);

// `request` says what is asked for; job, epoch and host are filled in. `trainer` is the hello, without the token.
//   Unavailable: the worker is gone; or stopped, as it answers no other call for the job's peer_timeout either.
//   DeadlineExceeded: it is there, and has not answered within 10 s, or the options' opening_call() if that is shorter.
absl::StatusOr<LocalAttachment> AttachAtWorker(const Job& job, Rank rank, v1::AttachRequest request,
                                               v1::TrainerHello trainer = {});

}  // namespace shardmesh
