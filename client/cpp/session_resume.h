// ResumeSession: the way back of an attached session whose worker died and whose memory a node has (SessionHello in
// local.proto): asks at the worker's socket until its next incarnation is there.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "local/socket/socket.h"
#include "proto/shardmesh/v1/local.pb.h"

namespace shardmesh {

struct ResumedSession {
  std::unique_ptr<LocalSocket> socket;
  v1::LocalWelcome welcome;
};

// Unavailable: it was not there within `timeout` (half a second longer if it was asked and says nothing). Other errors:
// it is there, and refuses.
absl::StatusOr<ResumedSession> ResumeSession(const std::string& path, const v1::SessionHello& session,
                                             absl::Duration timeout);

}  // namespace shardmesh
