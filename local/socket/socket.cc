#include "local/socket/socket.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "local/descriptor/descriptor_error.h"
#include "local/process/process_end.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace shardmesh {
namespace {

absl::StatusOr<sockaddr_un> AddressOf(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("socket path of ", path.size(), " bytes: \"", path,
                                                   "\"; UNIX allows 1 to 107, choose a shorter folder"));
  }
  memcpy(address.sun_path, path.data(), path.size());
  return address;
}

UniqueFd NewSocket() { return UniqueFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)); }

absl::Status PeerEnded() { return absl::UnavailableError("the peer's process has ended"); }

// Waits until `fd` has one of `events`; interrupted waits go on with the time that is left. Unavailable: `process`, if
// it is one, has ended.
absl::Status WaitFor(int fd, short events, absl::Duration timeout, int process = -1) {
  const absl::Time deadline = MonotonicNow() + timeout;
  for (;;) {
    pollfd entries[] = {{fd, events, 0}, {process, POLLIN, 0}};  // one that is negative is passed over
    const int64_t left = absl::ToInt64Milliseconds(absl::Ceil(deadline - MonotonicNow(), absl::Milliseconds(1)));
    const int ready = poll(entries, 2, static_cast<int>(std::max<int64_t>(0, std::min<int64_t>(left, 1 << 30))));
    if (ready > 0) return entries[1].revents != 0 ? PeerEnded() : absl::OkStatus();
    if (ready == 0) return absl::DeadlineExceededError(absl::StrCat("nothing for ", absl::FormatDuration(timeout)));
    if (errno != EINTR) return absl::UnavailableError(absl::StrCat("poll: ", strerror(errno)));
  }
}

absl::Status Gone(absl::string_view verb, int error) {
  return absl::UnavailableError(absl::StrCat("the peer is gone (", verb, ": ", strerror(error), ")"));
}

// OK when no other user can put a socket of their own in the place of one in `folder`, or it is not there.
absl::Status CheckFolder(const std::string& folder) {
  struct stat info;
  const auto ours = [&info] { return info.st_uid == geteuid() || info.st_uid == 0; };
  if (lstat(folder.c_str(), &info) != 0) return absl::OkStatus();
  if (S_ISLNK(info.st_mode) && !ours()) {
    return absl::PermissionDeniedError(absl::StrCat("folder ", folder, " is a symlink of user ", info.st_uid,
                                                    "; choose a --local-dir that user ", geteuid(), " made"));
  }
  if (stat(folder.c_str(), &info) != 0) return absl::OkStatus();
  const bool writable = (info.st_mode & S_IWOTH) != 0 && (info.st_mode & S_ISVTX) == 0;
  if (ours() && !writable) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("folder ", folder, " belongs to user ", info.st_uid, " and has mode ",
                                                  absl::StrFormat("%04o", info.st_mode & 07777),
                                                  "; choose a --local-dir that belongs to user ", geteuid(),
                                                  " and that no other user may write"));
}

// Removes the socket of a process that is gone.
absl::Status ClearPath(const std::string& path) {
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) return absl::OkStatus();  // nothing; or bind says what is wrong
  if (!S_ISSOCK(info.st_mode)) {
    return absl::AlreadyExistsError(absl::StrCat(path, " is a ", S_ISLNK(info.st_mode) ? "symlink" : "file",
                                                 ", not a socket; remove it, or choose another --local-dir or --name"));
  }
  if (LocalSocket::Connect(path).ok()) {
    return absl::AlreadyExistsError(
        absl::StrCat("a live process listens at ", path, "; choose another --local-dir or --name"));
  }
  unlink(path.c_str());
  return absl::OkStatus();
}

// "": the path has none.
std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos || slash == 0 ? "" : path.substr(0, slash);
}

// A folder of this user alone, locked; others, like /tmp, are not this program's to lock. A wish.
UniqueFd LockFolder(const std::string& folder) {
  UniqueFd fd(folder.empty() ? -1 : open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  struct stat info;
  const bool own = fd.valid() && fstat(fd.get(), &info) == 0 && info.st_uid == geteuid() &&
                   (info.st_mode & (S_IWGRP | S_IWOTH)) == 0;
  if (!own || flock(fd.get(), LOCK_SH | LOCK_NB) != 0) fd.reset();
  return fd;
}

}  // namespace

absl::StatusOr<LocalSocket> LocalSocket::Connect(const std::string& path) {
  ASSIGN_OR_RETURN(const sockaddr_un address, AddressOf(path));
  UniqueFd fd = NewSocket();
  if (!fd.valid()) return absl::ResourceExhaustedError(absl::StrCat("socket: ", DescriptorError(errno)));
  // SEQPACKET connects complete at once or wait for room in the listener's queue; bound that wait.
  const timeval limit = {2, 0};
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return absl::UnavailableError(absl::StrCat("nobody listens at ", path, " (", strerror(errno), ")"));
  }
  LocalSocket made(std::move(fd));
  made.not_in_children_ = NotInChildren(made.fd_.get(), nullptr, 0);
  return made;
}

bool LocalSocket::WatchPeer() {
  int process = -1;
  socklen_t length = sizeof(process);
  const bool known = getsockopt(fd_.get(), SOL_SOCKET, SO_PEERPIDFD, &process, &length) == 0;
  peer_ = known ? UniqueFd(process) : UniqueFd();
  const auto peer = Peer();
  // Of an older kernel: by the number, which is that process's own unless it has ended since it connected.
  if (!known && peer.ok() && peer->second > 0) peer_ = OpenProcess(peer->second);
  if (peer_.valid()) return true;
  if (!peer.ok() || peer->second <= 0) return false;
  Shutdown();  // it has ended, so that it cannot be watched
  return true;
}

bool LocalSocket::PeerHasEnded() const {
  pollfd end = {peer_.get(), POLLIN, 0};
  return poll(&end, 1, 0) == 1;
}

absl::Status LocalSocket::Await(short events, absl::Duration timeout) const {
  return WaitFor(fd_.get(), events, timeout, peer_.get());
}

absl::Status LocalSocket::Send(absl::string_view bytes, absl::Span<const int> descriptors, absl::Duration timeout) {
  if (bytes.empty() || bytes.size() > kMaxLocalMessageBytes || descriptors.size() > kMaxLocalDescriptors) {
    return absl::ResourceExhaustedError(absl::StrCat("a message of ", bytes.size(), " bytes and ", descriptors.size(),
                                                     " descriptors; 1 to ", kMaxLocalMessageBytes, " and at most ",
                                                     kMaxLocalDescriptors));
  }
  iovec part = {const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  std::vector<char> control(CMSG_SPACE(sizeof(int) * descriptors.size()));
  if (!descriptors.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
    memcpy(CMSG_DATA(header), descriptors.data(), sizeof(int) * descriptors.size());
  }
  if (PeerHasEnded()) return PeerEnded();
  for (;;) {
    if (sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return absl::OkStatus();
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return Gone("send", errno);
    RETURN_IF_ERROR(Await(POLLOUT, timeout));
  }
}

absl::StatusOr<LocalMessage> LocalSocket::Receive(absl::Duration timeout) {
  RETURN_IF_ERROR(Await(POLLIN, timeout));
  LocalMessage result;
  result.bytes.resize(kMaxLocalMessageBytes);
  iovec part = {result.bytes.data(), result.bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxLocalDescriptors)];
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t received;
  bool reset = false;
  do {
    received = recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC);
    // A peer that closed without reading everything: that is said once, and before what it sent, which may say why.
  } while (received < 0 && (errno == EINTR || (errno == ECONNRESET && !std::exchange(reset, true))));
  if (received == 0 && reset) return Gone("receive", ECONNRESET);
  if (received < 0) return Gone("receive", errno);
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      result.descriptors.emplace_back(fd);
    }
  }
  if (received == 0) return absl::UnavailableError("the peer closed the connection");
  const bool fewer = (message.msg_flags & MSG_CTRUNC) != 0 && result.descriptors.size() < kMaxLocalDescriptors;
  if (fewer && (message.msg_flags & MSG_TRUNC) == 0) {
    return absl::ResourceExhaustedError(absl::StrCat("a message's descriptors do not fit into this process, only ",
                                                     result.descriptors.size(), " do: ", DescriptorLimit()));
  }
  if (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a message over ", kMaxLocalMessageBytes, " bytes or ", kMaxLocalDescriptors, " descriptors"));
  }
  result.bytes.resize(received);
  return result;
}

absl::StatusOr<std::pair<uid_t, pid_t>> LocalSocket::Peer() const {
  ucred credentials;
  socklen_t length = sizeof(credentials);
  if (getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return absl::UnavailableError(absl::StrCat("SO_PEERCRED: ", strerror(errno)));
  }
  return std::make_pair(credentials.uid, credentials.pid);
}

void LocalSocket::Shutdown() { shutdown(fd_.get(), SHUT_RDWR); }

absl::StatusOr<LocalListener> LocalListener::Listen(const std::string& path) {
  ASSIGN_OR_RETURN(const sockaddr_un address, AddressOf(path));
  if (const std::string folder = FolderOf(path); !folder.empty()) {
    mkdir(folder.c_str(), 0700);  // there already: fine; impossible: bind says so
    RETURN_IF_ERROR(CheckFolder(folder));
  }
  RETURN_IF_ERROR(ClearPath(path));
  UniqueFd fd = NewSocket();
  if (!fd.valid()) return absl::ResourceExhaustedError(absl::StrCat("socket: ", DescriptorError(errno)));
  fchmod(fd.get(), 0600);  // of the socket's file, which bind creates
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 || listen(fd.get(), 128) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("cannot listen at ", path, ": ", strerror(errno), "; choose a folder that this user may write"));
  }
  return LocalListener(std::move(fd), path);
}

LocalListener::LocalListener(UniqueFd fd, std::string path)
    : fd_(std::move(fd)), folder_(LockFolder(FolderOf(path))), path_(std::move(path)) {
  struct stat info;
  if (lstat(path_.c_str(), &info) != 0) return;
  device_ = info.st_dev;
  inode_ = info.st_ino;
}

LocalListener::~LocalListener() {
  if (fd_.valid() && IsReachable()) unlink(path_.c_str());
}

bool LocalListener::IsReachable() const {
  struct stat info;
  return lstat(path_.c_str(), &info) == 0 && info.st_dev == device_ && info.st_ino == inode_;
}

absl::Status LocalListener::ListenAgain() {
  ASSIGN_OR_RETURN(LocalListener again, Listen(path_));
  *this = std::move(again);
  return absl::OkStatus();
}

absl::StatusOr<LocalSocket> LocalListener::Accept(absl::Duration timeout) {
  RETURN_IF_ERROR(WaitFor(fd_.get(), POLLIN, timeout));
  UniqueFd fd(accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!fd.valid()) return absl::UnavailableError(absl::StrCat("accept: ", DescriptorError(errno)));
  return LocalSocket(std::move(fd));
}

std::vector<std::string> RemoveDeadSockets(const std::string& folder, const std::string& prefix) {
  std::vector<std::string> dead;
  DIR* directory = opendir(folder.c_str());
  if (directory == nullptr) return dead;
  while (const dirent* entry = readdir(directory)) {
    const std::string path = absl::StrCat(folder, "/", entry->d_name);
    struct stat info;
    if (!absl::StartsWith(entry->d_name, prefix) || lstat(path.c_str(), &info) != 0 || !S_ISSOCK(info.st_mode))
      continue;
    if (!absl::IsUnavailable(LocalSocket::Connect(path).status())) continue;
    if (unlink(path.c_str()) == 0) dead.push_back(entry->d_name);
  }
  closedir(directory);
  return dead;
}

}  // namespace shardmesh
