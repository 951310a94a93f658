#include "worker/node/node_line.h"

#include <poll.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"

namespace shardmesh {

absl::StatusOr<NodeLine> NodeLine::Connect(const std::string& path) {
  ASSIGN_OR_RETURN(LocalSocket socket, LocalSocket::Connect(path));
  return NodeLine(std::move(socket));
}

absl::StatusOr<LocalMessage> NodeLine::Exchange(const v1::NodeRequest& request, int fd, absl::Time deadline) {
  const std::vector<int> descriptors = fd < 0 ? std::vector<int>() : std::vector<int>{fd};
  const auto left = [deadline] { return std::max(absl::ZeroDuration(), deadline - MonotonicNow()); };
  RETURN_IF_ERROR(socket_.Send(request.SerializeAsString(), descriptors, left()));
  return socket_.Receive(left());
}

absl::StatusOr<NodeLine::Answer> NodeLine::Ask(const v1::NodeRequest& request, int fd, absl::Time deadline) {
  absl::StatusOr<LocalMessage> message = Exchange(request, fd, deadline);
  Answer answer;
  if (message.ok() && (!answer.reply.ParseFromString(message->bytes) || answer.reply.code() < 0 ||
                       answer.reply.code() > static_cast<int>(absl::StatusCode::kUnauthenticated))) {
    message = absl::InvalidArgumentError("its answer is no NodeReply; run one build of shardmesh everywhere");
  }
  if (absl::IsResourceExhausted(message.status())) return message.status();  // nothing was sent
  if (!message.ok()) {
    socket_.Shutdown();  // what comes later would be taken for the answer to another question
    return absl::UnavailableError(absl::StrCat("the node did not answer: ", message.status().message()));
  }
  if (answer.reply.code() != 0) {
    return absl::Status(static_cast<absl::StatusCode>(answer.reply.code()), answer.reply.message());
  }
  answer.descriptors = std::move(message->descriptors);
  return answer;
}

bool NodeLine::AwaitEnd(int wake, absl::Duration timeout) const {
  pollfd entries[] = {{wake, POLLIN, 0}, {socket_.fd(), POLLRDHUP, 0}};
  poll(entries, 2, static_cast<int>(absl::ToInt64Milliseconds(timeout)));
  return entries[1].revents != 0;
}

}  // namespace shardmesh
