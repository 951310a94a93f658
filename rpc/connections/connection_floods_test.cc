// ConnectionTable::AbortFloods on real connections of this machine. Its looks are the test's calls: no time passes.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <set>
#include <string>
#include <vector>

#include "local/descriptor/fd.h"
#include "rpc/connections/connection_table.h"

namespace shardmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int kNever = 1000;  // looks

// Both ends of a TCP connection: `peer` sends, and `owned` is the table's to watch.
struct Connection {
  Connection() {
    const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in here = {};
    here.sin_family = AF_INET;
    here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(here);
    EXPECT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&here), length), 0);
    EXPECT_EQ(listen(listener.get(), 1), 0);
    EXPECT_EQ(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&here), &length), 0);
    EXPECT_EQ(connect(peer.get(), reinterpret_cast<sockaddr*>(&here), length), 0);
    length = sizeof(address);
    owned = UniqueFd(accept(listener.get(), reinterpret_cast<sockaddr*>(&address), &length));
    const timeval limit = {20, 0};
    EXPECT_EQ(setsockopt(owned.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)), 0);
  }
  std::string name() const { return PeerName(address); }

  // Sends them, and returns once they have come: all that were sent and not read wait at `owned`.
  void Send(int bytes) {
    const std::string sent(static_cast<size_t>(bytes), 'x');
    EXPECT_EQ(send(peer.get(), sent.data(), sent.size(), MSG_NOSIGNAL), bytes);
    waiting += bytes;
    std::string got(static_cast<size_t>(waiting), '\0');
    EXPECT_EQ(recv(owned.get(), got.data(), got.size(), MSG_PEEK | MSG_WAITALL), waiting);
  }
  void Read() {
    std::string got(static_cast<size_t>(waiting), '\0');
    EXPECT_EQ(recv(owned.get(), got.data(), got.size(), MSG_WAITALL), waiting);
    waiting = 0;
  }
  // The peer's end was reset.
  bool IsReset() const {
    pollfd end = {peer.get(), POLLIN, 0};
    char byte;
    return poll(&end, 1, 0) == 1 && recv(peer.get(), &byte, 1, MSG_DONTWAIT) < 0 && errno == ECONNRESET;
  }

  UniqueFd peer{socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)}, owned;
  sockaddr_storage address = {};  // of the peer
  int waiting = 0;
};

class ConnectionFloods : public ::testing::Test {
 protected:
  void Track(const Connection& connection, const std::string& key = "") {
    table_.Track(connection.owned.get(), connection.address, key);
  }
  // The names of those that are over; of `calls` a call is open.
  std::vector<std::string> Look(const std::set<std::string>& calls = {}) {
    std::vector<std::string> names;
    found_ = table_.AbortFloods(limits_, [&](const std::string& name) { return calls.count(name) > 0; });
    for (const Flood& flood : found_) names.push_back(flood.peer_name);
    return names;
  }

  FloodLimits limits_ = {/*most_bytes=*/1000, /*slow_bytes=*/1000, /*slow_looks=*/kNever, "", 0};
  ConnectionTable table_{8, 8};
  std::vector<Flood> found_;
};

TEST_F(ConnectionFloods, MoreThanTheMostWithoutACall_IsReset_AndNobodyElse) {
  Connection flood, other;
  Track(flood);
  Track(other);
  flood.Send(1000);
  other.Send(1000);
  EXPECT_THAT(Look(), IsEmpty());
  flood.Read();  // what was read counts as well
  flood.Send(1);
  ASSERT_THAT(Look(), ElementsAre(flood.name()));
  EXPECT_EQ(found_[0].bytes, 1001);
  EXPECT_FALSE(found_[0].strict);
  EXPECT_TRUE(flood.IsReset());
  EXPECT_FALSE(other.IsReset());
  EXPECT_THAT(Look(), IsEmpty()) << "it was told before";
}

TEST_F(ConnectionFloods, WithACall_ItMaySendAnything_AndIsCountedFromThere) {
  Connection busy;
  Track(busy);
  busy.Send(5000);
  EXPECT_THAT(Look({busy.name()}), IsEmpty());
  busy.Send(1000);
  EXPECT_THAT(Look(), IsEmpty());
  EXPECT_THAT(Look({"ipv4:10.0.0.1:1"}), IsEmpty());
  busy.Send(1);
  ASSERT_THAT(Look({"ipv4:10.0.0.1:1"}), ElementsAre(busy.name())) << "a call of another one";
  EXPECT_EQ(found_[0].bytes, 1001);
}

// Of such a connection nothing is asked meanwhile; what it sends after the call counts from the next look on.
TEST_F(ConnectionFloods, AfterALongCall_ItIsCountedAnew) {
  Connection held;
  Track(held);
  for (int look = 0; look < 100; ++look) {
    held.Send(500);
    held.Read();
    EXPECT_THAT(Look({held.name()}), IsEmpty());
  }
  EXPECT_THAT(Look(), IsEmpty());
  held.Send(1000);
  EXPECT_THAT(Look(), IsEmpty());
  held.Send(1);
  EXPECT_THAT(Look(), ElementsAre(held.name()));
  EXPECT_EQ(found_[0].bytes, 1001);
}

// Padded integers keep their reader busy: each time it is looked, bytes wait.
TEST_F(ConnectionFloods, MoreThanSlowBytes_ThatWaitAtEachLook_IsReset) {
  limits_.slow_bytes = 100;
  limits_.slow_looks = 3;
  Connection slow, little, read, called;
  for (Connection* const connection : {&slow, &little, &read, &called}) Track(*connection);
  for (Connection* const connection : {&slow, &read, &called}) connection->Send(101);
  little.Send(100);
  for (int look = 1; look < 3; ++look) EXPECT_THAT(Look(), IsEmpty()) << look;
  read.Read();
  ASSERT_THAT(Look({called.name()}), ElementsAre(slow.name()));
  EXPECT_EQ(found_[0].bytes, 101);
  EXPECT_TRUE(slow.IsReset());
  // Both count anew: nothing of theirs waited, or a call was open.
  for (Connection* const connection : {&read, &called}) connection->Send(101);
  for (int look = 1; look < 3; ++look) EXPECT_THAT(Look(), IsEmpty()) << look;
  EXPECT_THAT(Look(), ::testing::UnorderedElementsAre(read.name(), called.name()));
  for (int look = 0; look < 10; ++look) EXPECT_THAT(Look(), IsEmpty()) << "not more than slow_bytes";
  EXPECT_FALSE(little.IsReset());
}

TEST_F(ConnectionFloods, OfTheStrictKey_FewerBytesAreEnough) {
  limits_.strict_key = "foreign";
  limits_.strict_bytes = 10;
  Connection foreign, own, local;
  Track(foreign, "foreign");
  Track(own, "10.0");
  Track(local, "");
  for (Connection* const connection : {&foreign, &own, &local}) connection->Send(10);
  EXPECT_THAT(Look(), IsEmpty());
  for (Connection* const connection : {&foreign, &own, &local}) connection->Send(1);
  ASSERT_THAT(Look(), ElementsAre(foreign.name()));
  EXPECT_TRUE(found_[0].strict);
  limits_.strict_key = "";  // nobody's, although local peers have that key
  EXPECT_THAT(Look(), IsEmpty());
}

// gRPC closed a connection, and its number is another one's now.
TEST_F(ConnectionFloods, ANumberThatIsAnothersByNow_IsLeftAlone) {
  Connection gone, next;
  Track(gone);
  next.Send(1001);
  ASSERT_EQ(dup2(next.owned.get(), gone.owned.get()), gone.owned.get());
  EXPECT_THAT(Look(), IsEmpty());
  EXPECT_FALSE(next.IsReset());
}

TEST_F(ConnectionFloods, SocketsWithoutAName_AreNotLookedAt) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const UniqueFd owned(ends[0]), peer(ends[1]);
  sockaddr_storage address = {};
  address.ss_family = AF_UNIX;
  table_.Track(owned.get(), address, "");
  const std::string sent(1001, 'x');
  ASSERT_EQ(send(peer.get(), sent.data(), sent.size(), MSG_NOSIGNAL), static_cast<ssize_t>(sent.size()));
  EXPECT_THAT(Look(), IsEmpty());
}

}  // namespace
}  // namespace shardmesh
