#include "rpc/connections/acceptor.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <deque>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/sync.h"
#include "local/descriptor/fd.h"

namespace shardmesh {
namespace {

sockaddr_storage V4(const char* address, int port) {
  sockaddr_storage storage = {};
  auto* v4 = reinterpret_cast<sockaddr_in*>(&storage);
  v4->sin_family = AF_INET;
  v4->sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, address, &v4->sin_addr);
  return storage;
}

sockaddr_storage V6(const char* address, int port) {
  sockaddr_storage storage = {};
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&storage);
  v6->sin6_family = AF_INET6;
  v6->sin6_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET6, address, &v6->sin6_addr);
  return storage;
}

TEST(PeerKey, RemoteAddressesCountPerHost) {
  EXPECT_EQ(PeerKey(V4("10.0.0.1", 1)), PeerKey(V4("10.0.0.1", 2)));
  EXPECT_NE(PeerKey(V4("10.0.0.1", 1)), PeerKey(V4("10.0.0.2", 1)));
  EXPECT_EQ(PeerKey(V6("::ffff:10.0.0.1", 1)), PeerKey(V4("10.0.0.1", 1)));
  EXPECT_EQ(PeerKey(V6("2001:db8::1", 1)), PeerKey(V6("2001:db8::2", 1)));  // one /64
  EXPECT_NE(PeerKey(V6("2001:db8::1", 1)), PeerKey(V6("2001:db8:0:1::1", 1)));
}

TEST(PeerKey, LocalPeersHaveNone) {
  sockaddr_storage unix_peer = {};
  unix_peer.ss_family = AF_UNIX;
  EXPECT_EQ(PeerKey(unix_peer), "");
  EXPECT_EQ(PeerKey(V4("127.0.0.1", 1)), "");
  EXPECT_EQ(PeerKey(V6("::1", 1)), "");
  EXPECT_EQ(PeerKey(V6("::ffff:127.0.0.1", 1)), "");
}

TEST(PeerName, IsGrpcsName) {
  EXPECT_EQ(PeerName(V4("10.0.0.1", 4711)), "ipv4:10.0.0.1:4711");
  EXPECT_EQ(PeerName(V6("::ffff:10.0.0.1", 4711)), "ipv4:10.0.0.1:4711");
  EXPECT_EQ(PeerName(V6("2001:db8::1", 4711)), "ipv6:[2001:db8::1]:4711");
}

TEST(ConnectionTable, ClosedAndReusedDescriptors_AreForgotten) {
  ConnectionTable table(3, 2);
  UniqueFd first(socket(AF_INET, SOCK_STREAM, 0)), second(socket(AF_INET, SOCK_STREAM, 0));
  const int first_number = first.get();
  table.Track(first.get(), V4("10.0.0.1", 1), PeerKey(V4("10.0.0.1", 1)));
  table.Track(second.get(), V4("10.0.0.1", 2), PeerKey(V4("10.0.0.1", 2)));
  EXPECT_TRUE(table.PeerFull(PeerKey(V4("10.0.0.1", 9))));
  EXPECT_FALSE(table.PeerFull(PeerKey(V4("10.0.0.2", 9))));
  EXPECT_EQ(table.Reconcile(), 0);
  first.reset();
  const UniqueFd other(socket(AF_INET, SOCK_STREAM, 0));  // gets the number of `first`
  ASSERT_EQ(other.get(), first_number);
  EXPECT_EQ(table.Reconcile(), 1);
  EXPECT_FALSE(table.PeerFull(PeerKey(V4("10.0.0.1", 9))));
  second.reset();
  EXPECT_EQ(table.Reconcile(), 1);
  EXPECT_EQ(table.size(), 0);
}

TEST(ConnectionTable, TrackingANumberAgain_ReplacesIt) {
  ConnectionTable table(1, 1);
  const UniqueFd fd(socket(AF_INET, SOCK_STREAM, 0));
  table.Track(fd.get(), V4("10.0.0.1", 1), PeerKey(V4("10.0.0.1", 1)));
  table.Track(fd.get(), V4("10.0.0.2", 1), PeerKey(V4("10.0.0.2", 1)));
  EXPECT_EQ(table.size(), 1);
  EXPECT_FALSE(table.PeerFull(PeerKey(V4("10.0.0.1", 1))));
  EXPECT_TRUE(table.PeerFull(PeerKey(V4("10.0.0.2", 1))));
}

// What the acceptor gives away, for the test to hold and close.
class Sockets {
 public:
  void Add(int fd) {
    MutexLock lock(mu_);
    open_.emplace_back(fd);
    changed_.SignalAll();
  }
  bool WaitFor(size_t count) {
    const absl::Time until = MonotonicNow() + absl::Seconds(10);
    MutexLock lock(mu_);
    while (open_.size() < count && MonotonicNow() < until) changed_.WaitFor(mu_, absl::Seconds(1));
    return open_.size() >= count;
  }
  size_t count() {
    MutexLock lock(mu_);
    return open_.size();
  }
  void CloseFirst() {
    MutexLock lock(mu_);
    open_.front().reset();
  }

 private:
  Mutex mu_;
  CondVar changed_;
  std::deque<UniqueFd> open_ ABSL_GUARDED_BY(mu_);
};

UniqueFd Connect(const char* host, int port) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM, 0));
  const sockaddr_storage address = V4(host, port);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(sockaddr_in)) != 0) fd.reset();
  return fd;
}

// Whether the other side closes or resets within `timeout_ms`.
bool Closed(const UniqueFd& fd, int timeout_ms) {
  pollfd poll_fd = {fd.get(), POLLIN, 0};
  char byte;
  return poll(&poll_fd, 1, timeout_ms) == 1 && recv(fd.get(), &byte, 1, MSG_DONTWAIT) <= 0;
}

std::unique_ptr<Listener> Listen(const std::string& host) {
  auto listener = Listener::Open(Address{"", host, 0});
  EXPECT_OK(listener);
  return *std::move(listener);
}

TEST(Acceptor, AtTheCap_TheNextWaitsUntilOneCloses) {
  Sockets sockets;
  auto listener = Listen("127.0.0.1");
  const int port = listener->address().port;
  Acceptor acceptor(std::move(listener), {2, 1, 8}, [&](int fd) { sockets.Add(fd); });
  std::vector<UniqueFd> clients;
  for (int i = 0; i < 3; ++i) clients.push_back(Connect("127.0.0.1", port));
  ASSERT_TRUE(sockets.WaitFor(2));
  EXPECT_FALSE(Closed(clients[2], 200));  // waits, is not refused; the cap per peer is not for loopback
  EXPECT_EQ(sockets.count(), 2u);
  sockets.CloseFirst();
  EXPECT_TRUE(sockets.WaitFor(3));
}

TEST(Acceptor, Stop_RefusesAndIsIdempotent) {
  auto listener = Listen("127.0.0.1");
  const int port = listener->address().port;
  Acceptor acceptor(std::move(listener), {2, 1, 8}, [](int fd) { close(fd); });
  acceptor.Stop();
  acceptor.Stop();
  EXPECT_FALSE(Connect("127.0.0.1", port).valid());
}

TEST(Acceptor, Abort_ResetsTheNamedConnectionOnly) {
  Sockets sockets;
  auto listener = Listen("127.0.0.1");
  const int port = listener->address().port;
  Acceptor acceptor(std::move(listener), {4, 4, 8}, [&](int fd) { sockets.Add(fd); });
  const UniqueFd first = Connect("127.0.0.1", port), second = Connect("127.0.0.1", port);
  ASSERT_TRUE(sockets.WaitFor(2));
  sockaddr_storage name = {};
  socklen_t length = sizeof(name);
  getsockname(first.get(), reinterpret_cast<sockaddr*>(&name), &length);
  EXPECT_TRUE(acceptor.Abort(PeerName(name)));
  EXPECT_TRUE(Closed(first, 5000));
  EXPECT_FALSE(Closed(second, 100));
  EXPECT_FALSE(acceptor.Abort(PeerName(name)));
  EXPECT_FALSE(acceptor.Abort("ipv4:10.0.0.1:1"));
}

// Of two that send as much, one has a call. Which bytes are too many: connection_floods_test.
TEST(Acceptor, BytesWithoutACall_EndTheConnection) {
  for (const bool slow : {false, true}) {
    SCOPED_TRACE(slow);
    Sockets sockets;  // reads nothing
    auto listener = Listen("127.0.0.1");
    const int port = listener->address().port;
    Mutex mu;
    std::string caller;
    AcceptorGuards guards;
    guards.most_bytes_without_call = slow ? 1 << 20 : 1000;
    guards.slow_bytes_without_call = slow ? 1000 : 1 << 20;
    guards.calls = [&] {
      MutexLock lock(mu);
      return [name = caller](const std::string& peer) { return peer == name; };
    };
    Acceptor acceptor(std::move(listener), {4, 4, 8}, [&](int fd) { sockets.Add(fd); }, guards);
    const UniqueFd calls = Connect("127.0.0.1", port), floods = Connect("127.0.0.1", port);
    ASSERT_TRUE(sockets.WaitFor(2));
    {
      sockaddr_storage name = {};
      socklen_t length = sizeof(name);
      getsockname(calls.get(), reinterpret_cast<sockaddr*>(&name), &length);
      MutexLock lock(mu);
      caller = PeerName(name);
    }
    const std::string bytes(1001, 'x');
    for (const UniqueFd* const fd : {&calls, &floods}) {
      ASSERT_EQ(send(fd->get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
    }
    EXPECT_TRUE(Closed(floods, 10'000));
    EXPECT_FALSE(Closed(calls, 0));
  }
}

// An IPv4 address of this machine that is not loopback; empty if there is none.
std::string OwnAddress() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return "";
  std::string found;
  for (const ifaddrs* it = list; it != nullptr; it = it->ifa_next) {
    if (it->ifa_addr == nullptr || it->ifa_addr->sa_family != AF_INET || (it->ifa_flags & IFF_LOOPBACK) != 0) continue;
    char text[INET_ADDRSTRLEN];
    found = inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(it->ifa_addr)->sin_addr, text, sizeof(text));
  }
  freeifaddrs(list);
  return found;
}

TEST(Acceptor, PeerOverItsCap_IsClosedAtOnceAndOthersAreServed) {
  const std::string own = OwnAddress();
  if (own.empty()) GTEST_SKIP() << "SKIPPED: this machine has no address but loopback";
  Sockets sockets;
  auto listener = Listen("0.0.0.0");
  const int port = listener->address().port;
  Acceptor acceptor(std::move(listener), {8, 1, 8}, [&](int fd) { sockets.Add(fd); });
  const UniqueFd first = Connect(own.c_str(), port);
  ASSERT_TRUE(sockets.WaitFor(1));
  const UniqueFd second = Connect(own.c_str(), port);
  EXPECT_TRUE(Closed(second, 5000));
  EXPECT_FALSE(Closed(first, 100));
  const UniqueFd local = Connect("127.0.0.1", port);
  EXPECT_TRUE(sockets.WaitFor(2));
  EXPECT_EQ(acceptor.refused(), 1);
}

}  // namespace
}  // namespace shardmesh
