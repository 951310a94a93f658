// Workers whose memory a keeper has, killed at random moments of a training: trainers only see a pause, no step is
// lost, and no bit differs. Prints the table of pauses. SHARDMESH_RESTART_KILLS: how many, SHARDMESH_SEED: which
// moments.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <csignal>
#include <cstdio>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/pauses.h"
#include "tests/testing/steady_training.h"
#include "tests/testing/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::Pauses;
using ::shardmesh::testing::SteadyTraining;

constexpr int kWorkers = 2;
constexpr int kMaxQuietMillis = 30;  // from the last recovery to the next kill

TEST(Restart, KilledAtRandomMoments_NoStepIsLost_AndTheBitsAreTheSame) {
  const int64_t kills = testing::NumberOfEnvironment("SHARDMESH_RESTART_KILLS", 200);
  const auto seed = static_cast<uint32_t>(testing::NumberOfEnvironment("SHARDMESH_SEED", std::random_device()()));
  std::printf("SHARDMESH_SEED=%u SHARDMESH_RESTART_KILLS=%ld\n", seed, static_cast<long>(kills));
  std::mt19937 random(seed);
  ClusterOptions options;
  options.workers = kWorkers;
  options.kept = true;
  options.heartbeat_timeout = absl::Seconds(20);  // a busy machine starts a process late
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start(options));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  JobSpec spec = testing::OddJob("job", "fsdp=2", 2);
  spec.clip_norm = 0.5;
  ASSERT_OK_AND_ASSIGN(const auto training, SteadyTraining::Start(client, spec));
  Pauses pauses;
  for (int64_t k = 0; k < kills; ++k) {
    ASSERT_OK(training->AwaitBeyond(training->committed() + 1)) << "before kill " << k;
    poll(nullptr, 0, static_cast<int>(random() % kMaxQuietMillis));
    const int victim = static_cast<int>(random() % kWorkers);
    const pid_t pid = cluster->PidOf(absl::StrCat("w-", victim));
    ASSERT_GT(pid, 0) << "kill " << k;
    const absl::Time begin = absl::Now();
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    // One step may have been under way to its commit.
    ASSERT_OK(training->AwaitBeyond(training->committed() + 1)) << "after kill " << k << " of w-" << victim;
    pauses.Add(absl::StrCat("killed w-", victim), absl::Now() - begin);
  }
  ASSERT_OK_AND_ASSIGN(const int64_t last, training->End());
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(training->job(), last));
  std::printf("%s%ld steps\n", pauses.Table().c_str(), static_cast<long>(last));
  ASSERT_OK(testing::Delete(client, "job"));
  spec.name = "undisturbed";
  ASSERT_OK_AND_ASSIGN(const Learnt undisturbed, testing::Undisturbed(client, spec, last));
  EXPECT_EQ(learnt, undisturbed);
}

}  // namespace
}  // namespace shardmesh
