// Contract 6 at the ports of the real processes: floods of connections, calls and bytes. Each process serves again at
// once when they end, in bounded memory, and the job goes on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <iostream>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "rpc/testing/hostile.h"
#include "rpc/testing/http2_client.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::RawClient;

constexpr int64_t kMiB = 1 << 20;

enum class Victim { kCoordinator, kWorker };

class HostilePeer : public ::testing::TestWithParam<Victim> {
 protected:
  void Start(int descriptor_limit) {
    ASSERT_OK_AND_ASSIGN(
        cluster_,
        Cluster::Start({.workers = 1, .heartbeat_timeout = absl::Seconds(20), .descriptor_limit = descriptor_limit}));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    ASSERT_OK_AND_ASSIGN(job_, client.CreateJob(testing::TinyJob("job", "fsdp=1", 1)));
    ASSERT_OK(testing::Initialize(*job_));
    ASSERT_OK_AND_ASSIGN(session_, job_->Attach({Slot(0)}));
    ASSERT_OK(session_->AwaitWeights(absl::Seconds(20)));
    ASSERT_OK(testing::TrainTo(*session_, 2));
    ASSERT_OK(Call(absl::Seconds(10)));
    const std::string& address = worker() ? cluster_->worker_address("w0") : cluster_->coordinator_address();
    ASSERT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port_));
    rss_at_start_ = process().rss_bytes();
  }
  void TearDown() override {
    if (HasFatalFailure()) return;
    EXPECT_TRUE(process().alive());
    EXPECT_OK(Call(absl::Seconds(10)));
    EXPECT_OK(testing::TrainTo(*session_, 5));
    std::cout << "resident: " << rss_at_start_ / kMiB << " MiB at start, peak " << process().peak_rss_bytes() / kMiB
              << "\n";
  }
  bool worker() const { return GetParam() == Victim::kWorker; }
  testing::Process& process() { return worker() ? cluster_->worker("w0") : cluster_->coordinator(); }
  int64_t growth() { return process().peak_rss_bytes() - rss_at_start_; }
  std::string Path() const { return worker() ? "/shardmesh.v1.Shard/Push" : "/shardmesh.v1.Coordinator/CreateJob"; }
  // A call on a new connection.
  absl::Status Call(absl::Duration timeout) {
    if (!worker()) {
      ASSIGN_OR_RETURN(Client client, cluster_->Connect());
      return client.coordinator().ListJobs({}, timeout).status();
    }
    ASSIGN_OR_RETURN(const auto shard, ShardTransport::Dial(job_->members()[0], {}, absl::Seconds(10)));
    return shard->GetStatus(timeout).status();
  }

  std::unique_ptr<Cluster> cluster_;
  std::shared_ptr<Job> job_;
  std::unique_ptr<Session> session_;
  int port_ = 0;
  int64_t rss_at_start_ = 0;
};

TEST_P(HostilePeer, SixHundredIdleConnections_AndTwoHundredFiftySixDescriptors) {
  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  ASSERT_GE(limit.rlim_cur, 800u) << "raise the limit of descriptors (ulimit -n)";
  constexpr int kDescriptors = 256, kReserve = 64;  // ServerOptions::reserved_descriptors
  Start(kDescriptors);
  for (int round = 0; round < 2; ++round) {
    std::vector<std::unique_ptr<RawClient>> idle;
    for (int i = 0; i < 600; ++i) {
      idle.push_back(std::make_unique<RawClient>(port_));
      ASSERT_TRUE(idle.back()->connected()) << i;
    }
    // The process has accepted all that it may: the rest waits in the kernel's queue, and its reserve is untouched.
    const absl::Time until = MonotonicNow() + absl::Seconds(10);
    while (process().open_descriptors() < kDescriptors - kReserve && MonotonicNow() < until) {
      testing::Pause(absl::Milliseconds(5));
    }
    EXPECT_TRUE(absl::IsDeadlineExceeded(Call(absl::Milliseconds(500))));
    EXPECT_NEAR(process().open_descriptors(), kDescriptors - kReserve, kReserve / 4);
    EXPECT_OK(testing::TrainTo(*session_, session_->committed_step().value() + 1));  // who is connected is served
    idle.clear();
    const absl::Time closed = MonotonicNow();
    EXPECT_OK(Call(absl::Seconds(5)));
    std::cout << "served " << MonotonicNow() - closed << " after 600 connections closed\n";
  }
}

TEST_P(HostilePeer, FiftyThousandCallsOpenedAndReset) {
  Start(0);
  EXPECT_GE(testing::OpenAndResetStreams(port_, Path(), 50'000), 50'000);
  EXPECT_OK(Call(absl::Seconds(5)));
  EXPECT_LT(growth(), 150 * kMiB);
}

TEST_P(HostilePeer, MessageOfOneGibibyte) {
  Start(0);
  const testing::LongMessage message = testing::SendLongMessage(port_, Path());
  std::cout << "ended by the server after " << message.bytes_sent / kMiB << " MiB\n";
  EXPECT_TRUE(message.ended_by_server);
  EXPECT_OK(Call(absl::Seconds(5)));
  // The memory quota of the process, and what the allocator adds.
  EXPECT_LT(growth(), (worker() ? 256 : 512) * 5 / 4 * kMiB);
}

// The service that answers must be rpc/calls/reflection.h's: the distribution's has a thread for each open stream.
TEST_P(HostilePeer, FourHundredReflectionStreams_TakeNoThreadEach) {
  Start(0);
  const int before = process().threads();
  ASSERT_GT(before, 0);
  const auto open = testing::OpenReflections(port_, 400);
  ASSERT_FALSE(open.empty());
  std::cout << before << " threads before, " << process().threads() << " with 400 streams\n";
  EXPECT_LT(process().threads(), before + 20);
  EXPECT_OK(Call(absl::Seconds(5)));
}

// What the program has loaded, whatever its link options say.
TEST_P(HostilePeer, NoReflectionServiceOfTheDistribution) {
  Start(0);
  const std::string maps = testing::ReadFile(absl::StrCat("/proc/", process().pid(), "/maps"));
  EXPECT_THAT(maps, ::testing::HasSubstr("shardmesh"));
  EXPECT_THAT(maps, ::testing::Not(::testing::HasSubstr("grpc++_reflection")));
}

// From the first byte on, and without a request: others are served meanwhile, and a worker cuts it off. A coordinator
// does so too, but takes messages that are eight times as long and reads that much before; of integers without end that
// is more work than others should wait for (docs/security.md), so it is not asked to serve beside them.
TEST_P(HostilePeer, FloodsWithoutARequest) {
  Start(0);
  for (const testing::Flood kind :
       {testing::Flood::kHeaderWithoutEnd, testing::Flood::kIntegerWithoutEnd, testing::Flood::kPings}) {
    const bool slow = kind == testing::Flood::kIntegerWithoutEnd;  // to read
    const int64_t most = worker() || slow ? 32 * kMiB : 8 * kMiB;
    std::thread flood([&] {
      const testing::SentFlood flooded = testing::SendFlood(port_, kind, most);
      EXPECT_GT(flooded.bytes_sent, 0);
      EXPECT_TRUE(flooded.ended_by_server || !(worker() || slow)) << static_cast<int>(kind) << " " << flooded.bytes_sent;
    });
    EXPECT_OK(testing::TrainTo(*session_, session_->committed_step().value() + 1));
    flood.join();
    EXPECT_OK(Call(absl::Seconds(5)));
  }
}

INSTANTIATE_TEST_SUITE_P(, HostilePeer, ::testing::Values(Victim::kCoordinator, Victim::kWorker),
                         [](const auto& info) { return info.param == Victim::kWorker ? "Worker" : "Coordinator"; });

}  // namespace
}  // namespace shardmesh
