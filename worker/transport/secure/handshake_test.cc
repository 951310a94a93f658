// Both sides of a handshake over a pair of sockets, and what each makes of a peer that is not who it should be.
#include "worker/transport/secure/handshake.h"

#include <sys/socket.h>

#include <string>
#include <utility>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr size_t kNone = 1 << 20;

// Remembers what was written, and has the binding that a test gives it. The `alters`-th byte goes with a bit turned.
class WatchedStream final : public Stream {
 public:
  WatchedStream(UniqueFd fd, std::string binding, std::string* written, size_t alters = kNone)
      : Stream(UniqueFd(dup(fd.get()))),
        real_(NewClearStream(std::move(fd))),
        binding_(std::move(binding)),
        written_(written),
        alters_(alters) {}
  int64_t Read(char* to, int64_t bytes) override {
    const int64_t got = real_->Read(to, bytes);
    return got < 0 ? Ended(real_->end(), real_->why()) : got;
  }
  int64_t Write(const char* from, int64_t bytes) override {
    std::string sent(from, static_cast<size_t>(bytes));
    const size_t begin = written_->size();
    *written_ += sent;
    if (alters_ >= begin && alters_ < written_->size())
      sent[alters_ - begin] = static_cast<char>(sent[alters_ - begin] ^ 0x40);
    return real_->Write(sent.data(), bytes);
  }
  std::string Binding() const override { return binding_; }

 private:
  const std::unique_ptr<Stream> real_;
  const std::string binding_;
  std::string* const written_;
  const size_t alters_;
};

SecureOptions OptionsOf(int rank) {
  SecureOptions options;
  options.rank = rank;
  options.size = 3;
  options.epoch = 5;
  options.key = "group";
  options.secret = "secret";
  return options;
}

// Rank 0 listens, rank 1 dials it.
struct Pair {
  Pair() { Join(); }
  void Join() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    dialer_fd = UniqueFd(ends[0]);
    listener_fd = UniqueFd(ends[1]);
  }
  // Who dials, and who listens, as far as they come.
  std::pair<absl::Status, absl::Status> Shake() {
    DialerHandshake dials(
        dialer, peer, std::make_unique<WatchedStream>(std::move(dialer_fd), dialer_binding, &dialed, dialer_alters));
    ListenerHandshake listens(listener, std::make_unique<WatchedStream>(std::move(listener_fd), listener_binding,
                                                                        &answered, listener_alters));
    absl::StatusOr<bool> ours = false, theirs = false;
    for (int turn = 0; turn < 6; ++turn) {
      if (ours.ok() && !*ours) ours = dials.Advance();
      if (theirs.ok() && !*theirs) {
        theirs = listens.Advance();
        if (theirs.ok() && *theirs) second ? listens.RefuseSecond() : listens.Welcome();
      }
    }
    found = listens.peer();
    const auto status = [](const absl::StatusOr<bool>& done) {
      return !done.ok() ? done.status() : *done ? absl::OkStatus() : absl::DeadlineExceededError("not done");
    };
    return {status(ours), status(theirs)};
  }

  SecureOptions dialer = OptionsOf(1), listener = OptionsOf(0);
  int peer = 0, found = -1;
  bool second = false;
  std::string dialer_binding = std::string(32, 'b'), listener_binding = dialer_binding;
  std::string dialed, answered;
  size_t dialer_alters = kNone, listener_alters = kNone;
  UniqueFd dialer_fd, listener_fd;
};

TEST(Handshake, BothFindOutThatTheOtherIsWhoItShouldBe) {
  Pair pair;
  const auto [dials, listens] = pair.Shake();
  EXPECT_OK(dials);
  EXPECT_OK(listens);
  EXPECT_EQ(pair.found, 1);
  EXPECT_EQ(pair.dialed.size(), kShortBytes + kHelloBytes);
  EXPECT_EQ(pair.answered.size(), 2 * kShortBytes);
  EXPECT_EQ(pair.dialed.find("secret"), std::string::npos);
}

TEST(Handshake, AnotherSecret_IsPermissionDeniedOnBoth) {
  Pair pair;
  pair.dialer.secret = "guess";
  const auto [dials, listens] = pair.Shake();
  EXPECT_THAT(dials, StatusIs(Code::kPermissionDenied, HasSubstr("another secret")));
  EXPECT_THAT(listens, StatusIs(Code::kPermissionDenied, HasSubstr("does not know the job's secret")));
  EXPECT_EQ(pair.found, -1) << "it proved nothing";
}

// What was heard of a handshake is worth nothing in the next one.
TEST(Handshake, ReplayedHello_IsPermissionDenied) {
  Pair heard;
  EXPECT_OK(heard.Shake().second);
  Pair pair;
  ASSERT_EQ(send(pair.dialer_fd.get(), heard.dialed.data(), heard.dialed.size(), 0),
            static_cast<ssize_t>(heard.dialed.size()));
  ListenerHandshake listens(pair.listener, std::make_unique<WatchedStream>(std::move(pair.listener_fd),
                                                                           pair.listener_binding, &pair.answered));
  EXPECT_THAT(listens.Advance(), StatusIs(Code::kPermissionDenied, HasSubstr("secret")));
  EXPECT_EQ(listens.peer(), -1);
}

TEST(Handshake, ReplayedWelcome_IsPermissionDenied) {
  Pair heard;
  EXPECT_OK(heard.Shake().first);
  Pair pair;
  ASSERT_EQ(send(pair.listener_fd.get(), heard.answered.data(), heard.answered.size(), 0),
            static_cast<ssize_t>(heard.answered.size()));
  DialerHandshake dials(pair.dialer, 0,
                        std::make_unique<WatchedStream>(std::move(pair.dialer_fd), pair.dialer_binding, &pair.dialed));
  EXPECT_THAT(dials.Advance(), StatusIs(Code::kPermissionDenied, HasSubstr("somebody else listens")));
}

// Who has a certificate and sits between the two ranks has two connections with two bindings.
TEST(Handshake, ForwardedFromOneConnectionIntoAnother_IsPermissionDenied) {
  Pair pair;
  pair.listener_binding = std::string(32, 'c');
  const auto [dials, listens] = pair.Shake();
  EXPECT_EQ(dials.code(), Code::kPermissionDenied);
  EXPECT_EQ(listens.code(), Code::kPermissionDenied);
}

TEST(Handshake, OtherClaims_AreFailedPreconditionOnBoth_AndSayWhatDiffers) {
  const auto expect = [](Pair& pair, const std::string& dialer_says, const std::string& listener_says) {
    const auto [dials, listens] = pair.Shake();
    EXPECT_THAT(dials, StatusIs(Code::kFailedPrecondition, HasSubstr(dialer_says)));
    EXPECT_THAT(listens, StatusIs(Code::kFailedPrecondition, HasSubstr(listener_says)));
  };
  Pair epoch, group, size, rank, to;
  epoch.dialer.epoch = 4;
  expect(epoch, "it is in epoch 5, this rank in epoch 4", "is in epoch 4, this rank in epoch 5");
  EXPECT_EQ(epoch.found, 1) << "it has the secret: the listener may say who it was";
  group.dialer.key = "results";
  expect(group, "another group than 'results'", "another group than 'group'");
  size.dialer.size = 4;
  expect(size, "has 3 ranks, this one's 4", "a group of 4 ranks, this rank in one of 3");
  rank.dialer.rank = 0;  // a second rank 0
  expect(rank, "refuses this rank", "as rank 0; this is rank 0 of 3");
  to.peer = 2;
  expect(to, "refuses this rank", "dials rank 2 as rank 1; this is rank 0");
}

TEST(Handshake, ASecondConnection_IsAlreadyExists) {
  Pair pair;
  pair.second = true;
  const auto [dials, listens] = pair.Shake();
  EXPECT_THAT(dials, StatusIs(Code::kAlreadyExists, HasSubstr("already")));
}

TEST(Handshake, AnOlderVersion_IsToldAndNamed) {
  Pair heard;
  EXPECT_OK(heard.Shake().first);
  std::string open = heard.dialed.substr(0, kShortBytes), challenge = heard.answered.substr(0, kShortBytes);
  open[6] = challenge[6] = 0;  // version
  Pair pair;
  ASSERT_EQ(send(pair.dialer_fd.get(), open.data(), open.size(), 0), static_cast<ssize_t>(open.size()));
  ListenerHandshake listens(pair.listener, std::make_unique<WatchedStream>(std::move(pair.listener_fd),
                                                                           pair.listener_binding, &pair.answered));
  EXPECT_THAT(listens.Advance(), StatusIs(Code::kFailedPrecondition, HasSubstr("version 0")));
  EXPECT_EQ(pair.answered.size(), kShortBytes);

  // A dialer reads a refusal of any version.
  pair.Join();
  ASSERT_EQ(send(pair.listener_fd.get(), pair.answered.data(), kShortBytes, 0), static_cast<ssize_t>(kShortBytes));
  DialerHandshake refused(
      pair.dialer, 0, std::make_unique<WatchedStream>(std::move(pair.dialer_fd), pair.dialer_binding, &pair.dialed));
  EXPECT_THAT(refused.Advance(), StatusIs(Code::kFailedPrecondition, HasSubstr("version 1")));

  pair.Join();
  ASSERT_EQ(send(pair.listener_fd.get(), challenge.data(), kShortBytes, 0), static_cast<ssize_t>(kShortBytes));
  DialerHandshake dials(pair.dialer, 0,
                        std::make_unique<WatchedStream>(std::move(pair.dialer_fd), pair.dialer_binding, &pair.dialed));
  EXPECT_THAT(dials.Advance(), StatusIs(Code::kFailedPrecondition, HasSubstr("run the same build")));
}

// Every byte but the four that mean nothing.
TEST(Handshake, AlteredOnTheWay_IsNotAccepted) {
  constexpr size_t kNothing = kShortBytes + kHeadBytes + 20;
  for (size_t at = 0; at < kShortBytes + kHelloBytes; ++at) {
    if (at >= kNothing && at < kNothing + 4) continue;
    Pair pair;
    pair.dialer_alters = at;
    EXPECT_FALSE(pair.Shake().second.ok()) << at;
  }
  for (size_t at = 0; at < 2 * kShortBytes; ++at) {
    Pair pair;
    pair.listener_alters = at;
    EXPECT_FALSE(pair.Shake().first.ok()) << at;
  }
}

}  // namespace
}  // namespace shardmesh
