#include "rpc/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstdlib>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/sync.h"
#include "local/descriptor/fd.h"
#include "local/testing/temp_folder.h"
#include "rpc/base/status.h"
#include "rpc/channel.h"
#include "rpc/testing/echo_service.h"
#include "rpc/testing/generic_call.h"
#include "rpc/testing/http2_client.h"

namespace shardmesh {
namespace {

using ::shardmesh::rpc::testing::Echo;
using ::shardmesh::rpc::testing::EchoRequest;
using ::shardmesh::rpc::testing::EchoResponse;
using ::shardmesh::testing::RawClient;
using ::testing::AllOf;
using ::testing::HasSubstr;

void SetDeadline(grpc::ClientContext& context) {
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(10)));
}

absl::StatusOr<std::string> CallEcho(const std::shared_ptr<grpc::Channel>& channel, const EchoRequest& request) {
  grpc::ClientContext context;
  SetDeadline(context);
  EchoResponse response;
  RETURN_IF_ERROR(FromGrpc(Echo::NewStub(channel)->Echo(&context, request, &response), "peer Echo.Echo"));
  return response.text();
}

absl::StatusOr<std::string> CallEcho(const std::string& address, const std::string& text, const TlsOptions& tls = {}) {
  ASSIGN_OR_RETURN(const auto channel, NewChannel(address, tls));
  EchoRequest request;
  request.set_text(text);
  return CallEcho(channel, request);
}

class ServerTest : public ::testing::Test {
 protected:
  std::unique_ptr<Server> StartOrDie(ServerOptions options = {}) {
    auto server = Server::Start(options, {&service_});
    EXPECT_OK(server);
    return server.ok() ? *std::move(server) : nullptr;
  }

  const testing::TempFolder folder_;
  testing::EchoService service_;
};

TEST_F(ServerTest, Start_PortZero_ChoosesOneAndServes) {
  auto server = StartOrDie();
  ASSERT_GT(server->port(), 0);
  EXPECT_EQ(server->address(), absl::StrCat("127.0.0.1:", server->port()));
  ASSERT_OK_AND_ASSIGN(const std::string text, CallEcho(server->address(), "hello"));
  EXPECT_EQ(text, "hello");
  EXPECT_EQ(CallEcho(absl::StrCat("localhost:", server->port()), "by name").value_or("failed"), "by name");
}

TEST_F(ServerTest, Start_PortInUse_AlreadyExistsNamesTheFlag) {
  auto server = StartOrDie();
  ServerOptions options;
  options.listen = server->address();
  EXPECT_THAT(Server::Start(options, {}),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       absl::StrCat("port ", server->port(),
                                    " on 127.0.0.1 is in use; choose another with --listen host:port, "
                                    "or port 0 to have one chosen")));
}

TEST_F(ServerTest, Start_SamePortAfterDrain_Works) {
  ServerOptions options;
  {
    auto first = StartOrDie();
    options.listen = first->address();
    EXPECT_OK(CallEcho(first->address(), "x"));  // leaves a connection in TIME_WAIT
  }
  auto second = StartOrDie(options);
  EXPECT_OK(CallEcho(options.listen, "again"));
}

TEST_F(ServerTest, Start_OffLoopbackWithoutTls_InvalidArgumentNamesTheFlags) {
  for (const char* listen : {"0.0.0.0:0", "[::]:0", "192.0.2.1:7000"}) {
    ServerOptions options;
    options.listen = listen;
    EXPECT_THAT(Server::Start(options, {}),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("--tls-cert"), HasSubstr("--tls-key"), HasSubstr("--tls-ca"))));
  }
  EXPECT_THAT(NewChannel("192.0.2.1:7000"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--tls-ca")));
  EXPECT_THAT(NewChannel("coordinator:7000"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--tls-ca")));
}

TEST_F(ServerTest, Start_BadOptions_InvalidArgumentNamesTheOption) {
  ServerOptions options;
  options.max_connections = 0;
  EXPECT_THAT(Server::Start(options, {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("max_connections is 0")));
  options = {};
  options.listen = "7000";
  EXPECT_THAT(Server::Start(options, {}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("host:port")));
}

TEST_F(ServerTest, Start_UnixSocket_ServesAndRemovesTheFile) {
  ServerOptions options;
  const std::string path = folder_.File("s");
  options.listen = "unix:" + path;
  auto server = StartOrDie(options);
  struct stat file;
  ASSERT_EQ(stat(path.c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0600u);
  EXPECT_EQ(CallEcho(options.listen, "local").value_or("failed"), "local");
  EXPECT_THAT(Server::Start(options, {}), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr(path)));
  server.reset();
  EXPECT_NE(stat(path.c_str(), &file), 0);
}

TEST_F(ServerTest, Start_StaleUnixSocket_IsReplaced) {
  const std::string path = folder_.File("s");
  {
    const UniqueFd dead(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    ASSERT_EQ(bind(dead.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  }
  ServerOptions options;
  options.listen = "unix:" + path;
  auto server = StartOrDie(options);
  EXPECT_OK(CallEcho(options.listen, "x"));
}

TEST_F(ServerTest, Start_FileThatIsNoSocket_IsKept) {
  const std::string path = folder_.File("s");
  std::fclose(std::fopen(path.c_str(), "w"));
  ServerOptions options;
  options.listen = "unix:" + path;
  EXPECT_THAT(Server::Start(options, {}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no socket")));
  struct stat file;
  EXPECT_EQ(stat(path.c_str(), &file), 0);
}

TEST_F(ServerTest, Call_WithoutDeadline_InvalidArgument) {
  auto server = StartOrDie();
  ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(server->address()));
  const auto stub = Echo::NewStub(channel);
  EchoResponse response;
  grpc::ClientContext unary;
  EXPECT_THAT(FromGrpc(stub->Echo(&unary, EchoRequest(), &response), "x"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no deadline set")));
  grpc::ClientContext stream;
  auto writer = stub->Collect(&stream, &response);
  writer->WritesDone();
  EXPECT_THAT(FromGrpc(writer->Finish(), "x"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no deadline set on Echo.Collect; set one")));
}

TEST_F(ServerTest, Call_HandlerThrows_InternalAndTheServerGoesOn) {
  auto server = StartOrDie();
  ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(server->address()));
  EchoRequest request;
  request.set_throw_text("map::at");
  EXPECT_THAT(CallEcho(channel, request), StatusIs(absl::StatusCode::kInternal, HasSubstr("map::at")));
  EXPECT_OK(CallEcho(server->address(), "still here"));
}

TEST_F(ServerTest, Stream_Collect_JoinsAll) {
  auto server = StartOrDie();
  ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(server->address()));
  grpc::ClientContext context;
  SetDeadline(context);
  EchoResponse response;
  auto writer = Echo::NewStub(channel)->Collect(&context, &response);
  for (const char* text : {"a", "b", "c"}) {
    EchoRequest request;
    request.set_text(text);
    ASSERT_TRUE(writer->Write(request));
  }
  writer->WritesDone();
  ASSERT_OK(FromGrpc(writer->Finish(), "x"));
  EXPECT_EQ(response.text(), "abc");
}

TEST_F(ServerTest, Health_FollowsSetServing) {
  auto server = StartOrDie();
  ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(server->address()));
  const char* method = "/grpc.health.v1.Health/Check";
  EXPECT_EQ(testing::GenericCall(channel, method, "").value_or("failed"), "\x08\x01");  // status: SERVING
  server->SetServing(false);
  EXPECT_EQ(testing::GenericCall(channel, method, "").value_or("failed"), "\x08\x02");  // status: NOT_SERVING
  server->SetServing(true);
  EXPECT_EQ(testing::GenericCall(channel, method, "").value_or("failed"), "\x08\x01");
}

TEST_F(ServerTest, Reflection_ListsTheService) {
  auto server = StartOrDie();
  ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(server->address()));
  const std::string list_services("\x3a\x00", 2);
  ASSERT_OK_AND_ASSIGN(
      const std::string reply,
      testing::GenericCall(channel, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", list_services));
  EXPECT_THAT(reply, AllOf(HasSubstr("shardmesh.rpc.testing.Echo"), HasSubstr("grpc.health.v1.Health")));
}

TEST_F(ServerTest, Reflection_GivesTheFileOfASymbol) {
  auto server = StartOrDie();
  ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(server->address()));
  const std::string symbol = "shardmesh.rpc.testing.Echo";
  ASSERT_OK_AND_ASSIGN(
      const std::string reply,
      testing::GenericCall(channel, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                           absl::StrCat("\x22", std::string(1, static_cast<char>(symbol.size())), symbol)));
  EXPECT_THAT(reply, AllOf(HasSubstr("echo.proto"), HasSubstr("throw_text")));
}

TEST_F(ServerTest, Call_UnknownMethod_UnimplementedNamesIt) {
  auto server = StartOrDie();
  ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(server->address()));
  EXPECT_THAT(testing::GenericCall(channel, "/no.such.Service/Method", ""),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("no method /no.such.Service/Method")));
}

TEST_F(ServerTest, BodyThatIsNoMessage_InvalidArgumentNamesTheMessage) {
  auto server = StartOrDie();
  ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(server->address()));
  EXPECT_THAT(testing::GenericCall(channel, "/shardmesh.rpc.testing.Echo/Echo", "\xff\xff\xff"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("the body of the call shardmesh.rpc.testing.Echo.Echo is no EchoRequest")));
}

// Each method of each service, those that gRPC or this library adds among them.
TEST_F(ServerTest, ProcessOfAnotherUser_GetsPermissionDeniedForEveryMethod) {
  for (const std::string& listen : {std::string("127.0.0.1:0"), "unix:" + folder_.File("s")}) {
    ServerOptions options;
    options.listen = listen;
    options.users = {geteuid() + 1};
    auto server = StartOrDie(options);
    ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(server->address()));
    for (const char* method :
         {"/shardmesh.rpc.testing.Echo/Echo", "/shardmesh.rpc.testing.Echo/Collect", "/grpc.health.v1.Health/Check",
          "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/no.such.Service/Method"}) {
      EXPECT_THAT(testing::GenericCall(channel, method, ""),
                  StatusIs(absl::StatusCode::kPermissionDenied,
                           HasSubstr(absl::StrCat("processes of user ", geteuid() + 1, " alone"))))
          << method << " at " << listen;
    }
  }
}

// However many connections they open, and however long they keep them.
TEST_F(ServerTest, ProcessesOfOtherUsers_TakeNoRoomFromTheServersOwn) {
  ServerOptions options;
  options.users = {geteuid() + 1};
  options.max_connections = kMaxForeignConnections + 2;
  auto server = StartOrDie(options);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(server->port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::vector<UniqueFd> foreign;
  for (int i = 0; i < 100; ++i) {
    foreign.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(foreign.back().get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  }
  // All but a few are closed at once; the others when the handshake's time is up.
  const absl::Time until = MonotonicNow() + absl::Seconds(20);
  for (const UniqueFd& fd : foreign) {
    pollfd closed = {fd.get(), POLLRDHUP, 0};
    EXPECT_EQ(poll(&closed, 1, static_cast<int>(absl::ToInt64Milliseconds(until - MonotonicNow()))), 1);
  }
}

// An honest client with more calls than streams is never taken for a hostile one (call_guard.h).
TEST_F(ServerTest, ManyCallsAtOnceOnOneConnection_AllAreServed) {
  ServerOptions options;
  options.max_concurrent_streams = 8;
  auto server = StartOrDie(options);
  ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(server->address()));
  const auto stub = Echo::NewStub(channel);
  constexpr int kCalls = 5000;
  struct Call {
    grpc::ClientContext context;
    EchoRequest request;
    EchoResponse response;
  };
  std::vector<Call> calls(kCalls);
  Mutex mu;
  CondVar done;
  int num_done = 0, num_failed = 0;
  for (Call& call : calls) {
    call.context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(30)));
    stub->async()->Echo(&call.context, &call.request, &call.response, [&](const grpc::Status& status) {
      MutexLock lock(mu);
      num_failed += !status.ok();
      if (++num_done == kCalls) done.SignalAll();
    });
  }
  const absl::Time until = MonotonicNow() + absl::Seconds(40);
  MutexLock lock(mu);
  while (num_done < kCalls && MonotonicNow() < until) done.WaitFor(mu, absl::Seconds(1));
  EXPECT_EQ(num_done, kCalls);
  EXPECT_EQ(num_failed, 0);
}

TEST_F(ServerTest, Drain_InFlightCallGetsItsTime) {
  auto server = StartOrDie();
  ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(server->address()));
  absl::StatusOr<std::string> held;
  std::thread caller([&] {
    EchoRequest request;
    request.set_hold(true);
    request.set_text("finished");
    held = CallEcho(channel, request);
  });
  ASSERT_TRUE(service_.WaitForHeld(1));
  std::thread drainer([&] { server->Drain(absl::Seconds(30)); });
  // The call goes on while new connections are refused; then it ends, and so does the drain, long before its grace.
  const absl::Time start = MonotonicNow();
  absl::StatusOr<std::string> late;
  do {
    late = CallEcho(server->address(), "late");
    // One that reaches the server as the drain begins is cancelled.
  } while ((late.ok() || absl::IsCancelled(late.status())) && MonotonicNow() < start + absl::Seconds(10));
  EXPECT_THAT(late, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("Echo.Echo")));
  service_.Release();
  caller.join();
  drainer.join();
  EXPECT_EQ(held.value_or(std::string(held.status().message())), "finished");
  EXPECT_LT(MonotonicNow() - start, absl::Seconds(20));
  server->Drain(absl::Seconds(30));  // idempotent
}

TEST_F(ServerTest, Drain_CallBeyondTheGrace_IsCancelled) {
  auto server = StartOrDie();
  ASSERT_OK_AND_ASSIGN(const auto channel, NewChannel(server->address()));
  absl::StatusOr<std::string> held;
  std::thread caller([&] {
    EchoRequest request;
    request.set_hold(true);
    held = CallEcho(channel, request);
  });
  ASSERT_TRUE(service_.WaitForHeld(1));
  const absl::Time start = MonotonicNow();
  server->Drain(absl::Milliseconds(50));
  EXPECT_LT(MonotonicNow() - start, absl::Seconds(5));
  caller.join();
  EXPECT_FALSE(held.ok());
}

TEST_F(ServerTest, Drain_ClientThatDoesNotLookAtItsConnection_IsNotWaitedFor) {
  auto server = StartOrDie();
  RawClient client(server->port());
  ASSERT_TRUE(client.StartHttp2());
  while (client.ReadFrame().type != testing::FrameType::kSettings) ASSERT_FALSE(client.closed());
  const absl::Time start = MonotonicNow();
  server->Drain(absl::Seconds(60));
  EXPECT_LT(MonotonicNow() - start, absl::Seconds(10));  // gRPC waits 20 s for an answer to its ping
}

TEST_F(ServerTest, MaxConnections_NextWaitsAndIsServedWhenOneCloses) {
  ServerOptions options;
  options.max_connections = 1;
  auto server = StartOrDie(options);
  EchoRequest request;
  auto first = NewChannel(server->address());
  ASSERT_OK(first);
  ASSERT_OK(CallEcho(*first, request));
  ASSERT_OK_AND_ASSIGN(const auto second, NewChannel(server->address()));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Milliseconds(300)));
  EchoResponse response;
  EXPECT_THAT(FromGrpc(Echo::NewStub(second)->Echo(&context, request, &response), "x"),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("x: ")));
  first->reset();
  EXPECT_OK(CallEcho(second, request));
}

}  // namespace
}  // namespace shardmesh
