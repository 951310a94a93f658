// LocalSocket: one end of a UNIX connection (SOCK_SEQPACKET) whose messages may carry file descriptors.
// Message boundaries are kept; a message is at most kMaxLocalMessageBytes and kMaxLocalDescriptors descriptors.
// Every call has a time limit. One thread may send while another receives; not more. Movable.
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "local/fd.h"

namespace shardmesh {

inline constexpr int kMaxLocalMessageBytes = 64 << 10;
inline constexpr int kMaxLocalDescriptors = 200;

struct LocalMessage {
  std::string bytes;
  std::vector<UniqueFd> descriptors;
};

class LocalSocket {
 public:
  explicit LocalSocket(UniqueFd fd) : fd_(std::move(fd)) {}

  // Unavailable: nobody listens at `path`. InvalidArgument: the path is over 107 bytes.
  static absl::StatusOr<LocalSocket> Connect(const std::string& path);

  // Unavailable: the peer is gone. DeadlineExceeded: it does not read. ResourceExhausted: over the limits above.
  absl::Status Send(absl::string_view bytes, absl::Span<const int> descriptors, absl::Duration timeout);

  // Unavailable: the peer closed or died. DeadlineExceeded: nothing came. Descriptors are close-on-exec.
  absl::StatusOr<LocalMessage> Receive(absl::Duration timeout);

  // The user and process at the other end when the connection was made.
  absl::StatusOr<std::pair<uid_t, pid_t>> Peer() const;

  // Ends both directions: a Receive in another thread returns Unavailable.
  void Shutdown();

  int fd() const { return fd_.get(); }  // to poll

 private:
  UniqueFd fd_;
};

// A listening socket at a path that only this user may reach (mode 0600). The file goes with the object.
class LocalListener {
 public:
  // Creates the path's folder (mode 0700) when it is missing. AlreadyExists: a live process listens there.
  // PermissionDenied: this user may not write it, or others could put their own sockets there (the folder is neither
  // this user's nor root's, or all may write it and it is not sticky).
  static absl::StatusOr<LocalListener> Listen(const std::string& path);
  LocalListener(LocalListener&&) = default;
  LocalListener& operator=(LocalListener&&) = default;
  ~LocalListener();

  // DeadlineExceeded: nobody connected. Unavailable: Shutdown was called.
  absl::StatusOr<LocalSocket> Accept(absl::Duration timeout);
  const std::string& path() const { return path_; }
  int fd() const { return fd_.get(); }  // to poll

 private:
  LocalListener(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  UniqueFd fd_;
  std::string path_;
};

// Removes socket files in `folder` whose names begin with `prefix` and where nobody listens any more; returns their
// names.
std::vector<std::string> RemoveDeadSockets(const std::string& folder, const std::string& prefix);

}  // namespace shardmesh
