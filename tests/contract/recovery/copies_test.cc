// A job on several hosts with copies=2 keeps each shard on two of them: should one be lost, it goes back to the newest
// step that the others have as a whole, by itself, and learns the bits of one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/checkpoint/checkpoint.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "local/testing/temp_folder.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"
#include "tests/testing/training/two_trainers.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(2), kLong = absl::Seconds(30);
constexpr int64_t kLost = 5, kLast = 8;
constexpr int64_t kTimes = 6, kSteps = 200;

class Copies : public ::testing::Test {
 protected:
  void Begin(ClusterOptions options, JobSpec spec) {
    options.heartbeat_timeout = kHeartbeatTimeout;
    per_host_ = options.workers / options.hosts;
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start(options));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
    spec.copies = 2;
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(spec));
    ASSERT_OK(testing::Initialize(*job_));
    testing::TrainByTwo(*client_, job_, kLost);
  }
  // Until the coordinator knows that each shard of the step is on two hosts.
  void AwaitCopies(int64_t step) {
    const absl::Time until = MonotonicNow() + kLong;
    v1::DescribeJobRequest request;
    request.set_job("job");
    v1::JobDescription job;
    do {
      ASSERT_OK_AND_ASSIGN(job, client_->coordinator().DescribeJob(request, kLong));
    } while (!(job.has_copied() && job.copied().step() >= step) && MonotonicNow() < until);
    ASSERT_EQ(job.copied().step(), step);
  }
  void KillHostOf(int rank) {
    const std::string host = job_->members()[rank].host_id();
    for (const v1::Member& member : job_->members()) {
      if (member.host_id() == host) cluster_->worker(member.worker()).Kill9();
    }
  }
  absl::StatusOr<std::shared_ptr<Job>> Reopen() { return client_->Reopen(*job_, JobUse::kTrain, kLong); }
  // It is at `step`, and says so to whom it was opened by before; then it learns what it would have learnt.
  void ExpectWentBack(int64_t step, const std::string& mesh) {
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> now, Reopen());
    EXPECT_EQ(now->spec().mesh.ToString(), mesh);
    const std::optional<v1::GoneBack> back = now->WentBackSince(job_->epoch());
    ASSERT_TRUE(back.has_value());
    EXPECT_EQ(back->checkpoint().step(), step);
    EXPECT_EQ(back->checkpoint().copied_at(), job_->epoch().value());
    EXPECT_EQ(back->lost_step(), kLost);
    testing::TrainByTwo(*client_, now, kLast);
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*now, kLast));
    EXPECT_EQ(learnt, testing::ReferenceOf(job_->spec(), kLast));
    job_ = now;
  }

  int per_host_ = 1;
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
};

TEST_F(Copies, AHostIsLost_TheOthersGoOnWithItsShards_AndNoStepIsLost) {
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 6, .hosts = 3}, testing::EverythingJob("job", "fsdp=6")));
  ASSERT_NO_FATAL_FAILURE(AwaitCopies(kLost));
  KillHostOf(2);
  ASSERT_NO_FATAL_FAILURE(ExpectWentBack(kLost, "fsdp=4"));
}

TEST_F(Copies, AFreeHostTakesItsPlace) {
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 6, .hosts = 3}, testing::OddJob("job", "fsdp=4", 2)));
  ASSERT_NO_FATAL_FAILURE(AwaitCopies(kLost));
  KillHostOf(0);
  ASSERT_NO_FATAL_FAILURE(ExpectWentBack(kLost, "fsdp=4"));
}

// Rank 0, which has members copy, is another worker then.
TEST_F(Copies, OneHostAfterTheOtherIsLost) {
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 6, .hosts = 3}, testing::OddJob("job", "fsdp=6", 2)));
  ASSERT_NO_FATAL_FAILURE(AwaitCopies(kLost));
  KillHostOf(0);
  ASSERT_NO_FATAL_FAILURE(ExpectWentBack(kLost, "fsdp=4"));
  ASSERT_NO_FATAL_FAILURE(AwaitCopies(kLast));
  KillHostOf(0);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> now, Reopen());
  EXPECT_EQ(now->spec().mesh.ToString(), "fsdp=2");
  EXPECT_EQ(now->WentBackSince(job_->epoch())->checkpoint().step(), kLast);
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*now, kLast));
  EXPECT_EQ(learnt, testing::ReferenceOf(job_->spec(), kLast));
}

TEST_F(Copies, PulledSlots_AndBuckets) {
  JobSpec spec = testing::OddJob("job", "fsdp=4", 5);
  spec.slot_mode = SlotMode::kPulled;
  spec.num_trainers = 2;
  spec.residency = Residency::kBucket;
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 4, .hosts = 2}, spec));
  ASSERT_NO_FATAL_FAILURE(AwaitCopies(kLost));
  KillHostOf(3);
  ASSERT_NO_FATAL_FAILURE(ExpectWentBack(kLost, "fsdp=2"));
}

// While it trains: back to some step, of which nothing is missing.
TEST_F(Copies, AHostIsLostInTheMiddle_TheJobGoesBackToAWholeOne) {
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 6, .hosts = 3}, testing::OddJob("job", "fsdp=6", 2)));
  ASSERT_NO_FATAL_FAILURE(AwaitCopies(kLost));
  std::thread training([this] { testing::TrainByTwo(*client_, job_, kLost + 200); });
  KillHostOf(4);
  training.join();
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> now, Reopen());
  ASSERT_TRUE(now->WentBackSince(job_->epoch()).has_value());
  EXPECT_GE(now->WentBackSince(job_->epoch())->checkpoint().step(), kLost);
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*now, kLost + 200));
  EXPECT_EQ(learnt, testing::ReferenceOf(job_->spec(), kLost + 200));
}

TEST_F(Copies, TheCoordinatorIsKilledOnTheWay) {
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 6, .hosts = 3}, testing::OddJob("job", "fsdp=6", 2)));
  ASSERT_NO_FATAL_FAILURE(AwaitCopies(kLost));
  KillHostOf(2);
  cluster_->coordinator().Kill9();
  ASSERT_OK(cluster_->coordinator().Wait(kLong));
  ASSERT_OK(cluster_->RestartCoordinator());
  ASSERT_NO_FATAL_FAILURE(ExpectWentBack(kLost, "fsdp=4"));
}

// Shards of one are kept by the other, so they are gone: a checkpoint is older, but it is there.
TEST_F(Copies, TwoNeighboursAreLost_TheJobGoesBackToItsCheckpoint) {
  JobSpec spec = testing::OddJob("job", "fsdp=6", 2);
  spec.on_loss = OnLoss::kCheckpoint;
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 6, .hosts = 3}, spec));
  const testing::TempFolder folder;
  ASSERT_OK(SaveCheckpoint(*job_, folder.File("checkpoints")));
  testing::TrainByTwo(*client_, job_, kLast);
  ASSERT_NO_FATAL_FAILURE(AwaitCopies(kLast));
  KillHostOf(0);
  KillHostOf(2);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> now, Reopen());
  EXPECT_EQ(now->spec().mesh.ToString(), "fsdp=2");
  const std::optional<v1::GoneBack> back = now->WentBackSince(job_->epoch());
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->checkpoint().step(), kLost);
  EXPECT_EQ(back->checkpoint().copied_at(), 0);
  EXPECT_EQ(back->lost_step(), kLast);
  testing::TrainByTwo(*client_, now, kLast);
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*now, kLast));
  EXPECT_EQ(learnt, testing::ReferenceOf(job_->spec(), kLast));
}

// It has lost its copies, and no step is committed since.
TEST_F(Copies, AMemberThatCameBack_HasCopiesAgain_WithoutAStep) {
  ClusterOptions options{.workers = 4, .hosts = 2};
  options.retained = true;
  ASSERT_NO_FATAL_FAILURE(Begin(options, testing::OddJob("job", "fsdp=4", 2)));
  ASSERT_NO_FATAL_FAILURE(AwaitCopies(kLost));
  const std::string& last = job_->members().back().worker();
  const pid_t before = cluster_->PidOf(last);
  ASSERT_EQ(kill(before, SIGKILL), 0);
  ASSERT_GT(cluster_->AwaitNextIncarnation(last, before, kLong), 0);
  const absl::Time until = MonotonicNow() + kLong;
  v1::DescribeJobRequest request;
  request.set_job("job");
  v1::JobDescription job;
  bool gone = false;  // the coordinator has seen that its copies are lost
  do {
    ASSERT_OK_AND_ASSIGN(job, client_->coordinator().DescribeJob(request, kLong));
    gone = gone || !job.has_copied();
  } while (!(gone && job.has_copied()) && MonotonicNow() < until);
  EXPECT_TRUE(gone);
  EXPECT_EQ(job.copied().step(), kLost);
}

// A digest that comes while members are about to be ready is the round's for some of them alone. These copy an older
// step than the others, which do not have it. Such a round ends at once.
TEST_F(Copies, DigestsMeanwhile_AreNotWaitedFor_TheNextRoundIsWhole) {
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 4, .hosts = 2}, testing::OddJob("job", "fsdp=4", 2)));
  std::atomic<bool> done{false};
  std::thread digests([&] {
    while (!done.load()) EXPECT_OK(job_->Digest(kLong).status());
  });
  const absl::Cleanup end = [&] {
    done.store(true);
    digests.join();
  };
  for (int64_t step = kLost + kSteps; step <= kLost + kTimes * kSteps; step += kSteps) {
    testing::TrainByTwo(*client_, job_, step);
    ASSERT_NO_FATAL_FAILURE(AwaitCopies(step));
  }
}

TEST_F(Copies, ASaveMeanwhile_IsOfOneStep) {
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 4, .hosts = 2}, testing::OddJob("job", "fsdp=4", 2)));
  const testing::TempFolder folder;
  for (int64_t step = kLost; step < kLost + 5; ++step) {
    testing::TrainByTwo(*client_, job_, step);
    ASSERT_OK_AND_ASSIGN(const SavedCheckpoint saved, SaveCheckpoint(*job_, folder.File("checkpoints")));
    EXPECT_EQ(saved.step, step);
  }
}

}  // namespace
}  // namespace shardmesh
