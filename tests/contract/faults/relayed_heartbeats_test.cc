// Heartbeats of a node's workers reach the coordinator in the node's call. A node that is killed or stopped costs none of
// them its life: they call the coordinator themselves until it is there again. Workers that end with it are lost at once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <memory>
#include <string>

#include "client/cpp/session.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;

constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(2), kLong = absl::Seconds(60);
constexpr int kWorkers = 3;

int Count(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

class RelayedHeartbeats : public ::testing::Test {
 protected:
  void SetUp() override {
    ClusterOptions options;
    options.workers = kWorkers;
    options.heartbeat_timeout = kHeartbeatTimeout;
    options.retained = true;
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start(options));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(testing::OddJob("job", "fsdp=3", 1)));
    ASSERT_OK(testing::Initialize(*job_));
    ASSERT_OK_AND_ASSIGN(session_, job_->Attach({Slot(0)}));
    ASSERT_OK(session_->AwaitWeights(kLong));
  }
  // For longer than it takes to find a silent worker, and until `done` holds.
  template <typename Done>
  void TrainUntil(Done done) {
    const absl::Time until = MonotonicNow() + 3 * kHeartbeatTimeout, latest = MonotonicNow() + kLong;
    while (MonotonicNow() < until || !done()) {
      ASSERT_LT(MonotonicNow(), latest) << "it did not come to that";
      ASSERT_OK(testing::TrainTo(*session_, session_->committed_step().value() + 1));
    }
  }
  std::string CoordinatorLog() const { return testing::ReadFile(cluster_->folder().File("coordinator.log")); }
  std::string NodeLog() const { return testing::ReadFile(cluster_->folder().File("node.log")); }
  int NotRelayed() const { return Count(NodeLog(), "event=heartbeats_not_relayed"); }
  int RelayedAgain() const { return Count(NodeLog(), "event=heartbeats_relayed_again"); }
  // A coordinator that waits for its disk answers late, so workers may have called it themselves for that and nothing else.
  void ExpectOneCall() {
    ASSERT_NO_FATAL_FAILURE(TrainUntil([&] { return RelayedAgain() == NotRelayed(); }));
    EXPECT_EQ(NotRelayed(), Count(NodeLog(), "error=\"DEADLINE_EXCEEDED: coordinator Heartbeat at unix:"));
    EXPECT_LE(Count(CoordinatorLog(), "event=host_heartbeats_begin"),
              1 + Count(NodeLog(), "event=relays_no_heartbeats error=\"DEADLINE_EXCEEDED"));
    ExpectNobodyLost();
  }
  void ExpectNobodyLost() const { EXPECT_EQ(Count(CoordinatorLog(), "event=worker_dead"), 0); }

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
  std::unique_ptr<Session> session_;
};

TEST_F(RelayedHeartbeats, TheyComeInOneCall) { ExpectOneCall(); }

// Nothing is new for several time-outs: most messages are a word, and half of those are left out.
TEST_F(RelayedHeartbeats, AHostAtRest_IsHeard_AndHearsOfAnotherJob) {
  for (const absl::Time until = MonotonicNow() + 3 * kHeartbeatTimeout; MonotonicNow() < until;) {
    ASSERT_OK_AND_ASSIGN(const auto job, client_->OpenJob("job"));
    ASSERT_EQ(job->epoch(), job_->epoch()) << "it lost a member";
  }
  ASSERT_OK_AND_ASSIGN(const auto other, client_->CreateJob(testing::OddJob("other", "fsdp=3", 1)));
  ASSERT_OK(testing::Initialize(*other));
  ExpectOneCall();
}

TEST_F(RelayedHeartbeats, TheNodeIsKilled_AndComesBack) {
  cluster_->node().Kill9();
  ASSERT_NO_FATAL_FAILURE(TrainUntil([&] { return NotRelayed() == kWorkers; }));
  ExpectNobodyLost();
  ASSERT_OK(cluster_->StartNodeAgain(kLong));
  ASSERT_NO_FATAL_FAILURE(TrainUntil([&] { return RelayedAgain() == kWorkers; }));
  ExpectNobodyLost();
}

TEST_F(RelayedHeartbeats, TheNodeIsKilled_WithItsWorkers_TheyAreLostBeforeTheTimeOut) {
  for (const v1::Member& member : job_->members()) kill(member.pid(), SIGSTOP);  // so that none speaks any more
  cluster_->node().Kill9();
  for (const v1::Member& member : job_->members()) kill(member.pid(), SIGKILL);
  const absl::Time latest = MonotonicNow() + kLong;
  while (Count(CoordinatorLog(), "event=worker_dead") < kWorkers) {
    ASSERT_LT(MonotonicNow(), latest);
    testing::Pause(absl::Milliseconds(10));
  }
  EXPECT_EQ(Count(CoordinatorLog(), "node_gone=true"), kWorkers);
}

TEST_F(RelayedHeartbeats, TheNodeIsStopped_AndGoesOn) {
  cluster_->node().Stop();
  ASSERT_NO_FATAL_FAILURE(TrainUntil([&] { return NotRelayed() == kWorkers; }));
  ExpectNobodyLost();
  cluster_->node().Continue();
  ASSERT_NO_FATAL_FAILURE(TrainUntil([&] { return RelayedAgain() == kWorkers; }));
  ExpectNobodyLost();
}

TEST_F(RelayedHeartbeats, TheCoordinatorIsKilled_AndStartedAgain) {
  cluster_->coordinator().Kill9();
  ASSERT_OK(cluster_->RestartCoordinator());
  ASSERT_NO_FATAL_FAILURE(TrainUntil(
      [&] { return Count(CoordinatorLog(), "event=host_heartbeats_begin") == 2 && RelayedAgain() == NotRelayed(); }));
  ExpectNobodyLost();
}

}  // namespace
}  // namespace shardmesh
