// Workers without a node, killed at random, one or two at a time, and started again: the job goes on with the others on
// whatever mesh they can have, takes the next incarnations in at the next loss, and learns the bits of one process.
//
// SHARDMESH_CHAOS_REFORM_SECONDS: how long (20). SHARDMESH_SEED: which workers, and when.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;

constexpr int kWorkers = 6, kRoundSteps = 25, kMaxQuietMillis = 60;
constexpr absl::Duration kLong = absl::Seconds(60);

absl::Status TrainHalf(Job& job, bool attached, int64_t last) {
  const std::vector<Slot> slots = {Slot(attached ? 0 : 1)};
  ASSIGN_OR_RETURN(const auto session, attached ? job.Attach(slots) : job.Connect(slots));
  RETURN_IF_ERROR(session->AwaitWeights(kLong));
  return testing::TrainTo(*session, last, kLong);
}

// Both trainers until `last`, while `harm` is done.
template <typename Harm>
void Round(Client& client, const std::shared_ptr<Job>& job, int64_t last, const Harm& harm) {
  absl::Status of[2];
  std::vector<std::thread> trainers;
  for (int i = 0; i < 2; ++i) {
    trainers.emplace_back(
        [&, i] { of[i] = testing::TrainOver(client, job, [&](Job& now) { return TrainHalf(now, i == 0, last); }); });
  }
  harm();
  for (std::thread& trainer : trainers) trainer.join();
  EXPECT_OK(of[0]) << "to step " << last;
  EXPECT_OK(of[1]) << "to step " << last;
}

TEST(ReformChaos, WorkersThatDieForGood_NoStepIsLost_AndTheBitsAreTheSame) {
  std::random_device device;
  const auto seed = static_cast<uint32_t>(testing::NumberOfEnvironment("SHARDMESH_SEED", device()));
  const int64_t seconds = testing::NumberOfEnvironment("SHARDMESH_CHAOS_REFORM_SECONDS", 20);
  std::printf("SHARDMESH_SEED=%u SHARDMESH_CHAOS_REFORM_SECONDS=%d\n", seed, static_cast<int>(seconds));
  std::mt19937 random(seed);
  const auto pick = [&](int n) { return static_cast<int>(random() % n); };

  ASSERT_OK_AND_ASSIGN(const auto cluster,
                       Cluster::Start({.workers = kWorkers, .heartbeat_timeout = absl::Seconds(10)}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  JobSpec spec = testing::OddJob("job", "ddp=3,fsdp=2", 2);
  spec.parameters[1].gather = GatherFormat::kFp8Row;
  spec.clip_norm = 0.5;
  ASSERT_OK_AND_ASSIGN(std::shared_ptr<Job> job, client.CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job));

  std::map<std::string, int> meshes;
  int64_t last = 0;
  int killed = 0;
  const absl::Time end = MonotonicNow() + absl::Seconds(seconds);
  while (MonotonicNow() < end && !::testing::Test::HasFailure()) {
    last += kRoundSteps;
    Round(client, job, last, [&] {
      testing::Pause(absl::Milliseconds(pick(kMaxQuietMillis)));
      std::vector<std::string> victims = {absl::StrCat("w", pick(kWorkers))};
      if (pick(3) == 0) victims.push_back(absl::StrCat("w", pick(kWorkers)));
      if (victims.size() == 2 && victims[0] == victims[1]) victims.pop_back();
      for (const std::string& victim : victims) cluster->worker(victim).Kill9();
      killed += static_cast<int>(victims.size());
      testing::Pause(absl::Milliseconds(pick(kMaxQuietMillis)));
      for (const std::string& victim : victims) EXPECT_OK(cluster->StartWorker(victim));
    });
    ASSERT_OK_AND_ASSIGN(job, client.OpenJob("job"));
    ++meshes[job->spec().mesh.ToString()];
  }
  for (const auto& [mesh, rounds] : meshes) std::printf("%-16s %5d rounds\n", mesh.c_str(), rounds);
  std::printf("%d kills, %d steps, epoch %d\n", killed, static_cast<int>(last), static_cast<int>(job->epoch().value()));
  EXPECT_GT(job->epoch(), Epoch(1));
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, last));
  EXPECT_EQ(learnt, testing::ReferenceOf(spec, last));
}

}  // namespace
}  // namespace shardmesh
