// KeeperLine: one connection to a keeper: asks, and waits for the answer. When a call fails the line is hung up, and
// every later one fails. One thread may ask while another waits for the end (AwaitEnd); not more.
// HangUp is for any.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "local/socket.h"
#include "proto/shardmesh/v1/keeper.pb.h"

namespace shardmesh {

class KeeperLine {
 public:
  struct Answer {
    v1::KeeperReply reply;
    std::vector<UniqueFd> descriptors;
  };

  // Unavailable: no keeper listens at `path`.
  static absl::StatusOr<KeeperLine> Connect(const std::string& path);

  // `fd`: travels with the request; -1: none. Unavailable: no answer came by `deadline`, or none that can be read.
  // ResourceExhausted: the request is too long for a message. Else the keeper's error.
  absl::StatusOr<Answer> Ask(const v1::KeeperRequest& request, int fd, absl::Time deadline);

  void HangUp() { socket_.Shutdown(); }

  // Until the line is hung up, by either side (true), or `wake` is readable, or `timeout` has passed.
  bool AwaitEnd(int wake, absl::Duration timeout) const;

 private:
  explicit KeeperLine(LocalSocket socket) : socket_(std::move(socket)) {}
  absl::StatusOr<LocalMessage> Exchange(const v1::KeeperRequest& request, int fd, absl::Time deadline);

  LocalSocket socket_;
};

}  // namespace shardmesh
