#include "rpc/connections/peer_user.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/fsuid.h>
#include <sys/socket.h>
#include <unistd.h>

#include <optional>
#include <string>

#include "core/base/matchers.h"
#include "local/descriptor/fd.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

constexpr uid_t kNobody = 12345;  // where there is no answer

// Both ends of a TCP connection over loopback, each with sockets of its own family.
struct Pair {
  UniqueFd listener, client, served;
};

sockaddr_in6 V6(const char* address, uint16_t port) {
  sockaddr_in6 v6 = {};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = port;
  inet_pton(AF_INET6, address, &v6.sin6_addr);
  return v6;
}

Pair ConnectV4(bool client_is_v6, std::optional<uid_t> user = std::nullopt) {
  Pair pair;
  pair.listener = UniqueFd(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  EXPECT_EQ(bind(pair.listener.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(listen(pair.listener.get(), 1), 0);
  EXPECT_EQ(getsockname(pair.listener.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  if (user.has_value()) setfsuid(*user);  // of this thread: the kernel writes it into sockets that it makes
  pair.client = UniqueFd(socket(client_is_v6 ? AF_INET6 : AF_INET, SOCK_STREAM, 0));
  if (user.has_value()) setfsuid(geteuid());
  const sockaddr_in6 mapped = V6("::ffff:127.0.0.1", address.sin_port);
  EXPECT_EQ(client_is_v6 ? connect(pair.client.get(), reinterpret_cast<const sockaddr*>(&mapped), sizeof(mapped))
                         : connect(pair.client.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)),
            0);
  pair.served = UniqueFd(accept(pair.listener.get(), nullptr, nullptr));
  return pair;
}

TEST(PeerUser, OverIpv4_BothWaysToAsk) {
  for (const bool client_is_v6 : {false, true}) {
    const Pair pair = ConnectV4(client_is_v6);
    EXPECT_EQ(PeerUser(pair.served.get()).value_or(kNobody), geteuid()) << client_is_v6;
    EXPECT_EQ(PeerUserFromTables(pair.served.get()).value_or(kNobody), geteuid()) << client_is_v6;
  }
}

TEST(PeerUser, OverIpv6) {
  const UniqueFd listener(socket(AF_INET6, SOCK_STREAM, 0));
  sockaddr_in6 address = V6("::1", 0);
  socklen_t length = sizeof(address);
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) GTEST_SKIP() << "SKIPPED: no IPv6 here";
  ASSERT_EQ(listen(listener.get(), 1), 0);
  ASSERT_EQ(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  const UniqueFd client(socket(AF_INET6, SOCK_STREAM, 0));
  ASSERT_EQ(connect(client.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  const UniqueFd served(accept(listener.get(), nullptr, nullptr));
  EXPECT_EQ(PeerUser(served.get()).value_or(kNobody), geteuid());
  EXPECT_EQ(PeerUserFromTables(served.get()).value_or(kNobody), geteuid());
}

TEST(PeerUser, OverUnixSockets) {
  int fds[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  const UniqueFd one(fds[0]), other(fds[1]);
  EXPECT_EQ(PeerUser(one.get()).value_or(kNobody), geteuid());
}

TEST(PeerUser, OfAnotherUser) {
  constexpr uid_t kOther = 65534;
  setfsuid(kOther);
  const bool possible = setfsuid(geteuid()) == static_cast<int>(kOther);
  if (!possible) GTEST_SKIP() << "SKIPPED: only root makes sockets of another user";
  for (const bool client_is_v6 : {false, true}) {
    const Pair pair = ConnectV4(client_is_v6, kOther);
    EXPECT_EQ(PeerUser(pair.served.get()).value_or(kNobody), kOther);
    EXPECT_EQ(PeerUserFromTables(pair.served.get()).value_or(kNobody), kOther);
  }
}

// The kernel gives user 0 for a socket that its process has closed: with a request sent before, anybody would be root.
TEST(PeerUser, PeerThatHasClosedItsSocket_IsNobody) {
  Pair pair = ConnectV4(false);
  ASSERT_EQ(send(pair.client.get(), "request", 7, 0), 7);
  pair.client.reset();
  pollfd closed = {pair.served.get(), POLLRDHUP, 0};
  ASSERT_EQ(poll(&closed, 1, 10'000), 1);
  EXPECT_THAT(PeerUser(pair.served.get()), StatusIs(absl::StatusCode::kNotFound, HasSubstr("closed")));
  EXPECT_THAT(PeerUserFromTables(pair.served.get()), StatusIs(absl::StatusCode::kNotFound, HasSubstr("closed")));
}

// The kernel's table answers with who listens at the peer's port, should the peer be gone.
TEST(PeerUser, ListenerAtThePeersPort_IsNotThePeer) {
  Pair pair = ConnectV4(false);
  sockaddr_in address = {};
  socklen_t length = sizeof(address);
  ASSERT_EQ(getsockname(pair.client.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  const linger reset = {1, 0};  // no socket is left of it, not even one that waits
  ASSERT_EQ(setsockopt(pair.client.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)), 0);
  const UniqueFd served = std::move(pair.served);
  const UniqueFd listener(socket(AF_INET, SOCK_STREAM, 0));
  const int one = 1;
  ASSERT_EQ(setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)), 0);
  pair.client.reset();
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  EXPECT_THAT(PeerUser(served.get()), StatusIs(absl::StatusCode::kNotFound, HasSubstr("closed")));
}

}  // namespace
}  // namespace shardmesh
