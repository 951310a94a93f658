// The pure parts of rpc/: addresses, statuses on the wire, log values, the stop signal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <csignal>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "rpc/base/address.h"
#include "rpc/base/main_support.h"
#include "rpc/base/status.h"
#include "rpc/calls/reflection.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;

TEST(Address, ParsesAndPrintsEveryForm) {
  for (const char* text :
       {"127.0.0.1:7000", "localhost:0", "[::1]:7000", "trainer-3.example:65535", "unix:/run/a b.sock"}) {
    ASSERT_OK_AND_ASSIGN(const Address address, ParseAddress(text));
    EXPECT_EQ(address.ToString(), text);
  }
}

TEST(Address, Malformed_InvalidArgumentSaysWhatIsRight) {
  for (const char* text :
       {"", ":", "7000", "localhost", "localhost:", "localhost:x", "localhost:65536", "localhost:-1", "localhost:+1",
        ":7000", "unix:", "unix:relative", "a b:1", "http://x:1", "a/b:1", "::1:7000", "host:1\n", "host:000001"}) {
    EXPECT_THAT(ParseAddress(text), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("write host:port"))) << text;
  }
  EXPECT_FALSE(ParseAddress(std::string("unix:/a\0b", 9)).ok());
  EXPECT_OK(ParseAddress(absl::StrCat("unix:/", std::string(106, 'x'))));
  EXPECT_THAT(ParseAddress(absl::StrCat("unix:/", std::string(107, 'x'))),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("at most 107")));
}

TEST(Address, IsLocal_OnlyWhatNeverLeavesTheMachine) {
  for (const char* text : {"127.0.0.1:1", "127.8.9.10:1", "localhost:1", "[::1]:1", "unix:/x"}) {
    EXPECT_TRUE(ParseAddress(text)->is_local()) << text;
  }
  for (const char* text :
       {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "localhost.example:1", "127.example:1", "128.0.0.1:1"}) {
    EXPECT_FALSE(ParseAddress(text)->is_local()) << text;
  }
}

TEST(Address, Advertised_IsTheHostThatOthersDialAtThePortServed) {
  EXPECT_EQ(*AdvertisedAddress("10.0.0.1:7000", ""), "10.0.0.1:7000");
  EXPECT_EQ(*AdvertisedAddress("0.0.0.0:7000", "a.example"), "a.example:7000");
  EXPECT_EQ(*AdvertisedAddress("[::]:7000", "2001:db8::1"), "[2001:db8::1]:7000");
  EXPECT_EQ(*AdvertisedAddress("unix:/x", "a.example"), "unix:/x");
  for (const char* any : {"0.0.0.0:7000", "[::]:7000"}) {
    EXPECT_THAT(AdvertisedAddress(any, ""),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--advertise HOST")));
  }
  for (const char* host : {"0.0.0.0", "::", "a:7000", "a b", "unix:/x"}) {
    EXPECT_THAT(AdvertisedAddress("0.0.0.0:7000", host),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("without a port")))
        << host;
  }
}

TEST(Status, RoundTripKeepsCodeAndMessage) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), code == 0 ? "" : "step 7 is next, not 9");
    const absl::Status back = FromGrpc(ToGrpc(status), "");
    EXPECT_EQ(back.code(), status.code());
    EXPECT_THAT(std::string(back.message()), EndsWith(std::string(status.message())));
  }
}

TEST(Status, FromGrpc_NamesThePeerOnlyWhereTheTransportMaySpeak) {
  EXPECT_EQ(FromGrpc({grpc::StatusCode::UNAVAILABLE, "connection refused"}, "10.0.0.1:7000 Shard.Pull").message(),
            "10.0.0.1:7000 Shard.Pull: connection refused");
  EXPECT_EQ(FromGrpc({grpc::StatusCode::NOT_FOUND, "no job a"}, "10.0.0.1:7000 Shard.Pull").message(), "no job a");
}

TEST(Status, LongMessage_IsCutToFitTheTrailers) {
  const std::string ascii = ToGrpc(absl::InternalError(std::string(100000, 'x'))).error_message();
  EXPECT_EQ(ascii.size(), kMaxWireMessageBytes);
  EXPECT_THAT(ascii, EndsWith("x..."));
  const std::string bytes = ToGrpc(absl::InternalError(std::string(100000, '\xff'))).error_message();
  EXPECT_LE(3 * (bytes.size() - 3) + 3, kMaxWireMessageBytes);
}

TEST(Reflection, RequestsThatAreNotUnderstood_GetAnErrorReply) {
  for (const std::string& request :
       {std::string(), std::string("\xff\xff"), std::string("\x08\x01"), std::string(100, '\x0f')}) {
    EXPECT_THAT(ReflectionReply(request, {"a.B"}), HasSubstr("not a ServerReflectionRequest"));
  }
  EXPECT_THAT(ReflectionReply("\x22\x03x.Y", {"a.B"}), HasSubstr("no descriptor of x.Y"));
  EXPECT_THAT(ReflectionReply("\x1a\x05x.pro", {}), HasSubstr("no descriptor of x.pro"));
  EXPECT_THAT(ReflectionReply(absl::StrCat("\x3a", std::string(1, '\0')), {"a.B", "c.D"}),
              AllOf(HasSubstr("a.B"), HasSubstr("c.D")));
}

TEST(Log, UnknownLevel_InvalidArgumentListsTheLevels) {
  EXPECT_THAT(SetUpLog("loud"),
              StatusIs(absl::StatusCode::kInvalidArgument, AllOf(HasSubstr("loud"), HasSubstr("trace"))));
  EXPECT_OK(SetUpLog("info"));
}

TEST(Log, Quoted_StaysOnOneLine) {
  EXPECT_EQ(Quoted("a\n\"b\"\x01"), "\"a\\n\\\"b\\\"\\x01\"");
  EXPECT_LT(Quoted(std::string(100000, 'x')).size(), 600u);
}

TEST(TuneAllocator, GlibcTakesTheSettings) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "SKIPPED: the sanitizer's allocator takes no settings: mallopt answers 0";
#endif
  EXPECT_EQ(mallopt(M_MMAP_THRESHOLD, 1 << 30), 1);
  TuneAllocator();
}

TEST(StopSignal, TimesOutThenSeesTheSignalForGood) {
  StopSignal stop;
  EXPECT_FALSE(stop.WaitFor(absl::Milliseconds(20)));
  kill(getpid(), SIGTERM);
  EXPECT_TRUE(stop.WaitFor(absl::Seconds(10)));
  EXPECT_TRUE(stop.WaitFor(absl::ZeroDuration()));
}

TEST(StopSignal, Trigger_WakesEveryWaiter) {
  StopSignal stop;
  bool woken[2] = {false, false};
  std::thread first([&] { woken[0] = stop.WaitFor(absl::Seconds(10)); });
  std::thread second([&] { woken[1] = stop.WaitFor(absl::Seconds(10)); });
  stop.Trigger();
  first.join();
  second.join();
  EXPECT_TRUE(woken[0] && woken[1]);
}

}  // namespace
}  // namespace shardmesh
