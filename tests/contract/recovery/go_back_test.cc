// A job that loses a shard of which no copy is left goes back to its newest checkpoint by itself (on_loss=checkpoint):
// on one host and on several, whoever dies on the way. Trainers that open it again hear of it, and it learns the bits of
// one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/checkpoint/checkpoint.h"
#include "client/cpp/session.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "local/testing/temp_folder.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"
#include "tests/testing/training/two_trainers.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;
using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(2), kLong = absl::Seconds(30);
constexpr int64_t kSaved = 3, kLost = 5, kLast = 8;

class GoBack : public ::testing::Test {
 protected:
  // A job at step kLost, whose newest checkpoint is of step kSaved.
  void Begin(ClusterOptions options, JobSpec spec, const std::string& faults = "") {
    setenv("SHARDMESH_FAULT", faults.c_str(), 1);
    if (faults.empty()) unsetenv("SHARDMESH_FAULT");
    options.heartbeat_timeout = kHeartbeatTimeout;
    options.worker_program = "tests/testing/faulty_worker";
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start(options));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
    spec.on_loss = OnLoss::kCheckpoint;
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(spec));
    ASSERT_OK(testing::Initialize(*job_));
    ASSERT_NO_FATAL_FAILURE(Save(kSaved - 1));
    ASSERT_NO_FATAL_FAILURE(Save(kSaved));
    testing::TrainByTwo(*client_, job_, kLost);
  }
  void Save(int64_t step) {
    testing::TrainByTwo(*client_, job_, step);
    ASSERT_OK_AND_ASSIGN(saved_, SaveCheckpoint(*job_, root_));
    ASSERT_OK(saved_.recorded);
    ASSERT_EQ(saved_.step, step);
  }
  void KillLast() { cluster_->worker(job_->members().back().worker()).Kill9(); }
  absl::StatusOr<std::shared_ptr<Job>> Reopen() { return client_->Reopen(*job_, JobUse::kTrain, kLong); }
  // It is at `step`, and says so to whom it was opened by before; then it learns what it would have learnt.
  void ExpectWentBack(int64_t step, const std::string& mesh) {
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> now, Reopen());
    EXPECT_EQ(now->spec().mesh.ToString(), mesh);
    const std::optional<v1::GoneBack> back = now->WentBackSince(job_->epoch());
    ASSERT_TRUE(back.has_value());
    EXPECT_EQ(back->checkpoint().step(), step);
    EXPECT_EQ(back->lost_step(), kLost);
    EXPECT_FALSE(now->WentBackSince(now->epoch()).has_value());
    ASSERT_OK_AND_ASSIGN(const v1::DigestReply digest, now->Digest(kLong));
    EXPECT_EQ(digest.step(), step);
    EXPECT_EQ(digest.digest() == saved_.digest, step == kSaved);
    testing::TrainByTwo(*client_, now, kLast);
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*now, kLast));
    EXPECT_EQ(learnt, testing::ReferenceOf(job_->spec(), kLast));
  }

  testing::TempFolder temp_;
  const std::string root_ = temp_.File("checkpoints");
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
  SavedCheckpoint saved_;
};

TEST_F(GoBack, ASpareTakesThePlace_AndTheStepsAreDoneAgain) {
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 3}, testing::EverythingJob("job", "fsdp=2")));
  KillLast();
  ASSERT_NO_FATAL_FAILURE(ExpectWentBack(kSaved, "fsdp=2"));
}

TEST_F(GoBack, WithoutASpare_OnASmallerMesh) {
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 3}, testing::OddJob("job", "fsdp=3", 2)));
  const absl::Time killed = MonotonicNow();
  KillLast();
  ASSERT_NO_FATAL_FAILURE(ExpectWentBack(kSaved, "fsdp=2"));
  EXPECT_GE(MonotonicNow() - killed, kHeartbeatTimeout) << "it waits for the worker that is lost";
}

TEST_F(GoBack, TheLostWorkerComesBack_OnTheSameMesh) {
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 3}, testing::OddJob("job", "fsdp=3", 2)));
  KillLast();
  ASSERT_OK(cluster_->worker(job_->members().back().worker()).Wait(kLong));
  ASSERT_OK(cluster_->StartWorker(job_->members().back().worker()));
  ASSERT_NO_FATAL_FAILURE(ExpectWentBack(kSaved, "fsdp=3"));
}

TEST_F(GoBack, PulledSlots_AndBuckets) {
  JobSpec spec = testing::OddJob("job", "fsdp=2", 5);
  spec.slot_mode = SlotMode::kPulled;
  spec.num_trainers = 2;
  spec.residency = Residency::kBucket;
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 3}, spec));
  KillLast();
  ASSERT_NO_FATAL_FAILURE(ExpectWentBack(kSaved, "fsdp=2"));
}

// Both replicas of a shard are lost, one after the other.
TEST_F(GoBack, AJobThatReforms_GoesBackWhenTheLastCopyIsLost) {
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 4}, testing::OddJob("job", "ddp=2,fsdp=2", 2)));
  for (const int rank : {0, 2}) cluster_->worker(job_->members()[rank].worker()).Kill9();
  ASSERT_NO_FATAL_FAILURE(ExpectWentBack(kSaved, "ddp=2,fsdp=1"));
}

TEST_F(GoBack, AWholeHostIsLost_TheOtherReadsTheCheckpoint) {
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 4, .hosts = 2}, testing::OddJob("job", "fsdp=4", 2)));
  for (const char* worker : {"w2", "w3"}) cluster_->worker(worker).Kill9();
  ASSERT_NO_FATAL_FAILURE(ExpectWentBack(kSaved, "fsdp=2"));
}

TEST_F(GoBack, AHostIsLost_AFreeOneTakesItsPlace) {
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 6, .hosts = 3}, testing::OddJob("job", "fsdp=4", 2)));
  const std::string host = job_->members()[0].host_id();
  for (const v1::Member& member : job_->members()) {
    if (member.host_id() == host) cluster_->worker(member.worker()).Kill9();
  }
  ASSERT_NO_FATAL_FAILURE(ExpectWentBack(kSaved, "fsdp=4"));
}

// Of several hosts each has lost a member, and each its lead.
TEST_F(GoBack, TheLeadOfEachHostIsLost) {
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 6, .hosts = 2}, testing::OddJob("job", "fsdp=4", 2)));
  const std::string first = job_->members()[0].worker(), second = job_->members()[2].worker();
  cluster_->worker(first).Kill9();
  cluster_->worker(second).Kill9();
  ASSERT_NO_FATAL_FAILURE(ExpectWentBack(kSaved, "fsdp=4"));
}

TEST_F(GoBack, AFileThatChanged_TheCheckpointBeforeIsTaken) {
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 3}, testing::OddJob("job", "fsdp=2", 2)));
  {
    std::fstream file(fs::path(saved_.path) / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put(0x55);
  }
  KillLast();
  ASSERT_NO_FATAL_FAILURE(ExpectWentBack(kSaved - 1, "fsdp=2"));
  EXPECT_THAT(cluster_->coordinator().Log(), HasSubstr("event=checkpoint_passed_over job=job step=3"));
}

TEST_F(GoBack, NoFileIsLeft_TheJobFails_AndSaysWhy) {
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 3}, testing::OddJob("job", "fsdp=2", 2)));
  fs::remove_all(root_);
  KillLast();
  EXPECT_THAT(Reopen().status(),
              StatusIs(Code::kUnavailable, ::testing::AllOf(HasSubstr("cannot go back to the checkpoint of step 2"),
                                                            HasSubstr("it knows no older one"))));
}

TEST_F(GoBack, TheCoordinatorIsKilledOnTheWay) {
  ASSERT_NO_FATAL_FAILURE(
      Begin({.workers = 3}, testing::OddJob("job", "fsdp=2", 2), "w0:use-loaded:delay:1,w1:use-loaded:delay:1"));
  KillLast();
  const absl::Time deadline = MonotonicNow() + kLong;
  while (!absl::StrContains(cluster_->coordinator().Log(), "event=job_goes_back") && MonotonicNow() < deadline) {
    testing::Pause(absl::Milliseconds(5));
  }
  cluster_->coordinator().Kill9();
  ASSERT_OK(cluster_->coordinator().Wait(kLong));
  ASSERT_OK(cluster_->RestartCoordinator());
  ASSERT_NO_FATAL_FAILURE(ExpectWentBack(kSaved, "fsdp=2"));
}

TEST_F(GoBack, ACheckpointOfStepsThatTheJobLeft_IsNotItsNewest) {
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 3}, testing::OddJob("job", "fsdp=2", 2)));
  KillLast();
  ASSERT_OK(Reopen());
  v1::StoredCheckpoint left;
  left.set_folder("/data/left");
  left.set_step(kLost);
  EXPECT_THAT(job_->RecordCheckpoint(left, kLong), StatusIs(Code::kAborted, HasSubstr("has gone back to step 3")));
}

// Whoever dies while a second member is lost: at each point on the way.
struct Case {
  const char* point;
  const char* action;
  int nth;
};
class GoBackAtPoints : public GoBack, public ::testing::WithParamInterface<Case> {};

TEST_P(GoBackAtPoints, AnotherMemberDies_OthersReadTheCheckpoint) {
  const Case& c = GetParam();
  const std::string fault = absl::StrCat(":", c.point, ":", c.action, ":", c.nth);
  // Of four workers the job has the first two, and the third comes to it when the second is lost.
  ASSERT_NO_FATAL_FAILURE(Begin({.workers = 4}, testing::OddJob("job", "fsdp=2", 2), absl::StrCat("w2", fault)));
  KillLast();
  ASSERT_NO_FATAL_FAILURE(ExpectWentBack(kSaved, "fsdp=2"));
  if (absl::string_view(c.action) != "kill") return;
  ASSERT_OK_AND_ASSIGN(const int ended, cluster_->worker("w2").Wait(absl::Seconds(5)));
  EXPECT_EQ(ended, 128 + SIGKILL) << "the point was not reached";
}

INSTANTIATE_TEST_SUITE_P(, GoBackAtPoints,
                         ::testing::Values(Case{"assigned", "kill", 1}, Case{"prepared", "kill", 1},
                                           Case{"file-read", "kill", 1}, Case{"file-read", "kill", 4},
                                           Case{"use-loaded", "kill", 1}, Case{"command-seen", "kill", 1},
                                           Case{"executed", "kill", 1}, Case{"prepared", "error", 1}),
                         [](const auto& info) {
                           std::string name = absl::StrCat(info.param.point, "_", info.param.action, info.param.nth);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace shardmesh
