// What processes of a host have of each other ends with them, and only then: slots of a trainer that is killed while a
// child of it lives, memory of a deleted job, sockets that a cleaner removes.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/cpp/session.h"
#include "client/cpp/transport/shard_transport.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "local/descriptor/fd.h"
#include "local/memory/segment.h"
#include "local/process/host_id.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/await.h"
#include "tests/testing/system/process.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;
using ::shardmesh::testing::Await;
using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Process;
using ::shardmesh::testing::TinyJob;

constexpr absl::Duration kLong = absl::Seconds(30);

// A process that is killed with the object.
struct Child {
  explicit Child(pid_t pid) : pid(pid) {}
  Child(Child&& other) noexcept : pid(std::exchange(other.pid, 0)) {}
  ~Child() {
    if (pid > 0) kill(pid, SIGKILL);
  }
  pid_t pid;
};

TEST(LocalEnds, ATrainerKilledWhileItsChildLives_TheNextHasItsSlotAtOnce) {
  constexpr int kRounds = 20;
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 1}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(TinyJob("job", "fsdp=1", 1)));
  ASSERT_OK(testing::Initialize(*job));
  std::vector<Child> children;
  for (int round = 0; round < kRounds; ++round) {
    const char* const how = round % 2 == 0 ? "fork" : "clone";
    const std::string log = cluster->folder().File(absl::StrCat("trainer-", round));
    ASSERT_OK_AND_ASSIGN(const auto trainer,
                         Process::Start({{"tests/testing/forking_trainer", cluster->coordinator_address(), "job", how},
                                         log}));
    ASSERT_OK_AND_ASSIGN(const std::string line, testing::AwaitLine(log, *trainer, kLong));
    int child = 0;
    ASSERT_TRUE(absl::SimpleAtoi(absl::StripPrefix(line, "child "), &child)) << "round " << round << ": " << line;
    children.emplace_back(child);
    trainer->Kill9();
    ASSERT_EQ(kill(child, 0), 0);  // it lives, and has what it was forked with
  }
}

// The names of the memory of jobs that a process has.
std::vector<std::string> MemoryOf(pid_t pid) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& fd : fs::directory_iterator(absl::StrCat("/proc/", pid, "/fd"), error)) {
    const std::string name = fs::read_symlink(fd, error).string();
    if (absl::StrContains(name, "memfd:shardmesh-")) names.push_back(name);
  }
  return names;
}

TEST(LocalEnds, AGrantThatNobodyUses_KeepsNothingOfADeletedJob) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 1}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(TinyJob("job", "fsdp=1", 1)));
  ASSERT_OK(testing::Initialize(*job));
  const pid_t worker = cluster->worker("w0").pid();
  EXPECT_FALSE(MemoryOf(worker).empty());
  ASSERT_OK_AND_ASSIGN(const std::string host, HostId());
  for (const int64_t reader_ttl_ms : {0, 1000}) {
    v1::AttachRequest request;
    request.set_job("job");
    request.set_epoch(job->epoch().value());
    request.set_host_id(host);
    if (reader_ttl_ms == 0) request.add_slots(0);
    request.set_reader_ttl_ms(reader_ttl_ms);
    ASSERT_OK(job->worker(Rank(0)).Attach(request, kLong).status());
  }
  ASSERT_OK(testing::Delete(client, "job"));
  EXPECT_TRUE(Await([&] { return MemoryOf(worker).empty(); })) << ::testing::PrintToString(MemoryOf(worker));
}

TEST(LocalEnds, AFailedJobThatIsDeleted_ATrainerThatStaysKeepsNothingOfItInTheWorker) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 2, .heartbeat_timeout = absl::Seconds(2)}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(TinyJob("job", "fsdp=2", 2)));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto one, job->Attach({Slot(0)}));
  ASSERT_OK_AND_ASSIGN(const auto other, job->Attach({Slot(1)}));
  cluster->worker("w1").Kill9();
  const pid_t worker = cluster->worker("w0").pid();
  ASSERT_TRUE(Await([&] { return absl::StrContains(cluster->coordinator().Log(), "event=job_failed"); }));
  ASSERT_OK(testing::Delete(client, "job"));
  EXPECT_TRUE(Await([&] { return MemoryOf(worker).empty(); })) << ::testing::PrintToString(MemoryOf(worker));
}

bool CanMakeImmutable() {
  absl::StatusOr<Segment> segment = Segment::Create("try", 4096, 0);
  int flags = 0;
  return segment.ok() && segment->RefuseNewWriters(/*punched=*/false).ok() &&
         ioctl(segment->fd(), FS_IOC_GETFLAGS, &flags) == 0 && (flags & FS_IMMUTABLE_FL) != 0;
}

// Also not as root, which needs no permission of a mode.
TEST(LocalEnds, WhatReadersMapOfAJobWithANode_CannotBeOpenedForWriting_AndARestartedWorkerWritesIt) {
  if (!CanMakeImmutable()) GTEST_SKIP() << "this user or kernel cannot make memory immutable";
  ASSERT_OK_AND_ASSIGN(const auto cluster,
                       Cluster::Start({.workers = 1, .heartbeat_timeout = absl::Seconds(20), .retained = true}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(TinyJob("job", "fsdp=1", 1)));
  ASSERT_OK(testing::Initialize(*job));
  const auto check = [&](pid_t worker) {
    int checked = 0;
    for (const auto& fd : fs::directory_iterator(absl::StrCat("/proc/", worker, "/fd"))) {
      const std::string name = fs::read_symlink(fd).string();
      const bool read = absl::StrContains(name, "-publication-") || absl::StrContains(name, "-board") ||
                        absl::StrContains(name, "-window");
      if (!read) continue;
      ++checked;
      EXPECT_NE(chmod(fd.path().c_str(), 0600), 0) << name;
      EXPECT_LT(UniqueFd(open(fd.path().c_str(), O_RDWR | O_CLOEXEC)).get(), 0) << name;
      EXPECT_EQ(errno, EPERM) << name;
    }
    EXPECT_GE(checked, 3);
  };
  const pid_t killed = cluster->PidOf("w-0");
  check(killed);
  ASSERT_EQ(kill(killed, SIGKILL), 0);
  const pid_t next = cluster->AwaitNextIncarnation("w-0", killed, kLong);
  ASSERT_GT(next, 0);
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0)}));
  ASSERT_OK(session->AwaitWeights(kLong));
  ASSERT_OK(testing::TrainTo(*session, 5));  // each of its publications is written
  ASSERT_OK(testing::Learn(*job, 5).status());
  check(next);
}

std::vector<fs::path> SocketsIn(const std::string& folder) {
  std::vector<fs::path> sockets;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (fs::is_socket(entry.symlink_status(error))) sockets.push_back(entry.path());
  }
  return sockets;
}

TEST(LocalEnds, SocketsThatACleanerRemoves_AreThereAgain_AndAKilledWorkerGoesOn) {
  ASSERT_OK_AND_ASSIGN(const auto cluster,
                       Cluster::Start({.workers = 2, .heartbeat_timeout = absl::Seconds(20), .retained = true}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(TinyJob("job", "fsdp=2", 2)));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(auto session, job->Attach({Slot(0), Slot(1)}));
  ASSERT_OK(session->AwaitWeights(kLong));
  ASSERT_OK(testing::TrainTo(*session, 2));
  const std::string folder = cluster->folder().File("s");
  const std::vector<fs::path> sockets = SocketsIn(folder);
  ASSERT_EQ(sockets.size(), 4u);  // two workers', the node's and its relay's
  fs::remove_all(folder);
  ASSERT_OK(testing::TrainTo(*session, 4));
  ASSERT_TRUE(Await([&] { return SocketsIn(folder).size() == 4; })) << cluster->node().Log();
  EXPECT_TRUE(absl::StrContains(cluster->node().Log(), "event=socket_restored of=node"));
  const pid_t killed = cluster->PidOf("w-0");
  ASSERT_EQ(kill(killed, SIGKILL), 0);
  ASSERT_GT(cluster->AwaitNextIncarnation("w-0", killed, kLong), 0);
  ASSERT_OK(testing::TrainTo(*session, 6));
  session.reset();
  ASSERT_OK_AND_ASSIGN(session, job->Attach({Slot(0), Slot(1)}));
  ASSERT_OK(session->AwaitWeights(kLong));
  EXPECT_OK(testing::TrainTo(*session, 8));
}

// The slot's memory is the same for all who have it, one after the other. A program that keeps what it mapped can write
// there when it is another's; what is not finite is found by who steps.
TEST(LocalEnds, AMappingThatOutlivesItsSession_WritesNothingUnseen) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 2}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(TinyJob("job", "fsdp=2", 2)));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(auto first, job->Attach({Slot(0)}));
  ASSERT_OK(first->AwaitWeights(kLong));
  const std::string name = job->spec().parameters[0].name;
  ASSERT_OK_AND_ASSIGN(const TensorView view, first->gradient(Slot(0), name));
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t at = reinterpret_cast<uintptr_t>(view.data), begin = at / page * page;
  void* const retained = mremap(reinterpret_cast<void*>(begin), 0, page, MREMAP_MAYMOVE);  // a second mapping of it
  ASSERT_NE(retained, MAP_FAILED);
  first.reset();
  ASSERT_OK_AND_ASSIGN(const auto second, job->Attach({Slot(0)}));
  ASSERT_OK_AND_ASSIGN(const auto other, job->Attach({Slot(1)}));
  for (Session* session : {second.get(), other.get()}) ASSERT_OK(session->AwaitWeights(kLong));
  for (Session* session : {second.get(), other.get()}) ASSERT_OK(testing::WriteGradients(*session, Step(1)));
  StepOptions options;
  options.timeout = absl::Milliseconds(50);
  ASSERT_EQ(second->Step(options).status().code(), absl::StatusCode::kDeadlineExceeded);  // it waits for the other slot
  options.timeout = kLong;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(static_cast<char*>(retained) + (at - begin), &nan, sizeof(nan));
  const absl::Status status = other->Step(options).status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kDataLoss,
                               ::testing::AllOf(::testing::HasSubstr(name), ::testing::HasSubstr("writes them still"))));
  munmap(retained, page);
}

}  // namespace
}  // namespace shardmesh
