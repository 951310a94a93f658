#include "rpc/connections/connection_table.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/tcp.h>  // not netinet/tcp.h, whose tcp_info ends before the counts of bytes
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "local/descriptor/fd.h"

namespace shardmesh {
namespace {

constexpr int kLongCall = 20;  // looks in a row that saw a call: from then on one costs no system call

// 0 when `fd` is not an open socket.
ino_t SocketInode(int fd) {
  struct stat file;
  return fstat(fd, &file) == 0 && S_ISSOCK(file.st_mode) ? file.st_ino : 0;
}

// Of a TCP connection, since it was made; -1 when `fd` is none.
int64_t BytesReceived(int fd) {
  tcp_info info = {};
  socklen_t length = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return -1;
  return static_cast<int64_t>(info.tcpi_bytes_received);
}

// Whether it has received bytes that were not read yet.
bool AnyWaiting(int fd) {
  int bytes = 0;
  return ioctl(fd, FIONREAD, &bytes) == 0 && bytes > 0;
}

std::string Bytes(const void* data, size_t num_bytes) { return std::string(static_cast<const char*>(data), num_bytes); }

std::string V4Key(const unsigned char* bytes) { return bytes[0] == 127 ? "" : Bytes(bytes, 4); }

// Keeps the socket, whatever happens to the number; its inode says whether it is the right one. Not valid: it is gone.
UniqueFd CopyOf(int fd, ino_t inode) {
  UniqueFd copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (copy.valid() && SocketInode(copy.get()) != inode) copy.reset();
  return copy;
}

}  // namespace

std::string PeerKey(const sockaddr_storage& peer) {
  if (peer.ss_family == AF_INET) {
    return V4Key(reinterpret_cast<const unsigned char*>(&reinterpret_cast<const sockaddr_in*>(&peer)->sin_addr));
  }
  if (peer.ss_family != AF_INET6) return "";
  const in6_addr& v6 = reinterpret_cast<const sockaddr_in6*>(&peer)->sin6_addr;
  if (IN6_IS_ADDR_V4MAPPED(&v6)) return V4Key(v6.s6_addr + 12);
  return IN6_IS_ADDR_LOOPBACK(&v6) ? "" : Bytes(v6.s6_addr, 8);
}

std::string PeerName(const sockaddr_storage& peer) {
  char text[INET6_ADDRSTRLEN] = "";
  if (peer.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&peer);
    inet_ntop(AF_INET, &v4->sin_addr, text, sizeof(text));
    return absl::StrCat("ipv4:", text, ":", ntohs(v4->sin_port));
  }
  if (peer.ss_family != AF_INET6) return "";
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&peer);
  if (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr)) {
    inet_ntop(AF_INET, v6->sin6_addr.s6_addr + 12, text, sizeof(text));
    return absl::StrCat("ipv4:", text, ":", ntohs(v6->sin6_port));
  }
  inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof(text));
  return absl::StrCat("ipv6:[", text, "]:", ntohs(v6->sin6_port));
}

void ConnectionTable::Track(int fd, const sockaddr_storage& peer, const std::string& peer_key) {
  if (const auto old = open_.find(fd); old != open_.end()) {
    ForgetPeer(old->second.peer_key);
    open_.erase(old);
  }
  open_.emplace(fd, Connection{SocketInode(fd), peer_key, PeerName(peer), false, 0, 0, 0});
  if (!peer_key.empty()) ++count_by_peer_[peer_key];
}

int ConnectionTable::Reconcile() {
  const int before = size();
  for (auto it = open_.begin(); it != open_.end();) {
    const ino_t inode = SocketInode(it->first);
    if (inode != 0 && inode == it->second.inode) {
      ++it;
      continue;
    }
    ForgetPeer(it->second.peer_key);
    it = open_.erase(it);
  }
  return before - size();
}

bool ConnectionTable::Abort(const std::string& peer_name) {
  if (peer_name.empty()) return false;
  bool found = false;
  for (auto& [fd, connection] : open_) {
    if (connection.peer_name != peer_name || connection.aborted) continue;
    const UniqueFd copy = CopyOf(fd, connection.inode);
    if (!copy.valid()) continue;
    // Dissolves the connection with a reset and empties its queues; shutdown() would leave megabytes to be read.
    sockaddr none = {};
    none.sa_family = AF_UNSPEC;
    connection.aborted = connect(copy.get(), &none, sizeof(none)) == 0;
    found = connection.aborted || found;
  }
  return found;
}

void ConnectionTable::EndReading() {
  for (const auto& [fd, connection] : open_) {
    const UniqueFd copy = CopyOf(fd, connection.inode);
    if (copy.valid()) shutdown(copy.get(), SHUT_RD);
  }
}

std::vector<Flood> ConnectionTable::AbortFloods(const FloodLimits& limits,
                                                const std::function<bool(const std::string&)>& has_call) {
  std::vector<Flood> over;
  for (auto& [fd, connection] : open_) {
    if (connection.peer_name.empty() || connection.aborted) continue;
    const bool called = has_call(connection.peer_name), long_called = connection.looks_with_call >= kLongCall;
    if (called && long_called) continue;
    const int64_t received = BytesReceived(fd);
    if (received < 0 || SocketInode(fd) != connection.inode) continue;
    if (called || long_called) connection.bytes_with_calls = received;
    connection.looks_with_call = called ? connection.looks_with_call + 1 : 0;
    if (called) {
      connection.slow_looks = 0;
      continue;
    }
    connection.slow_looks = AnyWaiting(fd) ? connection.slow_looks + 1 : 0;
    const int64_t bytes = received - connection.bytes_with_calls;
    const bool strict = !limits.strict_key.empty() && connection.peer_key == limits.strict_key;
    const bool slow = bytes > limits.slow_bytes && connection.slow_looks >= limits.slow_looks;
    if (bytes > (strict ? limits.strict_bytes : limits.most_bytes) || slow) {
      over.push_back({connection.peer_name, strict, bytes});
    }
  }
  for (const Flood& flood : over) Abort(flood.peer_name);
  return over;
}

int ConnectionTable::CountOf(const std::string& peer_key) const {
  const auto it = count_by_peer_.find(peer_key);
  return it == count_by_peer_.end() ? 0 : it->second;
}

void ConnectionTable::ForgetPeer(const std::string& peer_key) {
  if (peer_key.empty()) return;
  const auto it = count_by_peer_.find(peer_key);
  if (it != count_by_peer_.end() && --it->second == 0) count_by_peer_.erase(it);
}

}  // namespace shardmesh
