// Workers whose memory a node has, killed at random moments of a training: trainers only see a pause, no step is
// lost, and no bit differs. Prints the table of pauses. SHARDMESH_RESTART_KILLS: how many, SHARDMESH_SEED: which
// moments.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <csignal>
#include <cstdio>
#include <random>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/pauses.h"
#include "tests/testing/training/steady_training.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::Pauses;
using ::shardmesh::testing::SteadyTraining;

constexpr int kWorkers = 2;
constexpr int kMaxQuietMillis = 30;  // from the last recovery to the next kill
#ifdef __SANITIZE_ADDRESS__
constexpr int64_t kKills = 40;  // processes start at a fifth of the speed
#else
constexpr int64_t kKills = 200;
#endif

class Restart : public ::testing::TestWithParam<Residency> {};

TEST_P(Restart, KilledAtRandomMoments_NoStepIsLost_AndTheBitsAreTheSame) {
  const int64_t kills = testing::NumberOfEnvironment("SHARDMESH_RESTART_KILLS", kKills);
  const auto seed = static_cast<uint32_t>(testing::NumberOfEnvironment("SHARDMESH_SEED", std::random_device()()));
  std::printf("SHARDMESH_SEED=%u SHARDMESH_RESTART_KILLS=%ld\n", seed, static_cast<long>(kills));
  std::mt19937 random(seed);
  ClusterOptions options;
  options.workers = kWorkers;
  options.retained = true;
  options.heartbeat_timeout = absl::Seconds(20);  // a busy machine starts a process late
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start(options));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  JobSpec spec = testing::OddJob("job", "fsdp=2", 2);
  spec.clip_norm = 0.5;
  spec.residency = GetParam();
  ASSERT_OK_AND_ASSIGN(const auto training, SteadyTraining::Start(client, spec));
  Pauses pauses;
  for (int64_t k = 0; k < kills; ++k) {
    const absl::Status before = training->AwaitBeyond(training->committed() + 1);
    ASSERT_TRUE(before.ok()) << before << " before kill " << k << ": " << training->End().status();
    poll(nullptr, 0, static_cast<int>(random() % kMaxQuietMillis));
    const int victim = static_cast<int>(random() % kWorkers);
    const pid_t pid = cluster->PidOf(absl::StrCat("w-", victim));
    ASSERT_GT(pid, 0) << "kill " << k;
    const absl::Time begin = MonotonicNow();
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    // One step may have been under way to its commit.
    const absl::Status after = training->AwaitBeyond(training->committed() + 1);
    ASSERT_TRUE(after.ok()) << after << " after kill " << k << " of w-" << victim << ": " << training->End().status();
    pauses.Add(absl::StrCat("killed w-", victim), MonotonicNow() - begin);
  }
  ASSERT_OK_AND_ASSIGN(const int64_t last, training->End());
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(training->job(), last));
  std::printf("%s%ld steps\n", pauses.Table().c_str(), static_cast<long>(last));
  ASSERT_OK(testing::Delete(client, "job"));
  spec.name = "undisturbed";
  ASSERT_OK_AND_ASSIGN(const Learnt undisturbed, testing::Undisturbed(client, spec, last));
  EXPECT_EQ(learnt, undisturbed);
}

INSTANTIATE_TEST_SUITE_P(, Restart, ::testing::Values(Residency::kFull, Residency::kBucket),
                         [](const auto& info) { return info.param == Residency::kFull ? "Full" : "Bucket"; });

class RestartWithoutCoordinator : public ::testing::Test {
 protected:
  // While the coordinator is away, and for longer than workers wait for it at their start.
  static constexpr absl::Duration kAway = absl::Seconds(3);

  void SetUp() override {
    ClusterOptions options;
    options.workers = 2;
    options.retained = true;
    options.heartbeat_timeout = absl::Seconds(20);
    options.worker_flags = {"--join-timeout", "1"};
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start(options));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
    ASSERT_OK_AND_ASSIGN(training_, SteadyTraining::Start(*client_, spec_));
  }
  void Kill(const std::string& worker) {
    ASSERT_OK(training_->AwaitBeyond(training_->committed() + 1));
    const pid_t pid = cluster_->PidOf(worker);
    ASSERT_GT(pid, 0);
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    ASSERT_OK(training_->AwaitBeyond(training_->committed() + 1)) << "after the kill of " << worker;
  }
  void TrainFor(absl::Duration time) {
    for (const absl::Time end = MonotonicNow() + time; MonotonicNow() < end;) {
      ASSERT_OK(training_->AwaitBeyond(training_->committed()));
    }
  }
  // The coordinator comes to know this incarnation, as a member of the job that goes on.
  void AwaitMember(int rank, pid_t pid) {
    v1::DescribeJobRequest request;
    request.set_job(spec_.name);
    absl::StatusOr<v1::JobDescription> seen;
    for (const absl::Time end = MonotonicNow() + absl::Seconds(30); MonotonicNow() < end; poll(nullptr, 0, 20)) {
      seen = client_->coordinator().DescribeJob(request, absl::Seconds(5));
      if (seen.ok() && (seen->members(rank).pid() == pid || seen->state() != v1::JOB_STATE_READY)) break;
    }
    ASSERT_OK(seen);
    EXPECT_EQ(seen->state(), v1::JOB_STATE_READY) << seen->error();
    EXPECT_EQ(seen->members(rank).pid(), pid);
  }

  const JobSpec spec_ = testing::OddJob("job", "fsdp=2", 2);
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<SteadyTraining> training_;
};

TEST_F(RestartWithoutCoordinator, IncarnationsThatNeverJoin_GoOn_AndTheNextOneIsKnownAgain) {
  cluster_->coordinator().Kill9();
  for (const char* const worker : {"w-0", "w-1", "w-0"}) ASSERT_NO_FATAL_FAILURE(Kill(worker));
  ASSERT_NO_FATAL_FAILURE(TrainFor(kAway));
  ASSERT_OK(cluster_->RestartCoordinator());
  for (int rank = 0; rank < 2; ++rank) {
    const std::string worker = training_->job().members()[rank].worker();
    ASSERT_NO_FATAL_FAILURE(AwaitMember(rank, cluster_->PidOf(worker)));
    ASSERT_NO_FATAL_FAILURE(Kill(worker));
  }
  ASSERT_OK_AND_ASSIGN(const int64_t last, training_->End());
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(training_->job(), last));
  ASSERT_OK_AND_ASSIGN(const Learnt undisturbed, testing::Undisturbed(*client_, spec_, last));
  EXPECT_EQ(learnt, undisturbed);
}

}  // namespace
}  // namespace shardmesh
