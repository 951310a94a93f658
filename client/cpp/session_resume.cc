#include "client/cpp/session_resume.h"

#include <algorithm>
#include <utility>

#include "client/cpp/next_incarnation.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "proto/protocol_version.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kRetry = absl::Milliseconds(5);
constexpr absl::Duration kAnswer = absl::Milliseconds(500);  // of one who has the question, beyond the time

absl::StatusOr<ResumedSession> Ask(const std::string& path, const std::string& hello, absl::Duration timeout) {
  ASSIGN_OR_RETURN(LocalSocket socket, LocalSocket::Connect(path));
  RETURN_IF_ERROR(socket.Send(hello, {}, timeout));
  absl::StatusOr<LocalMessage> message = socket.Receive(timeout);
  if (absl::IsDeadlineExceeded(message.status())) return absl::UnavailableError(message.status().message());
  RETURN_IF_ERROR(message.status());
  ResumedSession resumed;
  if (!resumed.welcome.ParseFromString(message->bytes)) {
    return absl::InternalError("the worker sent a message that is no welcome");
  }
  if (const int code = resumed.welcome.code(); code != 0) {
    return absl::Status(static_cast<absl::StatusCode>(code), resumed.welcome.message());
  }
  resumed.socket = std::make_unique<LocalSocket>(std::move(socket));
  return resumed;
}

}  // namespace

absl::StatusOr<ResumedSession> ResumeSession(const std::string& path, const v1::SessionHello& session,
                                             absl::Duration timeout) {
  v1::LocalHello hello;
  *hello.mutable_protocol() = OwnProtocol();
  *hello.mutable_session() = session;
  const absl::Time deadline = MonotonicNow() + timeout;
  while (true) {
    const absl::Duration left = deadline - MonotonicNow();
    absl::StatusOr<ResumedSession> resumed = Ask(path, hello.SerializeAsString(), std::max(left, kAnswer));
    if (!absl::IsUnavailable(resumed.status()) || MonotonicNow() >= deadline) return resumed;
    Pause(kRetry);
  }
}

}  // namespace shardmesh
