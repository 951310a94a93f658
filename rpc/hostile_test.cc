// What a hostile, broken or stopped peer can do to a server made by rpc/server.h, seen from another process.
#include "rpc/testing/hostile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>
#include <iostream>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "rpc/base/status.h"
#include "rpc/channel.h"
#include "rpc/testing/child_server.h"
#include "rpc/testing/echo.grpc.pb.h"
#include "rpc/testing/http2_client.h"

namespace shardmesh {
namespace {

using ::shardmesh::rpc::testing::Echo;
using ::shardmesh::rpc::testing::EchoRequest;
using ::shardmesh::rpc::testing::EchoResponse;
using ::shardmesh::testing::ChildServer;
using ::shardmesh::testing::EncodeFrame;
using ::shardmesh::testing::RawClient;
using ::testing::HasSubstr;

constexpr int64_t kMiB = 1 << 20;

absl::Status CallEcho(const std::shared_ptr<grpc::Channel>& channel, absl::Duration timeout,
                      grpc::ClientContext& context) {
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  EchoRequest request;
  request.set_text("x");
  EchoResponse response;
  return FromGrpc(Echo::NewStub(channel)->Echo(&context, request, &response), "server Echo.Echo");
}

absl::Status CallEcho(const std::string& address, absl::Duration timeout = absl::Seconds(10)) {
  ASSIGN_OR_RETURN(const auto channel, NewChannel(address));
  grpc::ClientContext context;
  return CallEcho(channel, timeout, context);
}

class HostileTest : public ::testing::Test {
 protected:
  void StartChild(int descriptor_limit = 0) {
    auto child = ChildServer::Start("127.0.0.1:0", descriptor_limit);
    ASSERT_OK(child);
    child_ = *std::move(child);
    ASSERT_OK(CallEcho(child_->address()));
    rss_at_start_ = child_->rss_bytes();
  }
  void TearDown() override {
    ASSERT_TRUE(child_->alive());
    EXPECT_OK(CallEcho(child_->address()));
    const double peak = static_cast<double>(child_->peak_rss_bytes()) / kMiB;
    std::cout << "server resident: " << static_cast<double>(rss_at_start_) / kMiB << " MiB at start, peak " << peak
              << " MiB\n";
  }
  int64_t growth() const { return child_->peak_rss_bytes() - rss_at_start_; }

  std::unique_ptr<ChildServer> child_;
  int64_t rss_at_start_ = 0;
};

TEST_F(HostileTest, ManyIdleConnectionsAndFewDescriptors_ServesAgainAtOnce) {
  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  ASSERT_GE(limit.rlim_cur, 800u);
  StartChild(256);
  const absl::Time start = MonotonicNow();
  for (int round = 0; round < 2; ++round) {
    std::vector<std::unique_ptr<RawClient>> idle;
    for (int i = 0; i < 600; ++i) {
      idle.push_back(std::make_unique<RawClient>(child_->port()));
      ASSERT_TRUE(idle.back()->connected()) << i;
    }
    EXPECT_THAT(CallEcho(child_->address(), absl::Milliseconds(500)),
                StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("server")));
    EXPECT_LE(child_->open_descriptors(), 256 - 64);  // the reserve is untouched
    idle.clear();
    const absl::Time closed = MonotonicNow();
    EXPECT_OK(CallEcho(child_->address(), absl::Seconds(5)));
    std::cout << "served " << MonotonicNow() - closed << " after 600 connections closed\n";
    ASSERT_LT(MonotonicNow() - start, absl::Seconds(9)) << "too slow: the handshake deadline did the server's work";
  }
}

TEST_F(HostileTest, IdleConnectionThatNeverSpeaks_IsClosedByTheHandshakeDeadline) {
  StartChild();
  RawClient silent(child_->port());
  EXPECT_TRUE(silent.WaitForClose(absl::Seconds(20)));
}

// Opens and resets 50,000 calls of `path`, on new connections when the server ends one.
void OpenAndResetStreams(const ChildServer& server, const std::string& path) {
  constexpr int kStreams = 50000, kPerWrite = 500;
  const std::string headers = testing::CallHeaders(path);
  const std::string cancel = testing::BigEndian32(8);
  int opened = 0, connections = 0;
  const absl::Time until = MonotonicNow() + absl::Seconds(60);
  while (opened < kStreams && MonotonicNow() < until) {
    RawClient client(server.port());
    if (!client.connected() || !client.StartHttp2()) continue;
    ++connections;
    bool writable = true;
    for (uint32_t stream = 1; writable && opened < kStreams; opened += kPerWrite) {
      std::string burst;
      for (int i = 0; i < kPerWrite; ++i, stream += 2) {
        absl::StrAppend(&burst, EncodeFrame(testing::kHeaders, testing::kEndHeaders, stream, headers),
                        EncodeFrame(testing::kRstStream, 0, stream, cancel));
      }
      writable = client.Write(burst);
    }
    EXPECT_OK(CallEcho(server.address())) << "while a peer resets streams";
  }
  EXPECT_GE(opened, kStreams);
  std::cout << opened << " streams on " << connections << " connections\n";
}

TEST_F(HostileTest, FiftyThousandCallsOpenedAndReset_MemoryStaysBounded) {
  StartChild();
  OpenAndResetStreams(*child_, "/shardmesh.rpc.testing.Echo/Echo");
  EXPECT_LT(growth(), 100 * kMiB);
}

TEST_F(HostileTest, FiftyThousandStreamCallsOpenedAndReset_MemoryStaysBounded) {
  StartChild();
  OpenAndResetStreams(*child_, "/shardmesh.rpc.testing.Echo/Collect");
  EXPECT_LT(growth(), 100 * kMiB);
}

TEST_F(HostileTest, FiftyThousandUnknownMethodsOpenedAndReset_MemoryStaysBounded) {
  StartChild();
  OpenAndResetStreams(*child_, "/no.such.Service/Method");
  EXPECT_LT(growth(), 100 * kMiB);
}

TEST_F(HostileTest, FiftyThousandHealthChecksOpenedAndReset_MemoryStaysBounded) {
  StartChild();
  OpenAndResetStreams(*child_, "/grpc.health.v1.Health/Watch");
  EXPECT_LT(growth(), 100 * kMiB);
}

TEST_F(HostileTest, FiftyThousandReflectionsOpenedAndReset_MemoryStaysBounded) {
  StartChild();
  OpenAndResetStreams(*child_, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo");
  EXPECT_LT(growth(), 100 * kMiB);
}

// gRPC 1.51 gathers a message before it looks at its length; the memory quota of this server, 64 MiB, ends that.
TEST_F(HostileTest, MessageOfOneGibibyteAnnounced_RefusedInBoundedMemory) {
  StartChild();
  const testing::LongMessage message = testing::SendLongMessage(child_->port(), "/shardmesh.rpc.testing.Echo/Echo");
  std::cout << "ended by the server after " << message.bytes_sent / kMiB << " MiB\n";
  EXPECT_TRUE(message.ended_by_server);
  EXPECT_LT(growth(), 100 * kMiB);
}

TEST_F(HostileTest, MessageOverTheLimit_ResourceExhausted) {
  StartChild();
  ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(child_->address()));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(10)));
  EchoRequest request;
  request.set_text(std::string(2 << 20, 'x'));
  EchoResponse response;
  EXPECT_THAT(FromGrpc(Echo::NewStub(channel)->Echo(&context, request, &response), "x"),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("1048576")));
}

TEST_F(HostileTest, CompressedMessage_IsRefusedAndNotExpanded) {
  StartChild();
  ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(child_->address()));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(10)));
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  EchoRequest request;
  request.set_text(std::string(256 << 20, 'x'));  // 256 KiB on the wire
  EchoResponse response;
  EXPECT_THAT(FromGrpc(Echo::NewStub(channel)->Echo(&context, request, &response), "x"),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("gzip")));
  EXPECT_LT(growth(), 20 * kMiB);
}

TEST_F(HostileTest, MetadataOverTheLimit_ResourceExhausted) {
  StartChild();
  ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(child_->address()));
  grpc::ClientContext context;
  context.AddMetadata("x-large", std::string(64 << 10, 'x'));
  EXPECT_THAT(CallEcho(channel, absl::Seconds(10), context),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("metadata")));
}

TEST_F(HostileTest, FourHundredReflectionStreams_TakeNoThreadEach) {
  StartChild();
  const int before = child_->threads();
  const auto open = testing::OpenReflections(child_->port(), 400);
  ASSERT_FALSE(open.empty());
  EXPECT_LT(child_->threads(), before + 20);
}

// A flood is ended before it has cost much, and others are served meanwhile.
class HostileFlood : public HostileTest, public ::testing::WithParamInterface<testing::Flood> {};

TEST_P(HostileFlood, IsEndedByTheServer) {
  StartChild();
  constexpr int64_t kMost = 64 * kMiB;
  std::thread flood([&] {
    const testing::SentFlood flooded = testing::SendFlood(child_->port(), GetParam(), kMost);
    std::cout << "ended after " << flooded.bytes_sent / 1024 << " KiB\n";
    EXPECT_TRUE(flooded.ended_by_server);
  });
  EXPECT_OK(CallEcho(child_->address()));
  flood.join();
  EXPECT_OK(CallEcho(child_->address()));
  EXPECT_LT(growth(), 100 * kMiB);
}

// The same from a connection that has made a call before.
TEST_F(HostileTest, HeaderWithoutEnd_AfterACall_IsEndedByTheServer) {
  StartChild();
  RawClient client(child_->port());
  ASSERT_TRUE(client.StartHttp2());
  const std::string empty_message(5, '\0');
  client.Write(absl::StrCat(
      EncodeFrame(testing::kHeaders, testing::kEndHeaders, 1, testing::CallHeaders("/shardmesh.rpc.testing.Echo/Echo")),
      EncodeFrame(testing::kData, testing::kEndStream, 1, empty_message)));
  testing::Frame frame = client.ReadFrame();
  while (frame.valid() && !(frame.type == testing::kHeaders && (frame.flags & testing::kEndStream) != 0)) {
    frame = client.ReadFrame();
  }
  ASSERT_TRUE(frame.valid()) << "the call did not end";
  client.Write(EncodeFrame(testing::kHeaders, 0, 3,
                           absl::StrCat(absl::string_view("\x10", 1), testing::EncodeInteger(0, 7, 1), "x",
                                        testing::EncodeInteger(0, 7, 1u << 30))));
  const std::string part = EncodeFrame(testing::kContinuation, 0, 3, std::string(16384, 'x'));
  int64_t sent = 0;
  while (sent < 64 * kMiB && client.Write(part)) sent += 16384;
  EXPECT_LT(sent, 64 * kMiB);
}

INSTANTIATE_TEST_SUITE_P(, HostileFlood,
                         ::testing::Values(testing::Flood::kHeaderWithoutEnd, testing::Flood::kIntegerWithoutEnd,
                                           testing::Flood::kPings));

TEST_F(HostileTest, GarbageOnThePort_ServerGoesOn) {
  StartChild();
  const uint32_t seed = std::random_device()();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  for (int i = 0; i < 100; ++i) {
    RawClient client(child_->port());
    ASSERT_TRUE(client.connected());
    if (i % 2 == 0) client.StartHttp2();
    std::string garbage(1 + random() % 4096, '\0');
    for (char& c : garbage) c = static_cast<char>(random());
    client.Write(garbage);
  }
  // Frames of every type, rightly framed around random contents.
  for (int i = 0; i < 100; ++i) {
    RawClient client(child_->port());
    client.StartHttp2();
    for (int k = 0; k < 20; ++k) {
      std::string payload(random() % 64, '\0');
      for (char& c : payload) c = static_cast<char>(random());
      if (!client.Write(EncodeFrame(random() % 11, random() % 256, random() % 4, payload))) break;
    }
  }
}

TEST_F(HostileTest, StoppedServer_BreaksTheChannelWithinThePeerTimeout) {
  StartChild();
  ChannelOptions options;
  options.peer_timeout = absl::Seconds(2);
  ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(child_->address(), {}, options));
  grpc::ClientContext first;
  ASSERT_OK(CallEcho(channel, absl::Seconds(10), first));
  kill(child_->pid(), SIGSTOP);
  siginfo_t info = {};  // all of its threads stand still a little later
  for (const absl::Time until = MonotonicNow() + absl::Seconds(10); info.si_pid == 0 && MonotonicNow() < until;) {
    ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child_->pid()), &info, WSTOPPED | WNOHANG), 0);
  }
  const absl::Time stopped = MonotonicNow();
  grpc::ClientContext second;
  EXPECT_THAT(CallEcho(channel, absl::Seconds(60), second),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("server Echo.Echo")));
  EXPECT_LT(MonotonicNow() - stopped, absl::Seconds(4));
  kill(child_->pid(), SIGCONT);
}

TEST_F(HostileTest, QuietChannelWithFrequentPings_StaysOpen) {
  StartChild();
  ChannelOptions options;
  options.peer_timeout = absl::Seconds(1);
  ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(child_->address(), {}, options));
  grpc::ClientContext first;
  ASSERT_OK(CallEcho(channel, absl::Seconds(10), first));
  // Twelve seconds of pings without a call: a server that counted them as too many would have closed the connection.
  EXPECT_FALSE(channel->WaitForStateChange(GRPC_CHANNEL_READY, absl::ToChronoTime(absl::Now() + absl::Seconds(12))));
}

TEST_F(HostileTest, Terminate_EndsWithStatusZero) {
  StartChild();
  EXPECT_EQ(child_->Terminate(), 0);
  StartChild();  // TearDown wants one
}

}  // namespace
}  // namespace shardmesh
