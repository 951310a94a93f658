#include "rpc/connections/listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

absl::Status SystemError(const Address& address, absl::string_view what, int error) {
  return absl::Status(absl::ErrnoToStatusCode(error),
                      absl::StrCat("cannot listen on ", address.ToString(), ": ", what, ": ", std::strerror(error)));
}

absl::Status InUse(const Address& address) {
  if (address.is_unix()) {
    return absl::AlreadyExistsError(absl::StrCat("a server answers on ", address.ToString(),
                                                 "; stop it, or choose another path with --listen unix:/path"));
  }
  return absl::AlreadyExistsError(absl::StrCat("port ", address.port, " on ", address.host,
                                               " is in use; choose another "
                                               "with --listen host:port, or port 0 to have one chosen"));
}

absl::StatusOr<SocketAddress> Resolve(const Address& address) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  const std::string host = address.host == "localhost" ? "127.0.0.1" : address.host;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(address.port).c_str(), &hints, &list);
  if (error != 0) {
    return absl::InvalidArgumentError(absl::StrCat("cannot listen on ", address.ToString(), ": ", gai_strerror(error),
                                                   "; give a name or IP address of this machine"));
  }
  SocketAddress result;
  std::memcpy(&result.storage, list->ai_addr, list->ai_addrlen);
  result.length = list->ai_addrlen;
  freeaddrinfo(list);
  return result;
}

SocketAddress UnixSocketAddress(const std::string& path) {
  SocketAddress result;
  auto* un = reinterpret_cast<sockaddr_un*>(&result.storage);
  un->sun_family = AF_UNIX;
  std::memcpy(un->sun_path, path.data(), path.size());  // ParseAddress made sure that it fits
  result.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + 1);
  return result;
}

// Removes a socket file left by a server that is gone.
absl::Status RemoveStale(const Address& address, const SocketAddress& socket_address) {
  struct stat file;
  if (lstat(address.unix_path.c_str(), &file) != 0) return absl::OkStatus();  // bind says what is wrong, if anything
  if (!S_ISSOCK(file.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat("cannot listen on ", address.ToString(),
                                                   ": that file exists and is no socket; choose another path"));
  }
  const UniqueFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!probe.valid()) return SystemError(address, "socket", errno);
  if (connect(probe.get(), socket_address.get(), socket_address.length) == 0 || errno != ECONNREFUSED)
    return InUse(address);
  if (unlink(address.unix_path.c_str()) != 0 && errno != ENOENT) return SystemError(address, "unlink", errno);
  return absl::OkStatus();
}

absl::Status BindAndListen(int fd, const Address& address, const SocketAddress& to) {
  const int one = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  if (address.is_unix()) {
    fchmod(fd, 0600);  // Linux gives the file the socket's mode
  }
  if (bind(fd, to.get(), to.length) != 0 || listen(fd, SOMAXCONN) != 0) {
    const int error = errno;
    if (error == EADDRINUSE) return InUse(address);
    if (error == EADDRNOTAVAIL || error == ENOENT || error == ENOTDIR) {
      return absl::InvalidArgumentError(absl::StrCat("cannot listen on ", address.ToString(), ": ",
                                                     std::strerror(error),
                                                     "; give an address or an existing folder of this machine"));
    }
    return SystemError(address, "bind", error);
  }
  return absl::OkStatus();
}

int BoundPort(int fd) {
  sockaddr_storage storage = {};
  socklen_t length = sizeof(storage);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &length) != 0) return 0;
  if (storage.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
  return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Listener>> Listener::Open(const Address& address) {
  SocketAddress to;
  if (address.is_unix()) {
    to = UnixSocketAddress(address.unix_path);
    RETURN_IF_ERROR(RemoveStale(address, to));
  } else {
    ASSIGN_OR_RETURN(to, Resolve(address));
  }
  UniqueFd fd(socket(to.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return SystemError(address, "socket", errno);
  RETURN_IF_ERROR(BindAndListen(fd.get(), address, to));
  return std::unique_ptr<Listener>(new Listener(std::move(fd), address));
}

Listener::Listener(UniqueFd fd, Address address) : fd_(std::move(fd)), address_(std::move(address)) {
  struct stat file;
  if (!address_.is_unix()) {
    address_.port = BoundPort(fd_.get());
  } else if (lstat(address_.unix_path.c_str(), &file) == 0) {
    file_device_ = file.st_dev;
    file_inode_ = file.st_ino;
  }
}

Listener::~Listener() {
  if (address_.is_unix() && IsReachable()) unlink(address_.unix_path.c_str());
}

bool Listener::IsReachable() const {
  struct stat file;
  if (!address_.is_unix()) return true;
  return lstat(address_.unix_path.c_str(), &file) == 0 && file.st_dev == file_device_ && file.st_ino == file_inode_;
}

absl::Status Listener::ListenAgain() {
  ASSIGN_OR_RETURN(const std::unique_ptr<Listener> again, Open(address_));
  std::swap(fd_, again->fd_);
  std::swap(file_device_, again->file_device_);  // the file is this object's now, and `again` removes none
  std::swap(file_inode_, again->file_inode_);
  return absl::OkStatus();
}

}  // namespace shardmesh
