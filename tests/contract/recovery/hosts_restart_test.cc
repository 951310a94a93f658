// Jobs on several hosts whose nodes have the workers' memory: a member, a host's lead, or the first lead is killed at
// random moments of a training, or both leads at once: trainers only see a pause, no step is lost, and no bit differs.
// Prints the table of pauses. SHARDMESH_RESTART_KILLS: how many, SHARDMESH_SEED: which moments.
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

constexpr int kWorkers = 4, kHosts = 2;
constexpr int kMaxQuietMillis = 30;  // from the last recovery to the next kill
#ifdef __SANITIZE_ADDRESS__
constexpr int64_t kKills = 12;  // processes start at a fifth of the speed
#else
constexpr int64_t kKills = 40;
#endif

ClusterOptions OnHosts() {
  ClusterOptions options;
  options.workers = kWorkers;
  options.hosts = kHosts;
  options.retained = true;
  options.heartbeat_timeout = absl::Seconds(20);  // a busy machine starts a process late
  return options;
}

// Who is killed together.
struct Victims {
  const char* name;
  std::vector<int> workers;
};
const Victims kVictims[] = {{"the first lead", {0}}, {"a member", {1}},      {"another lead", {2}},
                            {"its member", {3}},     {"both leads", {0, 2}}, {"a host", {2, 3}}};

struct Kind {
  const char* name;
  Residency residency = Residency::kFull;
  bool pulled = false;
};
class HostsRestart : public ::testing::TestWithParam<Kind> {};

TEST_P(HostsRestart, KilledAtRandomMoments_NoStepIsLost_AndTheBitsAreTheSame) {
  const int64_t kills = testing::NumberOfEnvironment("SHARDMESH_RESTART_KILLS", kKills);
  const auto seed = static_cast<uint32_t>(testing::NumberOfEnvironment("SHARDMESH_SEED", std::random_device()()));
  std::printf("SHARDMESH_SEED=%u SHARDMESH_RESTART_KILLS=%ld\n", seed, static_cast<long>(kills));
  std::mt19937 random(seed);
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start(OnHosts()));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  JobSpec spec = testing::OddJob("job", "ddp=2,fsdp=2", 2);
  spec.clip_norm = 0.5;
  spec.residency = GetParam().residency;
  if (GetParam().pulled) {
    spec.num_slots = 5;
    spec.slot_mode = SlotMode::kPulled;
    spec.num_trainers = 2;
  }
  ASSERT_OK_AND_ASSIGN(const auto training, SteadyTraining::Start(client, spec));
  Pauses pauses;
  for (int64_t k = 0; k < kills; ++k) {
    const absl::Status before = training->AwaitBeyond(training->committed() + 1);
    ASSERT_TRUE(before.ok()) << before << " before kill " << k << ": " << training->End().status();
    poll(nullptr, 0, static_cast<int>(random() % kMaxQuietMillis));
    const Victims& victims = kVictims[random() % std::size(kVictims)];
    std::vector<pid_t> pids;
    for (const int worker : victims.workers) {
      pids.push_back(cluster->PidOf(cluster->RetainedName(worker)));
      ASSERT_GT(pids.back(), 0) << "kill " << k;
    }
    const absl::Time begin = MonotonicNow();
    for (const pid_t pid : pids) ASSERT_EQ(kill(pid, SIGKILL), 0);
    // One step may have been under way to its commit.
    const absl::Status after = training->AwaitBeyond(training->committed() + 1);
    ASSERT_TRUE(after.ok()) << after << " after kill " << k << " of " << victims.name << ": "
                            << training->End().status();
    pauses.Add(absl::StrCat("killed ", victims.name), MonotonicNow() - begin);
  }
  ASSERT_OK_AND_ASSIGN(const int64_t last, training->End());
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(training->job(), last));
  std::printf("%s%ld steps\n", pauses.Table().c_str(), static_cast<long>(last));
  ASSERT_OK(testing::Delete(client, "job"));
  spec.name = "undisturbed";
  ASSERT_OK_AND_ASSIGN(const Learnt undisturbed, testing::Undisturbed(client, spec, last));
  EXPECT_EQ(learnt, undisturbed);
}

INSTANTIATE_TEST_SUITE_P(, HostsRestart,
                         ::testing::Values(Kind{"Full"}, Kind{"Bucket", Residency::kBucket},
                                           Kind{"Pulled", Residency::kFull, true}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace shardmesh
