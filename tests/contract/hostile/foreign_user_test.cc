// Contract 6 for other users of the machine: at the ports of the real programs, a process of another user gets
// PERMISSION_DENIED for every method of every service, and changes nothing.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "local/descriptor/fd.h"
#include "proto/shardmesh/v1/coordinator.pb.h"
#include "proto/shardmesh/v1/shard.pb.h"
#include "rpc/testing/http2_client.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::EncodeFrame;
using ::shardmesh::testing::Frame;
using ::shardmesh::testing::RawClient;
using ::testing::HasSubstr;

constexpr uid_t kOther = 65534;

std::vector<std::string> MethodsOf(const std::string& service) {
  const auto* found = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(service);
  std::vector<std::string> methods;
  for (int i = 0; found != nullptr && i < found->method_count(); ++i) {
    methods.push_back(absl::StrCat("/", service, "/", found->method(i)->name()));
  }
  return methods;
}

// What the server answers to a call with an empty message: the trailers as they came, or "".
std::string Trailers(int port, const std::string& method) {
  RawClient client(port);
  if (!client.connected() || !client.StartHttp2()) return "";
  client.Write(absl::StrCat(EncodeFrame(testing::kHeaders, testing::kEndHeaders, 1, testing::CallHeaders(method)),
                            EncodeFrame(testing::kData, testing::kEndStream, 1, std::string(5, '\0'))));
  while (true) {
    const Frame frame = client.ReadFrame();
    if (!frame.valid()) return "";
    if (frame.type == testing::kHeaders && (frame.flags & testing::kEndStream) != 0) return frame.payload;
  }
}

// Runs `body` in a child process of user `kOther`; what it returned. Nothing: this process may not change its user.
std::string AsOtherUser(const std::function<std::string()>& body) {
  int fds[2];
  if (pipe(fds) != 0) return "";
  const pid_t pid = fork();
  if (pid == 0) {
    close(fds[0]);
    if (setgid(kOther) != 0 || setuid(kOther) != 0) _exit(1);
    const std::string text = body();
    for (size_t done = 0; done < text.size();) {
      const ssize_t wrote = write(fds[1], text.data() + done, text.size() - done);
      if (wrote <= 0) _exit(1);
      done += static_cast<size_t>(wrote);
    }
    _exit(0);
  }
  close(fds[1]);
  const UniqueFd from(fds[0]);
  std::string text;
  char buffer[4096];
  for (ssize_t got; (got = read(from.get(), buffer, sizeof(buffer))) > 0;) text.append(buffer, static_cast<size_t>(got));
  waitpid(pid, nullptr, 0);
  return text;
}

TEST(ForeignUser, IsRefusedByEveryMethodOfBothPrograms) {
  if (AsOtherUser([] { return std::string("yes"); }).empty()) GTEST_SKIP() << "SKIPPED: only root becomes another user";
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 1}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const auto job, client.CreateJob(testing::TinyJob("job", "fsdp=1", 1)));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0)}));
  ASSERT_OK(session->AwaitWeights(absl::Seconds(20)));
  std::vector<std::pair<int, std::string>> calls;
  for (const auto& [address, service] : {std::pair(cluster->coordinator_address(), "shardmesh.v1.Coordinator"),
                                         {cluster->worker_address("w0"), "shardmesh.v1.Shard"}}) {
    int port = 0;
    ASSERT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port));
    std::vector<std::string> methods = MethodsOf(service);
    ASSERT_GT(methods.size(), 8u);
    methods.insert(methods.end(), {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch",
                                   "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/no.Such/Method"});
    for (const std::string& method : methods) calls.emplace_back(port, method);
  }
  const std::string told = AsOtherUser([&] {
    std::string text;
    for (const auto& [port, method] : calls) {
      const std::string trailers = Trailers(port, method);
      const bool refused = absl::StrContains(trailers, "grpc-status\x01" "7") &&
                           absl::StrContains(trailers, "this server answers processes of user 0");
      absl::StrAppend(&text, method, refused ? " refused\n" : " NOT REFUSED\n");
    }
    return text;
  });
  EXPECT_EQ(std::vector<std::string>(absl::StrSplit(told, '\n', absl::SkipEmpty())).size(), calls.size());
  EXPECT_THAT(told, ::testing::Not(HasSubstr("NOT REFUSED"))) << told;
  // The job is there, and learns.
  EXPECT_OK(testing::TrainTo(*session, 3));
  EXPECT_OK(client.OpenJob("job"));
}

// However many connections it opens, this user's programs are served: more than the coordinator has descriptors for.
TEST(ForeignUser, ManyIdleConnections_KeepNobodyWaiting) {
  if (AsOtherUser([] { return std::string("yes"); }).empty()) GTEST_SKIP() << "SKIPPED: only root becomes another user";
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 1, .descriptor_limit = 256}));
  int port = 0;
  const std::string& address = cluster->coordinator_address();
  ASSERT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port));
  int stay[2];
  ASSERT_EQ(pipe(stay), 0);
  UniqueFd go(stay[1]);
  const pid_t pid = fork();
  if (pid == 0) {
    close(stay[1]);
    if (setuid(kOther) != 0) _exit(1);
    std::vector<std::unique_ptr<RawClient>> idle;
    for (int i = 0; i < 900; ++i) idle.push_back(std::make_unique<RawClient>(port));
    char end;
    _exit(read(stay[0], &end, 1) == 0 ? 0 : 1);
  }
  const UniqueFd held(stay[0]);
  const absl::Time until = MonotonicNow() + absl::Seconds(3);
  do {
    ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
    EXPECT_OK(client.coordinator().ListJobs({}, absl::Seconds(2)));
  } while (MonotonicNow() < until);
  go.reset();
  int status = 0;
  waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace shardmesh
