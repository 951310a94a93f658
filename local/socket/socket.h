// LocalSocket: one end of a UNIX connection (SOCK_SEQPACKET) whose messages may carry file descriptors.
// Message boundaries are kept; a message is at most kMaxLocalMessageBytes and kMaxLocalDescriptors descriptors.
// Every call has a time limit. One thread may send while another receives; not more. Movable.
// Close-on-exec, and a connection that was made here (Connect) is hung up in processes that this one forks: its peer
// hears of this process's end whatever its children do.
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "local/descriptor/fd.h"
#include "local/process/not_in_children.h"

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

  // From now on the connection counts as closed once the peer's process has ended, whoever else holds the peer's
  // descriptor: a process that it forked may. What was sent and not received by then is lost. Before other threads
  // use the socket. False: the system cannot tell (the process is of another pid namespace, and the kernel is older
  // than 6.5), and nothing changed.
  bool WatchPeer();
  // Whether the peer's process has ended. REQUIRES: WatchPeer() was true, else false.
  bool PeerHasEnded() const;

  // Ends both directions: a Receive in another thread returns Unavailable.
  void Shutdown();

  int fd() const { return fd_.get(); }  // to poll

 private:
  absl::Status Await(short events, absl::Duration timeout) const;

  UniqueFd fd_, peer_;           // peer_: its process, once that is watched
  NotInChildren not_in_children_;  // of a connection made here
};

// A listening socket at a path that only this user may reach (mode 0600). The file goes with the object, unless it is
// another's by then. While it listens, the folder, if it is this user's own, has a BSD lock, by which systemd-tmpfiles
// leaves it alone. For one thread.
class LocalListener {
 public:
  // Creates the path's folder (mode 0700) when it is missing. A socket where nobody listens is replaced; nothing else
  // is. AlreadyExists: a live process listens there, or something else than a socket lies there.
  // PermissionDenied: this user may not write it, or others could put their own sockets there (the folder is neither
  // this user's nor root's, or a symlink of another user, or all may write it and it is not sticky).
  static absl::StatusOr<LocalListener> Listen(const std::string& path);
  LocalListener(LocalListener&&) = default;
  LocalListener& operator=(LocalListener&&) = default;
  ~LocalListener();

  // DeadlineExceeded: nobody connected. Unavailable: Shutdown was called.
  absl::StatusOr<LocalSocket> Accept(absl::Duration timeout);
  // Whether the path still leads here: something may have removed the socket's file, and then nobody can connect.
  bool IsReachable() const;
  // Listens at the path anew, in place of a socket that cannot be reached. Errors of Listen; then nothing changed.
  absl::Status ListenAgain();
  const std::string& path() const { return path_; }
  int fd() const { return fd_.get(); }  // to poll

 private:
  LocalListener(UniqueFd fd, std::string path);
  UniqueFd fd_, folder_;  // folder_: locked; invalid: it is not this user's own
  std::string path_;
  uint64_t device_ = 0, inode_ = 0;  // of the socket's file
};

// Removes socket files in `folder` whose names begin with `prefix` and where nobody listens any more; returns their
// names.
std::vector<std::string> RemoveDeadSockets(const std::string& folder, const std::string& prefix);

}  // namespace shardmesh
