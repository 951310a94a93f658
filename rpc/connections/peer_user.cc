#include "rpc/connections/peer_user.h"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/status.h"
#include "local/descriptor/fd.h"

namespace shardmesh {
namespace {

constexpr uint8_t kListenState = 10;  // TCP_LISTEN of the kernel; its header does not go with netinet's

// One end of a TCP connection: the address in network order, IPv4 in the first word.
struct End {
  std::array<uint32_t, 4> address = {};
  uint16_t port = 0;  // network order
};

struct Connection {
  int family = AF_INET;
  End here, peer;
};

bool EndOf(const sockaddr_storage& socket, int* family, End* end) {
  if (socket.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&socket);
    *family = AF_INET;
    *end = {{v4->sin_addr.s_addr, 0, 0, 0}, v4->sin_port};
    return true;
  }
  if (socket.ss_family != AF_INET6) return false;
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&socket);
  *family = AF_INET6;
  end->port = v6->sin6_port;
  std::memcpy(end->address.data(), &v6->sin6_addr, sizeof(v6->sin6_addr));
  if (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr)) {
    *family = AF_INET;
    end->address = {end->address[3], 0, 0, 0};
  }
  return true;
}

absl::Status Gone() { return absl::NotFoundError("the peer has closed its socket"); }

absl::StatusOr<Connection> ConnectionOf(int fd) {
  sockaddr_storage here = {}, peer = {};
  socklen_t here_length = sizeof(here), peer_length = sizeof(peer);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&here), &here_length) != 0) return Gone();
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_length) != 0) return Gone();
  Connection connection;
  int peer_family = 0;
  if (!EndOf(here, &connection.family, &connection.here) || !EndOf(peer, &peer_family, &connection.peer) ||
      peer_family != connection.family) {
    return absl::UnimplementedError("the connection is neither of TCP nor of a UNIX socket");
  }
  return connection;
}

// The kernel's answer about one socket; nothing when it has no sock_diag for TCP.
std::optional<absl::StatusOr<uid_t>> AskSockDiag(const Connection& connection) {
  const UniqueFd netlink(socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  if (!netlink.valid()) return std::nullopt;
  struct {
    nlmsghdr header;
    inet_diag_req_v2 request;
  } ask = {};
  ask.header.nlmsg_len = sizeof(ask);
  ask.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  ask.header.nlmsg_flags = NLM_F_REQUEST;
  ask.request.sdiag_family = static_cast<uint8_t>(connection.family);
  ask.request.sdiag_protocol = IPPROTO_TCP;
  ask.request.idiag_states = ~0u;
  inet_diag_sockid& id = ask.request.id;
  id.idiag_sport = connection.peer.port;  // the socket asked for is the peer's: its own end is the source
  id.idiag_dport = connection.here.port;
  std::memcpy(id.idiag_src, connection.peer.address.data(), sizeof(id.idiag_src));
  std::memcpy(id.idiag_dst, connection.here.address.data(), sizeof(id.idiag_dst));
  id.idiag_cookie[0] = id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;
  if (send(netlink.get(), &ask, sizeof(ask), 0) != sizeof(ask)) return std::nullopt;
  // The kernel has answered when send returns.
  alignas(nlmsghdr) char bytes[4096];
  const ssize_t got = recv(netlink.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
  const auto* header = reinterpret_cast<const nlmsghdr*>(bytes);
  if (got < static_cast<ssize_t>(sizeof(nlmsghdr))) return std::nullopt;
  if (header->nlmsg_type == NLMSG_ERROR) {
    const auto* error = reinterpret_cast<const nlmsgerr*>(bytes + NLMSG_HDRLEN);
    if (got < static_cast<ssize_t>(NLMSG_HDRLEN + sizeof(*error)) || error->error != -ENOENT) return std::nullopt;
    return Gone();
  }
  if (got < static_cast<ssize_t>(NLMSG_HDRLEN + sizeof(inet_diag_msg))) return std::nullopt;
  const auto* found = reinterpret_cast<const inet_diag_msg*>(bytes + NLMSG_HDRLEN);
  // Where the connection is not found, the kernel answers with who listens at that port. And a socket that its process
  // has closed has no inode, and user 0 in place of its own.
  if (found->idiag_state == kListenState || found->idiag_inode == 0 || found->id.idiag_sport != id.idiag_sport ||
      found->id.idiag_dport != id.idiag_dport) {
    return Gone();
  }
  return static_cast<uid_t>(found->idiag_uid);
}

std::string TableEnd(const End& end, int words, bool mapped) {
  std::string text = mapped ? absl::StrFormat("0000000000000000%08X", htonl(0xffff)) : "";
  for (int i = 0; i < words; ++i) text += absl::StrFormat("%08X", end.address[static_cast<size_t>(i)]);
  return absl::StrCat(text, ":", absl::StrFormat("%04X", ntohs(end.port)));
}

// One look at a table: the user of the socket with these ends. Unimplemented: there is no such table.
absl::StatusOr<uid_t> LookUp(const char* table, const std::string& here, const std::string& peer) {
  std::ifstream file(table);
  if (!file.is_open()) return absl::UnimplementedError(absl::StrCat("cannot read ", table));
  std::string number, local, remote, state, queues, timer, retransmits;
  uint64_t user = 0, timeout = 0, inode = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    fields >> number >> local >> remote >> state >> queues >> timer >> retransmits >> user >> timeout >> inode;
    if (!fields.fail() && local == peer && remote == here && inode != 0) return static_cast<uid_t>(user);
  }
  return Gone();
}

}  // namespace

absl::StatusOr<uid_t> PeerUserFromTables(int fd) {
  ASSIGN_OR_RETURN(const Connection connection, ConnectionOf(fd));
  const int words = connection.family == AF_INET ? 1 : 4;
  absl::Status last = Gone();
  // A client may dial an IPv4 address with an IPv6 socket; then it stands in the other table.
  for (const bool mapped : {false, true}) {
    if (mapped && words == 4) break;
    const char* table = mapped || words == 4 ? "/proc/net/tcp6" : "/proc/net/tcp";
    const std::string here = TableEnd(connection.here, words, mapped), peer = TableEnd(connection.peer, words, mapped);
    const absl::StatusOr<uid_t> user = LookUp(table, here, peer);
    if (!user.ok()) {
      last = user.status();
      continue;
    }
    // A socket that is closed while its line is written has user 0 beside its inode, once. The second look has none.
    const absl::StatusOr<uid_t> again = LookUp(table, here, peer);
    if (again.ok() && *again == *user) return user;
    return Gone();
  }
  return last;
}

absl::StatusOr<uid_t> PeerUser(int fd) {
  sockaddr_storage here = {};
  socklen_t length = sizeof(here);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&here), &length) != 0) return Gone();
  if (here.ss_family == AF_UNIX) {
    ucred peer = {};
    socklen_t peer_length = sizeof(peer);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &peer_length) != 0) return Gone();
    return peer.uid;
  }
  ASSIGN_OR_RETURN(const Connection connection, ConnectionOf(fd));
  if (const auto user = AskSockDiag(connection); user.has_value()) return *user;
  return PeerUserFromTables(fd);
}

}  // namespace shardmesh
