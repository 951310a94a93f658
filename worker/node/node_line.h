// NodeLine: one connection to a node: asks, and waits for the answer. When a call fails the line is hung up, and
// every later one fails. One thread may ask while another waits for the end (AwaitEnd); not more.
// HangUp is for any.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "local/socket/socket.h"
#include "proto/shardmesh/v1/node.pb.h"

namespace shardmesh {

class NodeLine {
 public:
  struct Answer {
    v1::NodeReply reply;
    std::vector<UniqueFd> descriptors;
  };

  // Unavailable: no node listens at `path`.
  static absl::StatusOr<NodeLine> Connect(const std::string& path);

  // `fd`: travels with the request; -1: none. Unavailable: no answer came by `deadline`, or none that can be read.
  // ResourceExhausted: the request is too long for a message. Else the node's error.
  absl::StatusOr<Answer> Ask(const v1::NodeRequest& request, int fd, absl::Time deadline);

  void HangUp() { socket_.Shutdown(); }

  // Until the line is hung up, by either side (true), or `wake` is readable, or `timeout` has passed.
  bool AwaitEnd(int wake, absl::Duration timeout) const;

 private:
  explicit NodeLine(LocalSocket socket) : socket_(std::move(socket)) {}
  absl::StatusOr<LocalMessage> Exchange(const v1::NodeRequest& request, int fd, absl::Time deadline);

  LocalSocket socket_;
};

}  // namespace shardmesh
