#include "worker/transport/keyed_links.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <spdlog/sinks/ringbuffer_sink.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "core/base/sync.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

sockaddr_storage Loopback() {
  sockaddr_storage address = {};
  auto* const v4 = reinterpret_cast<sockaddr_in*>(&address);
  v4->sin_family = AF_INET;
  v4->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

LinkOptions Options(int rank, int size, int links = 1) {
  LinkOptions options;
  options.rank = rank;
  options.size = size;
  options.names = {10, 1};
  options.key = "group";
  options.address = Loopback();
  options.links = links;
  return options;
}

// Connects to an address as ranks write it, and sends.
UniqueFd ConnectTo(const std::string& text, const std::string& bytes = "") {
  const std::vector<std::string> parts = absl::StrSplit(text, ' ');
  sockaddr_storage address = Loopback();
  int port = 0;
  EXPECT_TRUE(parts.size() == 2 && absl::SimpleAtoi(parts[1], &port));
  reinterpret_cast<sockaddr_in*>(&address)->sin_port = htons(static_cast<uint16_t>(port));
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(sockaddr_in)), 0);
  EXPECT_EQ(send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  return fd;
}

// Tells what is written before anybody can read it.
class WatchedRendezvous final : public Rendezvous {
 public:
  explicit WatchedRendezvous(std::function<void(const std::string& key, const std::string& value)> before)
      : before_(std::move(before)) {}
  absl::Status Set(const std::string& key, absl::string_view value) override {
    before_(key, std::string(value));
    return real_.Set(key, value);
  }
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override {
    return real_.Get(key, timeout);
  }

 private:
  const std::function<void(const std::string&, const std::string&)> before_;
  MemoryRendezvous real_;
};

using Links = std::vector<UniqueFd>;

std::vector<absl::StatusOr<Links>> ConnectAll(Rendezvous& rendezvous, int size, int links) {
  std::vector<absl::StatusOr<Links>> all;
  for (int rank = 0; rank < size; ++rank) all.emplace_back(absl::UnknownError("not yet"));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] { all[rank] = ConnectRanks(rendezvous, Options(rank, size, links)); });
  }
  for (std::thread& thread : threads) thread.join();
  return all;
}

bool Send(int fd, int value) {
  return send(fd, &value, sizeof(value), MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(value));
}

int Receive(int fd) {
  pollfd waited = {fd, POLLIN, 0};
  int value = -1;
  if (poll(&waited, 1, 10'000) == 1) (void)recv(fd, &value, sizeof(value), MSG_WAITALL);
  return value;
}

// Every rank says over each connection which one it takes it for.
void ExpectConnected(std::vector<absl::StatusOr<Links>>& all, int links) {
  const int size = static_cast<int>(all.size());
  for (int rank = 0; rank < size; ++rank) {
    ASSERT_OK(all[rank].status());
    ASSERT_EQ(all[rank]->size(), static_cast<size_t>(size * links));
    for (int at = 0; at < size * links; ++at) {
      const bool own = at / links == rank;
      EXPECT_EQ((*all[rank])[at].valid(), !own);
      if (own) continue;
      ASSERT_TRUE(Send((*all[rank])[at].get(), rank * 100 + at % links));
    }
  }
  for (int rank = 0; rank < size; ++rank) {
    for (int at = 0; at < size * links; ++at) {
      if (at / links == rank) continue;
      EXPECT_EQ(Receive((*all[rank])[at].get()), at / links * 100 + at % links);
    }
  }
}

TEST(KeyedLinks, ConnectEveryTwoRanks) {
  for (const int size : {1, 2, 5}) {
    MemoryRendezvous rendezvous;
    auto all = ConnectAll(rendezvous, size, 2);
    ExpectConnected(all, 2);
  }
}

// Before a rank of the group knows an address: more strangers than are listened to at a time, who say nothing,
// nonsense, the beginning of a hello, or whole ones with another key, and some that go at once.
TEST(KeyedLinks, StrangersTakeNobodysPlace) {
  Mutex mu;
  std::vector<UniqueFd> strangers;
  const auto hello = [](uint32_t from, uint32_t to, uint32_t link, uint32_t size) {
    const uint32_t ranks[] = {from, to, link, size};
    return std::string(16, '\0') + std::string(reinterpret_cast<const char*>(ranks), sizeof(ranks));
  };
  WatchedRendezvous rendezvous([&](const std::string& key, const std::string& value) {
    if (key == "group/key") return;
    MutexLock lock(mu);
    for (int i = 0; i < 100; ++i) strangers.push_back(ConnectTo(value));
    const auto rank = static_cast<uint32_t>(key.back() - '0');
    for (const std::string& bytes : {std::string("GET / HTTP/1.1\r\n\r\n"), hello(0, 0, 0, 0).substr(0, 3),
                                     hello(rank + 1, rank, 0, 3), hello(2, rank, 1, 3)}) {
      strangers.push_back(ConnectTo(value, bytes));
      ConnectTo(value, bytes).reset();
    }
  });
  auto all = ConnectAll(rendezvous, 3, 2);
  ExpectConnected(all, 2);
  for (const UniqueFd& stranger : strangers) {
    char answer = 0;
    EXPECT_LE(recv(stranger.get(), &answer, 1, 0), 0) << "it was answered";
  }
}

// The lines of the log while it lives.
class WatchedLog {
 public:
  WatchedLog() : before_(spdlog::default_logger()) {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>("watched", lines_));
  }
  ~WatchedLog() { spdlog::set_default_logger(before_); }
  std::string text() const { return absl::StrJoin(lines_->last_formatted(), ""); }

 private:
  const std::shared_ptr<spdlog::logger> before_;
  const std::shared_ptr<spdlog::sinks::ringbuffer_sink_mt> lines_ =
      std::make_shared<spdlog::sinks::ringbuffer_sink_mt>(100);
};

// However many strangers come before a rank of its group does, a rank holds 64 of them: the oldest make room.
TEST(KeyedLinks, MoreStrangersThanAreHeld_TheOldestAreDropped) {
  constexpr int kStrangers = 100, kHeld = 64;
  const WatchedLog log;
  std::vector<UniqueFd> strangers;
  WatchedRendezvous rendezvous([&](const std::string& key, const std::string& value) {
    for (int i = 0; key == "group/0" && i < kStrangers; ++i) strangers.push_back(ConnectTo(value));
  });
  absl::StatusOr<Links> first = absl::UnknownError("not yet"), second = first.status();
  std::thread rank([&] { first = ConnectRanks(rendezvous, Options(0, 2)); });
  EXPECT_OK(rendezvous.Get("group/key", absl::Seconds(20)).status());
  for (int i = 0; i < kStrangers - kHeld; ++i) {
    pollfd ended = {strangers[i].get(), POLLIN, 0};
    EXPECT_EQ(poll(&ended, 1, 20'000), 1) << i;
  }
  EXPECT_THAT(log.text(), HasSubstr("because=\"others came\""));
  second = ConnectRanks(rendezvous, Options(1, 2));
  rank.join();
  EXPECT_OK(first);
  EXPECT_OK(second);
}

// However many come behind it, one has a fifth of a second to say who it is: a rank takes no more than it holds.
TEST(KeyedLinks, OneOfMany_HasTimeToSayWhoItIs) {
  std::vector<UniqueFd> strangers;
  absl::Time begin = absl::InfiniteFuture();
  WatchedRendezvous rendezvous([&](const std::string& key, const std::string& value) {
    for (int i = 0; key == "group/0" && i < 1000; ++i) strangers.push_back(ConnectTo(value));
    if (key == "group/key") begin = MonotonicNow();  // nobody was accepted yet
  });
  absl::StatusOr<Links> first = absl::UnknownError("not yet");
  LinkOptions options = Options(0, 2);
  options.timeout = absl::Seconds(2);
  std::thread rank([&] { first = ConnectRanks(rendezvous, options); });
  EXPECT_OK(rendezvous.Get("group/key", absl::Seconds(20)).status());
  pollfd ended = {strangers[0].get(), POLLIN, 0};
  EXPECT_EQ(poll(&ended, 1, 20'000), 1);
  EXPECT_GE(MonotonicNow() - begin, absl::Milliseconds(200));
  rank.join();
  EXPECT_THAT(first.status(), StatusIs(Code::kUnavailable, HasSubstr("did not come within 2s")));
}

// After five seconds, long before the rank gives up.
TEST(KeyedLinks, AStrangerThatSaysNothing_IsDropped) {
  UniqueFd stranger;
  WatchedRendezvous rendezvous([&](const std::string& key, const std::string& value) {
    if (key == "group/0") stranger = ConnectTo(value);
  });
  absl::StatusOr<Links> first = absl::UnknownError("not yet");
  std::thread rank([&] { first = ConnectRanks(rendezvous, Options(0, 2)); });
  EXPECT_OK(rendezvous.Get("group/key", absl::Seconds(20)).status());
  pollfd ended = {stranger.get(), POLLIN, 0};
  EXPECT_EQ(poll(&ended, 1, 20'000), 1);
  EXPECT_OK(ConnectRanks(rendezvous, Options(1, 2)));
  rank.join();
  EXPECT_OK(first);
}

// A listener that stands at a port.
struct Listener {
  Listener() {
    socklen_t length = sizeof(sockaddr_in);
    EXPECT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&here), length), 0);
    EXPECT_EQ(listen(fd.get(), 8), 0);
    EXPECT_EQ(getsockname(fd.get(), reinterpret_cast<sockaddr*>(&here), &length), 0);
  }
  std::string text() const {
    return absl::StrCat("127.0.0.1 ", ntohs(reinterpret_cast<const sockaddr_in*>(&here)->sin_port));
  }
  const UniqueFd fd{socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  sockaddr_storage here = Loopback();
};

// A listener with too many strangers may cut a rank's connection: at once, with a reset, or in the middle of its
// answer. The rank connects again.
TEST(KeyedLinks, AConnectionThatIsCut_IsTriedAgain) {
  const Listener listener;
  const std::string first_half(16, 'a'), second_half(16, 'b');
  MemoryRendezvous rendezvous;
  ASSERT_OK(rendezvous.Set("group/key", first_half + second_half));
  ASSERT_OK(rendezvous.Set("group/0", listener.text()));
  std::vector<std::string> hellos;
  std::thread rank([&] {
    const auto hear = [&](const UniqueFd& fd) {
      std::string hello(32, '\0');
      EXPECT_EQ(recv(fd.get(), hello.data(), hello.size(), MSG_WAITALL), 32);
      hellos.push_back(hello);
    };
    const auto next = [&] { return UniqueFd(accept(listener.fd.get(), nullptr, nullptr)); };
    next().reset();
    for (const bool heard : {false, true}) {
      const UniqueFd reset = next();
      if (heard) hear(reset);
      const linger at_once = {1, 0};
      EXPECT_EQ(setsockopt(reset.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once)), 0);
    }
    for (const size_t bytes : {size_t{0}, size_t{7}, second_half.size()}) {
      const UniqueFd fd = next();
      hear(fd);
      EXPECT_EQ(send(fd.get(), second_half.data(), bytes, MSG_NOSIGNAL), static_cast<ssize_t>(bytes));
    }
  });
  const absl::StatusOr<Links> links = ConnectRanks(rendezvous, Options(1, 2));
  if (!links.ok()) shutdown(listener.fd.get(), SHUT_RDWR);  // nobody comes any more
  rank.join();
  ASSERT_OK(links);
  EXPECT_TRUE((*links)[0].valid());
  for (const std::string& hello : hellos) {
    EXPECT_EQ(hello.substr(0, 16), first_half);
    EXPECT_EQ(hello, hellos[0]);
  }
}

// Who took the port of a rank that is gone gets no answer, and the rank is named.
TEST(KeyedLinks, WhoListensMustKnowTheKey) {
  const Listener listener;
  std::thread impostor([&] {
    UniqueFd fd(accept(listener.fd.get(), nullptr, nullptr));
    char hello[32];
    EXPECT_EQ(recv(fd.get(), hello, sizeof(hello), MSG_WAITALL), static_cast<ssize_t>(sizeof(hello)));
    EXPECT_EQ(send(fd.get(), hello, 16, MSG_NOSIGNAL), 16) << "what it has learned of the key";
    (void)recv(fd.get(), hello, 1, 0);
  });
  MemoryRendezvous rendezvous;
  ASSERT_OK(rendezvous.Set("group/key", std::string(16, 'a') + std::string(16, 'b')));
  ASSERT_OK(rendezvous.Set("group/0", listener.text()));
  EXPECT_THAT(ConnectRanks(rendezvous, Options(1, 2)).status(),
              StatusIs(Code::kUnavailable, AllOf(HasSubstr("rank 11"), HasSubstr("could not connect rank 10"),
                                                 HasSubstr("does not know the group's key"))));
  impostor.join();
}

// The listener of a rank that is gone refuses.
TEST(KeyedLinks, ARankThatIsGone_IsNamedAtOnce) {
  std::string address;
  {
    UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_storage here = Loopback();
    socklen_t length = sizeof(sockaddr_in);
    ASSERT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&here), length), 0);
    ASSERT_EQ(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&here), &length), 0);
    address = absl::StrCat("127.0.0.1 ", ntohs(reinterpret_cast<sockaddr_in*>(&here)->sin_port));
  }
  MemoryRendezvous rendezvous;
  ASSERT_OK(rendezvous.Set("group/key", std::string(32, 'k')));
  ASSERT_OK(rendezvous.Set("group/0", address));
  EXPECT_THAT(ConnectRanks(rendezvous, Options(1, 2)).status(),
              StatusIs(Code::kUnavailable, AllOf(HasSubstr("rank 10"), HasSubstr("refused"))));
}

TEST(KeyedLinks, ARankThatDoesNotCome_IsNamed) {
  MemoryRendezvous rendezvous;
  LinkOptions options = Options(0, 3);
  options.timeout = absl::Milliseconds(50);
  EXPECT_THAT(ConnectRanks(rendezvous, options).status(),
              StatusIs(Code::kUnavailable, AllOf(HasSubstr("rank 11"), HasSubstr("50ms"))));
  options.rank = 1;
  MemoryRendezvous empty;
  EXPECT_THAT(ConnectRanks(empty, options).status(), StatusIs(Code::kUnavailable, HasSubstr("rank 10")));
}

// Somebody has told the others at the rendezvous that the group cannot be.
TEST(KeyedLinks, WaitsNoLongerThanTheRanksWantToMeet) {
  class Ended final : public Rendezvous {
   public:
    absl::Status Set(const std::string&, absl::string_view) override { return absl::OkStatus(); }
    absl::StatusOr<std::string> Get(const std::string&, absl::Duration) override {
      return absl::FailedPreconditionError("rank 12 has no address");
    }
  } rendezvous;
  EXPECT_THAT(ConnectRanks(rendezvous, Options(0, 2)).status(),
              StatusIs(Code::kFailedPrecondition, HasSubstr("rank 12 has no address")));
}

TEST(KeyedLinks, KeysAreNew) {
  std::vector<std::string> keys;
  for (int i = 0; i < 2; ++i) {
    MemoryRendezvous rendezvous;
    auto all = ConnectAll(rendezvous, 2, 1);
    ASSERT_OK(all[0].status());
    keys.push_back(rendezvous.Get("group/key", absl::ZeroDuration()).value());
    EXPECT_EQ(keys.back().size(), 32u);
  }
  EXPECT_NE(keys[0], keys[1]);
}

}  // namespace
}  // namespace shardmesh
