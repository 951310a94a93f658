// How ranks of a SecureGroup find each other among strangers, in the clear and over TLS.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
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
#include "local/testing/temp_folder.h"
#include "rpc/testing/test_authority.h"
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

// ---- Certificates. ----

// Of rank 1, at rank 0 of a group of two; rank 0 goes on, and the right one comes.
void ExpectRefused(const SecureOptions& wrong, Code code, const std::string& why) {
  const auto rendezvous = std::make_shared<MemoryRendezvous>();
  absl::StatusOr<std::unique_ptr<SecureGroup>> first, second;
  std::thread rank([&] { first = SecureGroup::Connect(rendezvous, OptionsOf(0, 2, true)); });
  EXPECT_THAT(SecureGroup::Connect(rendezvous, wrong), StatusIs(code, AllOf(HasSubstr("rank 0"), HasSubstr(why))));
  second = SecureGroup::Connect(rendezvous, OptionsOf(1, 2, true));
  rank.join();
  EXPECT_OK(first.status());
  EXPECT_OK(second.status());
}

TEST(SecureConnectTls, ACertificateOfAnotherAuthority_IsRefused) {
  SecureOptions wrong = OptionsOf(1, 2, true);
  wrong.tls = TlsFiles("stranger", "ca");
  ExpectRefused(wrong, Code::kPermissionDenied, "unknown ca, the peer's word for this side's certificate, ");
  ExpectRefused(wrong, Code::kPermissionDenied, "stranger.pem");
  wrong.tls = TlsFiles("second", "other_ca");  // it is this rank that does not accept the other's
  ExpectRefused(wrong, Code::kPermissionDenied,
                "certificate verify failed: self-signed certificate in certificate chain");
  ExpectRefused(wrong, Code::kPermissionDenied,
                "the peer's certificate, CN = first, issued by CN = ca, who is not in ");
}

// Both ranks say whose certificate it is and what is wrong with it, in time; the one that listens has nobody else to
// wait for.
TEST(SecureConnectTls, ARevokedCertificate_IsNamedByBothRanks) {
  const testing::TempFolder folder;
  testing::TestAuthority authority(folder.path(), "authority");
  SecureOptions options[2] = {OptionsOf(0, 2, false), OptionsOf(1, 2, false)};
  options[0].tls = authority.Issue("good");
  options[1].tls = authority.Issue("taken-back");
  authority.Revoke("taken-back");
  options[0].tls.ca_file = authority.FileWithList();
  for (SecureOptions& rank : options) rank.timeout = absl::Seconds(2);
  const absl::Time begin = MonotonicNow();
  const Connected groups = ConnectAll(std::make_shared<MemoryRendezvous>(), {options[0], options[1]});
  EXPECT_LT(MonotonicNow() - begin, 2 * absl::Seconds(2));
  EXPECT_THAT(groups[0], StatusIs(Code::kUnavailable, HasSubstr("certificate revoked, of the peer's certificate, CN = "
                                                                "taken-back, issued by CN = authority")));
  EXPECT_THAT(groups[1], StatusIs(Code::kPermissionDenied, AllOf(HasSubstr("certificate revoked, the peer's word for "
                                                                           "this side's certificate, "),
                                                                 HasSubstr("taken-back.pem"))));
}

// The list is of its authority alone; who is not on it comes in.
TEST(SecureConnectTls, WithAList_TheOthersConnect) {
  const testing::TempFolder folder;
  testing::TestAuthority authority(folder.path(), "authority"), other(folder.path(), "other");
  authority.Issue("taken-back");
  authority.Revoke("taken-back");
  const std::string list = authority.FileWithList();
  SecureOptions options[2] = {OptionsOf(0, 2, false), OptionsOf(1, 2, false)};
  options[0].tls = authority.Issue("good");
  options[1].tls = other.Issue("of-another");
  ASSERT_EQ(std::system(absl::StrCat("cat ", other.file(), " >>", list).c_str()), 0);
  for (SecureOptions& rank : options) rank.tls.ca_file = list;
  Connected groups = ConnectAll(std::make_shared<MemoryRendezvous>(), {options[0], options[1]});
  for (const auto& group : groups) EXPECT_OK(group.status());
}

TEST(SecureConnectTls, ARankWithoutTls_IsRefused) {
  ExpectRefused(OptionsOf(1, 2, false), Code::kFailedPrecondition, "give certificates to all ranks or to none");
}

TEST(SecureConnectTls, ARankWithTls_IsRefusedInTheClear) {
  const auto rendezvous = std::make_shared<MemoryRendezvous>();
  absl::StatusOr<std::unique_ptr<SecureGroup>> first, second;
  std::thread rank([&] { first = SecureGroup::Connect(rendezvous, OptionsOf(0, 2, false)); });
  EXPECT_THAT(SecureGroup::Connect(rendezvous, OptionsOf(1, 2, true)),
              StatusIs(Code::kPermissionDenied, AllOf(HasSubstr("rank 0"), HasSubstr("TLS"))));
  second = SecureGroup::Connect(rendezvous, OptionsOf(1, 2, false));
  rank.join();
  EXPECT_OK(first.status());
  EXPECT_OK(second.status());
}

// A program that does not look at the time of its own certificate.
TEST(SecureConnectTls, AnExpiredCertificate_IsRefused) {
  SecureOptions expired = OptionsOf(1, 2, true);
  expired.tls = TlsFiles("expired");
  EXPECT_THAT(SecureGroup::Connect(std::make_shared<MemoryRendezvous>(), expired),
              StatusIs(Code::kInvalidArgument, HasSubstr("expired")));

  const auto rendezvous = std::make_shared<MemoryRendezvous>();
  absl::StatusOr<std::unique_ptr<SecureGroup>> group;
  SecureOptions options = OptionsOf(0, 2, true);
  options.timeout = absl::Seconds(3);
  std::thread rank([&] { group = SecureGroup::Connect(rendezvous, options); });
  const auto address = rendezvous->Get("group/0", absl::Seconds(20));
  ASSERT_OK(address);
  SSL_CTX* const context = SSL_CTX_new(TLS_client_method());
  ASSERT_EQ(SSL_CTX_use_certificate_chain_file(context, expired.tls.cert_file.c_str()), 1);
  ASSERT_EQ(SSL_CTX_use_PrivateKey_file(context, expired.tls.key_file.c_str(), SSL_FILETYPE_PEM), 1);
  SSL* const ssl = SSL_new(context);
  const UniqueFd fd = ConnectTo(*address);
  SSL_set_fd(ssl, fd.get());
  EXPECT_EQ(SSL_connect(ssl), 1);
  char answer = 0;
  EXPECT_LE(SSL_read(ssl, &answer, 1), 0) << "it was let in";
  SSL_free(ssl);
  SSL_CTX_free(context);
  rank.join();
  EXPECT_THAT(group, StatusIs(Code::kUnavailable, AllOf(HasSubstr("rank 1 did not come"),
                                                        HasSubstr("certificate has expired, of the peer's "
                                                                  "certificate, CN = expired, issued"))));
}

// One that has no certificate at all.
TEST(SecureConnectTls, WithoutACertificate_NobodyIsLetIn) {
  const auto rendezvous = std::make_shared<MemoryRendezvous>();
  absl::StatusOr<std::unique_ptr<SecureGroup>> group;
  SecureOptions options = OptionsOf(0, 2, true);
  options.timeout = absl::Seconds(2);
  std::thread rank([&] { group = SecureGroup::Connect(rendezvous, options); });
  const auto address = rendezvous->Get("group/0", absl::Seconds(20));
  ASSERT_OK(address);
  SSL_CTX* const context = SSL_CTX_new(TLS_client_method());
  SSL* const ssl = SSL_new(context);
  const UniqueFd fd = ConnectTo(*address);
  SSL_set_fd(ssl, fd.get());
  (void)SSL_connect(ssl);
  char answer = 0;
  EXPECT_LE(SSL_read(ssl, &answer, 1), 0) << "it was let in";
  SSL_free(ssl);
  SSL_CTX_free(context);
  rank.join();
  EXPECT_THAT(group, StatusIs(Code::kUnavailable, HasSubstr("peer did not return a certificate")));
}

}  // namespace
}  // namespace shardmesh
