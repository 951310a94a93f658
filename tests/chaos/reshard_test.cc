// A job that goes from mesh to mesh at random, while its workers, which a node starts again, and the coordinator are
// killed at random, at any moment of that: no step is lost, nothing hangs, and it learns the bits of one process.
//
// SHARDMESH_CHAOS_RESHARD_SECONDS: how long (20). SHARDMESH_SEED: which meshes, who is killed, and when.
#include "client/cpp/checkpoint/reshard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <map>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "core/mesh/mesh_spec.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"
#include "tests/testing/training/two_trainers.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;

constexpr int kWorkers = 5, kRoundSteps = 40, kMaxQuietMillis = 150;
constexpr absl::Duration kLong = absl::Seconds(60);
const char* const kMeshes[] = {"fsdp=1", "fsdp=2",       "fsdp=3", "fsdp=4",
                               "fsdp=5", "ddp=2,fsdp=2", "ddp=2",  "fsdp=2,ddp=2"};

// The coordinator may have been killed a moment ago.
absl::StatusOr<std::shared_ptr<Job>> Open(Client& client) {
  const absl::Time deadline = MonotonicNow() + kLong;
  while (true) {
    absl::StatusOr<std::shared_ptr<Job>> job = client.OpenJob("job");
    if (!absl::IsUnavailable(job.status()) || MonotonicNow() > deadline) return job;
    testing::Pause(absl::Milliseconds(10));
  }
}

TEST(ReshardChaos, FromMeshToMesh_WhileProcessesAreKilled_NoStepIsLost_AndTheBitsAreTheSame) {
  std::random_device device;
  const auto seed = static_cast<uint32_t>(testing::NumberOfEnvironment("SHARDMESH_SEED", device()));
  const int64_t seconds = testing::NumberOfEnvironment("SHARDMESH_CHAOS_RESHARD_SECONDS", 20);
  std::printf("SHARDMESH_SEED=%u SHARDMESH_CHAOS_RESHARD_SECONDS=%d\n", seed, static_cast<int>(seconds));
  std::mt19937 random(seed);
  const auto pick = [&](int n) { return static_cast<int>(random() % n); };

  ASSERT_OK_AND_ASSIGN(const auto cluster,
                       Cluster::Start({.workers = kWorkers, .heartbeat_timeout = absl::Seconds(10), .retained = true}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  JobSpec spec = testing::OddJob("job", "fsdp=2", 2);
  spec.parameters[1].gather = GatherFormat::kFp8Row;
  spec.parameters.push_back({"more", {300, 40}, WeightFormat::kBf16Sr, "", StateFormat::kDyn8});
  spec.clip_norm = 0.5;
  ASSERT_OK_AND_ASSIGN(std::shared_ptr<Job> job, client.CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job));

  std::map<std::string, int> outcomes;
  int64_t last = 0;
  int killed = 0;
  const absl::Time end = MonotonicNow() + absl::Seconds(seconds);
  while (MonotonicNow() < end && !::testing::Test::HasFailure()) {
    last += kRoundSteps;
    absl::Status moved;
    const std::string mesh = kMeshes[pick(8)];
    std::thread training([&] { testing::TrainByTwo(client, job, last); });
    std::thread moving([&] {
      ReshardOptions options;
      options.timeout = kLong;
      moved = ReshardJob(client, "job", ParseMeshSpec(mesh).value(), options).status();
    });
    for (int kills = pick(3); kills > 0; --kills) {
      testing::Pause(absl::Milliseconds(pick(kMaxQuietMillis)));
      const int victim = pick(kWorkers + 1);
      ++killed;
      if (victim == kWorkers) {
        cluster->coordinator().Kill9();
        EXPECT_OK(cluster->RestartCoordinator());
        continue;
      }
      const std::string name = absl::StrCat("w-", victim);
      const pid_t pid = cluster->PidOf(name);
      if (pid > 0) kill(pid, SIGKILL);
      EXPECT_GT(cluster->AwaitNextIncarnation(name, pid, kLong), 0);
    }
    moving.join();
    training.join();
    EXPECT_TRUE(moved.ok() || absl::IsAborted(moved) || absl::IsFailedPrecondition(moved)) << mesh << ": " << moved;
    ++outcomes[moved.ok() ? "moved" : absl::IsAborted(moved) ? "stayed" : "refused"];
    ASSERT_OK_AND_ASSIGN(job, Open(client));
    if (!moved.ok()) continue;
    EXPECT_EQ(job->spec().mesh.ToString(), mesh);
  }
  for (const auto& [outcome, times] : outcomes) std::printf("%-8s %5d times\n", outcome.c_str(), times);
  std::printf("%d kills, %d steps, epoch %d\n", killed, static_cast<int>(last), static_cast<int>(job->epoch().value()));
  EXPECT_GT(outcomes["moved"], 0);
  absl::StatusOr<Learnt> learnt = testing::Learn(*job, last);
  while (absl::IsUnavailable(learnt.status()) && MonotonicNow() < end + kLong) {  // a worker was killed a moment ago
    ASSERT_OK_AND_ASSIGN(job, Open(client));
    learnt = testing::Learn(*job, last);
  }
  ASSERT_OK(learnt);
  EXPECT_EQ(*learnt, testing::ReferenceOf(spec, last));
}

}  // namespace
}  // namespace shardmesh
