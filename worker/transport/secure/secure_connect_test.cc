// How ranks of a SecureGroup find each other among strangers, in the clear and over TLS.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/sync.h"
#include "worker/transport/secure/handshake.h"
#include "worker/transport/secure/socket_address.h"
#include "worker/transport/secure/testing/secure_ranks.h"
#include "worker/transport/secure/tls_stream.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;
using Connected = std::vector<absl::StatusOr<std::unique_ptr<SecureGroup>>>;

// Connects to an address as ranks write it, and sends.
UniqueFd ConnectTo(const std::string& text, const std::string& bytes = "") {
  const auto address = ParseAddress(text);
  EXPECT_OK(address);
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(fd.get(), address->get(), address->length), 0);
  EXPECT_EQ(send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  return fd;
}

// Goes on with a handshake, on a socket that does not block, until it is done or failed.
absl::Status Finish(Handshake& handshake) {
  const absl::Time until = MonotonicNow() + absl::Seconds(20);
  while (MonotonicNow() < until) {
    const absl::StatusOr<bool> done = handshake.Advance();
    if (!done.ok() || *done) return done.status();
    pollfd waited = {handshake.stream().fd(), POLLIN, 0};
    poll(&waited, 1, 100);
  }
  return absl::DeadlineExceededError("not done");
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

class SecureConnect : public ::testing::TestWithParam<bool> {
 protected:
  static bool tls() { return GetParam(); }
  static std::vector<SecureOptions> Options(int size) {
    std::vector<SecureOptions> options;
    for (int rank = 0; rank < size; ++rank) options.push_back(OptionsOf(rank, size, tls()));
    return options;
  }
  // Every rank has the numbers of all.
  static void ExpectWorks(Connected& groups) {
    std::vector<std::thread> threads;
    for (auto& group : groups) {
      ASSERT_OK(group.status());
      threads.emplace_back([&group = **group] {
        float sum = static_cast<float>(group.rank() + 1);
        EXPECT_OK(group.AllReduceSum(absl::MakeSpan(&sum, 1), absl::Seconds(20)));
        EXPECT_EQ(sum, static_cast<float>(group.size() * (group.size() + 1) / 2));
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  // A handshake as rank `rank` with who listens at `address`.
  std::unique_ptr<DialerHandshake> Dial(const SecureOptions& options, int peer, const std::string& address) {
    UniqueFd fd = ConnectTo(address);
    EXPECT_EQ(fcntl(fd.get(), F_SETFL, O_NONBLOCK), 0);
    std::unique_ptr<Stream> stream;
    if (tls()) {
      stream = (*TlsContext::Load(options.tls))->NewStream(std::move(fd), /*dials=*/true);
    } else {
      stream = NewClearStream(std::move(fd));
    }
    return std::make_unique<DialerHandshake>(options, peer, std::move(stream));
  }
};
INSTANTIATE_TEST_SUITE_P(All, SecureConnect, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Tls" : "Clear"; });

TEST_P(SecureConnect, EveryTwoRanks) {
  for (const int size : {1, 2, 5, 20}) {
    Connected groups = ConnectAll(std::make_shared<MemoryRendezvous>(), Options(size));
    ExpectWorks(groups);
    EXPECT_EQ((*groups[0])->name(), tls() ? "tls" : "tcp");
  }
}

// Before a rank of the group knows an address: connections that say nothing, nonsense, the beginning of a message of
// TLS or of ours, with and without leaving at once; more than are listened to at a time.
TEST_P(SecureConnect, StrangersTakeNobodysPlace) {
  Mutex mu;
  std::vector<UniqueFd> strangers;
  const std::string open("SMGH\1\0\1\0", 8), hello("SMGH\3\0\1\0", 8),
      client_hello("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11);
  const auto rendezvous = std::make_shared<WatchedRendezvous>([&](const std::string&, const std::string& value) {
    MutexLock lock(mu);
    for (int i = 0; i < 70; ++i) strangers.push_back(ConnectTo(value));
    for (const std::string& bytes : {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(100'000, 'x'), open, hello,
                                     open + std::string(32, 'n') + hello + std::string(88, 'p'), client_hello,
                                     client_hello + std::string(600, 'r'), std::string("S")}) {
      strangers.push_back(ConnectTo(value, bytes));
      ConnectTo(value, bytes).reset();
    }
  });
  const absl::Time begin = MonotonicNow();
  Connected groups = ConnectAll(rendezvous, Options(3));
  EXPECT_LT(MonotonicNow() - begin, absl::Seconds(5)) << "it waited until those that say nothing were dropped";
  ExpectWorks(groups);
}

// While ranks connect, until they are done.
TEST_P(SecureConnect, StrangersAllTheWhile_TakeNobodysPlace) {
  const auto rendezvous = std::make_shared<MemoryRendezvous>();
  const absl::Time begin = MonotonicNow();
  std::atomic<int> connected = 0;
  absl::StatusOr<std::unique_ptr<SecureGroup>> groups[2];
  const auto connect = [&](int rank) {
    groups[rank] = SecureGroup::Connect(rendezvous, OptionsOf(rank, 2, tls()));
    ++connected;
  };
  std::thread first([&] { connect(0); }), second;
  const absl::StatusOr<std::string> address = rendezvous->Get("group/0", absl::Seconds(20));
  ASSERT_OK(address);
  const SocketAddress to = ParseAddress(*address).value();
  std::vector<UniqueFd> strangers;
  for (int i = 0; connected < 2; ++i) {
    if (i == 100) second = std::thread([&] { connect(1); });
    strangers.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const std::string bytes(static_cast<size_t>(i % 200), static_cast<char>(i));
    if (::connect(strangers.back().get(), to.get(), to.length) != 0) strangers.clear();  // nobody listens any more
    if (!strangers.empty()) (void)send(strangers.back().get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (strangers.size() > 300) strangers.clear();
  }
  first.join();
  second.join();
  EXPECT_LT(MonotonicNow() - begin, absl::Seconds(40)) << "the ranks' own time of 30 s is over";
  EXPECT_OK(groups[0].status());
  EXPECT_OK(groups[1].status());
}

// It fails at once; the others go on waiting for the rank, which comes.
TEST_P(SecureConnect, AnotherSecret_EndsItsOwnRankAlone) {
  const auto rendezvous = std::make_shared<MemoryRendezvous>();
  absl::StatusOr<std::unique_ptr<SecureGroup>> first, second;
  std::thread rank([&] { first = SecureGroup::Connect(rendezvous, OptionsOf(0, 2, tls())); });
  SecureOptions wrong = OptionsOf(1, 2, tls());
  wrong.secret = "a guess";
  wrong.names = {10, 2};
  EXPECT_THAT(SecureGroup::Connect(rendezvous, wrong),
              StatusIs(Code::kPermissionDenied, AllOf(HasSubstr("rank 12 of group 'group' could not connect rank 10"),
                                                      HasSubstr("another secret"))));
  second = SecureGroup::Connect(rendezvous, OptionsOf(1, 2, tls()));
  rank.join();
  EXPECT_OK(first.status());
  EXPECT_OK(second.status());
}

// A rank of the job's earlier epoch, whose group has the same key.
TEST_P(SecureConnect, AnotherEpoch_EndsItsOwnRankAlone) {
  const auto rendezvous = std::make_shared<MemoryRendezvous>();
  absl::StatusOr<std::unique_ptr<SecureGroup>> first, second;
  std::thread rank([&] { first = SecureGroup::Connect(rendezvous, OptionsOf(0, 2, tls())); });
  SecureOptions stale = OptionsOf(1, 2, tls());
  stale.epoch = 4;
  EXPECT_THAT(
      SecureGroup::Connect(rendezvous, stale),
      StatusIs(Code::kFailedPrecondition, AllOf(HasSubstr("rank 0"), HasSubstr("epoch 5"), HasSubstr("epoch 4"))));
  second = SecureGroup::Connect(rendezvous, OptionsOf(1, 2, tls()));
  rank.join();
  EXPECT_OK(first.status());
  EXPECT_OK(second.status());
}

// A rank that comes twice is refused while its first connection stands, and welcome when that is gone.
TEST_P(SecureConnect, ASecondConnectionOfARank_IsRefused) {
  const auto rendezvous = std::make_shared<MemoryRendezvous>();
  absl::StatusOr<std::unique_ptr<SecureGroup>> group;
  std::thread rank([&] { group = SecureGroup::Connect(rendezvous, OptionsOf(0, 3, tls())); });
  const absl::StatusOr<std::string> address = rendezvous->Get("group/0", absl::Seconds(20));
  ASSERT_OK(address);
  const SecureOptions one = OptionsOf(1, 3, tls()), two = OptionsOf(2, 3, tls());
  auto first = Dial(one, 0, *address), second = Dial(one, 0, *address);
  EXPECT_OK(Finish(*first));
  EXPECT_THAT(Finish(*second), StatusIs(Code::kAlreadyExists, HasSubstr("already")));
  first.reset();
  absl::Status third = absl::AlreadyExistsError("not tried");
  std::unique_ptr<DialerHandshake> again;
  for (const absl::Time until = MonotonicNow() + absl::Seconds(20);
       absl::IsAlreadyExists(third) && MonotonicNow() < until;) {
    again = Dial(one, 0, *address);
    third = Finish(*again);
  }
  EXPECT_OK(third);
  auto other = Dial(two, 0, *address);
  EXPECT_OK(Finish(*other));
  rank.join();
  EXPECT_OK(group.status());
}

TEST_P(SecureConnect, ARankThatDoesNotCome_IsNamedInTime) {
  SecureOptions options = OptionsOf(0, 3, tls());
  options.names = {10, 1};
  options.timeout = absl::Milliseconds(200);
  const absl::Time begin = MonotonicNow();
  EXPECT_THAT(SecureGroup::Connect(std::make_shared<MemoryRendezvous>(), options),
              StatusIs(Code::kUnavailable, AllOf(HasSubstr("rank 11 did not come within 200ms"))));
  options.rank = 1;
  EXPECT_THAT(SecureGroup::Connect(std::make_shared<MemoryRendezvous>(), options),
              StatusIs(Code::kUnavailable, HasSubstr("could not connect rank 10")));
  EXPECT_LT(MonotonicNow() - begin, absl::Seconds(10));
}

TEST_P(SecureConnect, WrongOptionsAndAddresses) {
  const auto rendezvous = std::make_shared<MemoryRendezvous>();
  const auto refused = [&](const SecureOptions& options, const std::string& why) {
    EXPECT_THAT(SecureGroup::Connect(rendezvous, options), StatusIs(Code::kInvalidArgument, HasSubstr(why)));
  };
  refused(OptionsOf(2, 2, tls()), "rank 2 of 2 ranks");
  SecureOptions options = OptionsOf(0, 2, tls());
  options.secret.clear();
  refused(options, "has no secret");
  options = OptionsOf(0, 2, tls());
  options.host = "203.0.113.1";  // nobody's
  refused(options, "cannot listen at \"203.0.113.1\"");
  options.host = "no such host";
  refused(options, "not an address of this host");
  for (const char* const address : {"", "xxx", "127.0.0.1", "127.0.0.1 0", "127.0.0.1 65536", "localhost 80", "::1"}) {
    ASSERT_OK(rendezvous->Set("group/0", address));
    EXPECT_THAT(SecureGroup::Connect(rendezvous, OptionsOf(1, 2, tls())),
                StatusIs(Code::kUnavailable, HasSubstr("could not connect rank 0")))
        << address;
  }
}

// The listener of a rank that is gone refuses.
TEST_P(SecureConnect, ARankThatIsGone_IsNamedAtOnce) {
  std::string address;
  {
    UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    SocketAddress here = AddressesOf("127.0.0.1").value()[0];
    ASSERT_EQ(bind(listener.get(), here.get(), here.length), 0);
    ASSERT_EQ(getsockname(listener.get(), here.get(), &here.length), 0);
    address = AddressText(here);
  }
  const auto rendezvous = std::make_shared<MemoryRendezvous>();
  ASSERT_OK(rendezvous->Set("group/0", address));
  EXPECT_THAT(SecureGroup::Connect(rendezvous, OptionsOf(1, 2, tls())),
              StatusIs(Code::kUnavailable, AllOf(HasSubstr("rank 0"), HasSubstr("refused"))));
}

// Somebody has told the others at the rendezvous that the group cannot be.
TEST_P(SecureConnect, WaitsNoLongerThanTheRanksWantToMeet) {
  class Ended final : public Rendezvous {
   public:
    absl::Status Set(const std::string&, absl::string_view) override { return absl::OkStatus(); }
    absl::StatusOr<std::string> Get(const std::string&, absl::Duration) override {
      return absl::FailedPreconditionError("rank 12 has no address");
    }
  };
  EXPECT_THAT(SecureGroup::Connect(std::make_shared<Ended>(), OptionsOf(0, 2, tls())),
              StatusIs(Code::kFailedPrecondition, HasSubstr("rank 12 has no address")));
}

}  // namespace
}  // namespace shardmesh
