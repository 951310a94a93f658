// Slots that connected trainers take: the bits are those of attached ones and of one process, also when both kinds are
// in one job; a trainer that ends gives its slot back; what is wrong is said as to attached trainers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/process.h"
#include "tests/testing/training/pulling_jobs.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::PulledJob;
using ::testing::HasSubstr;
using Code = absl::StatusCode;
using Work = PullingSession::Work;

constexpr absl::Duration kLong = absl::Seconds(30);
constexpr absl::Duration kShort = absl::Milliseconds(50);  // for what may not come before another trainer goes on
constexpr absl::Duration kSlotTimeout = absl::Milliseconds(2);

class ConnectedPulling : public testing::PullingJobs {};

TEST_F(ConnectedPulling, TrainersOfBothKinds_AreTheBitsOfOneProcess) {
  constexpr int64_t kSteps = 10;
  for (const char* mesh : {"fsdp=1", "fsdp=3", "ddp=2,fsdp=2"}) {
    SCOPED_TRACE(mesh);
    JobSpec spec = PulledJob("job", mesh, 7, 4);
    spec.clip_norm = 0.5;
    spec.token_weights = true;
    spec.gradient_format = Format::kBf16;
    spec.parameters.push_back({"quantized", {70, 300}, WeightFormat::kBf16Sr, "", {}, GatherFormat::kFp8Row});
    spec.parameters.push_back({"frozen", {5000}, WeightFormat::kBf16});
    spec.parameters.back().frozen = true;
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
    std::vector<std::thread> trainers;
    for (int i = 0; i < spec.num_trainers; ++i) {
      trainers.emplace_back([&job, i] {
        ASSERT_OK_AND_ASSIGN(const auto session, Join(*job, /*connects=*/i != 1));
        EXPECT_OK(testing::PullTo(*session, kSteps));
      });
    }
    for (std::thread& trainer : trainers) trainer.join();
    ExpectTheReference(*job, kSteps);
    ASSERT_OK_AND_ASSIGN(const v1::GetStatusReply status, job->worker(Rank(0)).GetStatus(kLong));
    EXPECT_EQ(status.jobs(0).slots_differing(), 0);
    ASSERT_OK(testing::Delete(*client_, "job"));
  }
}

TEST_F(ConnectedPulling, Weights_AreThoseOfTheStepThatIsTakenOrWasCommitted) {
  const JobSpec spec = PulledJob("job", "fsdp=2", 3, 1);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
  ASSERT_OK_AND_ASSIGN(const auto session, Join(*job, /*connects=*/true));
  for (int64_t step = 0; step < 4; ++step) {
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, step));
    for (const bool taken : {false, true}) {
      SCOPED_TRACE(absl::StrCat("step ", step, " taken ", taken));
      if (taken) {
        ASSERT_OK(session->Take(kLong));
      }
      for (const ParameterSpec& parameter : spec.parameters) {
        ASSERT_OK_AND_ASSIGN(const ConstTensorView view, session->parameter(parameter.name));
        const absl::string_view bytes(static_cast<const char*>(view.data), view.data_bytes());
        EXPECT_TRUE(bytes == absl::string_view(learnt.weights.at(parameter.name)).substr(0, bytes.size()));
      }
    }
    ASSERT_OK(testing::PullTo(*session, step + 1));
  }
}

TEST_F(ConnectedPulling, SeatsAreCounted_AndOneThatIsLeftIsTheNextTrainers) {
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(PulledJob("job", "fsdp=2", 2, 1)));
  for (const bool connects : {true, true, false, true}) {
    ASSERT_OK_AND_ASSIGN(const auto session, Join(*job, connects));
    EXPECT_THAT(job->ConnectPulling(), StatusIs(Code::kResourceExhausted, HasSubstr("job job has its 1 trainers")));
    ASSERT_OK_AND_ASSIGN(const Work work, session->Take(kLong));
    EXPECT_EQ(work.slot, Slot(0));
  }
  ASSERT_OK_AND_ASSIGN(const auto session, Join(*job, /*connects=*/true));
  ASSERT_OK(testing::PullTo(*session, 2));
  ExpectTheReference(*job, 2);
  ASSERT_OK_AND_ASSIGN(const v1::GetStatusReply status, job->worker(Rank(0)).GetStatus(kLong));
  EXPECT_EQ(status.jobs(0).slots_reopened(), 4);
  ASSERT_EQ(status.jobs(0).trainers_size(), 1);
  EXPECT_EQ(status.jobs(0).trainers(0).pid(), 0);
}

TEST_F(ConnectedPulling, OfAssignedSlots_AndConnectOfPulledOnes_AreRefused) {
  ASSERT_OK_AND_ASSIGN(std::shared_ptr<Job> job, Create(PulledJob("job", "fsdp=2", 2, 1)));
  EXPECT_THAT(job->Connect({Slot(0)}), StatusIs(Code::kFailedPrecondition, HasSubstr("Job::ConnectPulling")));
  ASSERT_OK_AND_ASSIGN(job, Create(testing::OddJob("other", "fsdp=2", 2)));
  EXPECT_THAT(job->ConnectPulling(), StatusIs(Code::kFailedPrecondition, HasSubstr("are assigned: connect to those")));
}

TEST_F(ConnectedPulling, ATrainerThatLeaves_GivesItsSlotToOthersAtOnce) {
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(PulledJob("job", "fsdp=2", 3, 2)));
  ASSERT_OK_AND_ASSIGN(auto leaving, Join(*job, /*connects=*/true));
  ASSERT_OK_AND_ASSIGN(const auto staying, Join(*job, /*connects=*/true));
  ASSERT_OK_AND_ASSIGN(Work work, leaving->Take(kLong));
  ASSERT_OK(Finish(*leaving, work));  // what it has finished stays
  ASSERT_OK(leaving->Take(kLong));
  ASSERT_OK_AND_ASSIGN(work, staying->Take(kLong));
  EXPECT_EQ(work.slot, Slot(2));
  ASSERT_OK(Finish(*staying, work));
  EXPECT_THAT(staying->Take(kShort),
              StatusIs(Code::kDeadlineExceeded, HasSubstr("taken slots: 1 (a trainer connected to rank ")));
  leaving.reset();
  ASSERT_OK_AND_ASSIGN(work, staying->Take(kLong));
  EXPECT_EQ(work.slot, Slot(1));
  ASSERT_OK(Finish(*staying, work));
  ExpectTheReference(*job, 1);
}

// Processes that are killed, one after the other, while another one trains on.
TEST_F(ConnectedPulling, TrainersThatAreKilled_LoseNothing) {
  const JobSpec spec = PulledJob("job", "fsdp=2", 6, 3);
  constexpr int64_t kSteps = 60;
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
  const std::vector<std::string> command = {"tests/testing/test_trainer", cluster_->coordinator_address(), "job",
                                            absl::StrCat(kSteps), "pull-connected"};
  const std::string log = cluster_->folder().File("trainers.log");
  ASSERT_OK_AND_ASSIGN(const auto last, testing::Process::Start({command, log}));
  int kills = 0;
  while (last->alive()) {
    ASSERT_OK_AND_ASSIGN(const auto process, testing::Process::Start({command, log}));
    testing::Pause(absl::Milliseconds(20 + 10 * (kills % 5)));
    process->Kill9();
    ++kills;
  }
  EXPECT_GT(kills, 3);
  ASSERT_OK_AND_ASSIGN(const int status, last->Wait(kLong));
  EXPECT_EQ(status, 0) << testing::ReadFile(log);
  ExpectTheReference(*job, kSteps);
}

// The same slot by trainers of both kinds: their gradients are compared.
TEST_F(ConnectedPulling, ASecondResult_IsComparedWithTheFirst_OfTheOtherKind) {
  for (const bool same : {true, false}) {
    for (const bool late_connects : {true, false}) {
      SCOPED_TRACE(absl::StrCat("same ", same, " late_connects ", late_connects));
      JobSpec spec = PulledJob("job", "fsdp=2", 3, 3);
      spec.slot_timeout_ms = absl::ToInt64Milliseconds(kSlotTimeout);
      ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
      ASSERT_OK_AND_ASSIGN(const auto late, Join(*job, late_connects));
      ASSERT_OK_AND_ASSIGN(const auto other, Join(*job, !late_connects));
      ASSERT_OK_AND_ASSIGN(const Work late_work, late->Take(kLong));
      testing::Pause(kSlotTimeout * 3);
      ASSERT_OK_AND_ASSIGN(const Work work, other->Take(kLong));
      EXPECT_EQ(work.slot, late_work.slot);
      ExpectResult(Finish(*other, work), SlotResult::kAccepted);
      ASSERT_OK_AND_ASSIGN(const FinishOptions options, testing::WriteTaken(*late, late_work));
      ASSERT_OK_AND_ASSIGN(const TensorView view, late->gradient(spec.parameters[0].name));
      if (!same) static_cast<char*>(view.data)[0] ^= 1;
      ExpectResult(late->Finish(options), same ? SlotResult::kSame : SlotResult::kDiffers);
      ASSERT_OK(testing::PullTo(*other, 1));
      ExpectTheReference(*job, 1);
      ASSERT_OK(testing::Delete(*client_, "job"));
    }
  }
}

TEST_F(ConnectedPulling, ALateTrainer_BehindTheCommit_IsToldSo) {
  JobSpec spec = PulledJob("job", "fsdp=2", 2, 2);
  spec.slot_timeout_ms = absl::ToInt64Milliseconds(kSlotTimeout);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
  ASSERT_OK_AND_ASSIGN(const auto late, Join(*job, /*connects=*/true));
  ASSERT_OK_AND_ASSIGN(const auto other, Join(*job, /*connects=*/false));
  ASSERT_OK_AND_ASSIGN(const Work late_work, late->Take(kLong));
  testing::Pause(kSlotTimeout * 3);
  ASSERT_OK(testing::PullTo(*other, 1));
  EXPECT_THAT(Finish(*late, late_work), StatusIs(Code::kAborted, HasSubstr("take another slot")));
  ASSERT_OK_AND_ASSIGN(const Work next, late->Take(kLong));
  EXPECT_FALSE(next.slot.has_value());
  EXPECT_EQ(next.committed.step(), 1);
  ExpectTheReference(*job, 1);
}

TEST_F(ConnectedPulling, WhatIsWrong_IsSaid_AndTheSlotCanBeFinishedAgain) {
  JobSpec spec = PulledJob("job", "fsdp=2", 3, 1);
  spec.token_weights = true;
  spec.non_finite = NonFinitePolicy::kFail;
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
  ASSERT_OK_AND_ASSIGN(const auto session, Join(*job, /*connects=*/true));
  EXPECT_THAT(session->Finish({}), StatusIs(Code::kFailedPrecondition, HasSubstr("no slot of job job is taken")));
  ASSERT_OK_AND_ASSIGN(const Work work, session->Take(kLong));
  ASSERT_OK_AND_ASSIGN(const Work again, session->Take(kLong));
  EXPECT_EQ(again.slot, work.slot);
  ASSERT_OK_AND_ASSIGN(const FinishOptions options, testing::WriteTaken(*session, work));
  FinishOptions wrong = options;
  wrong.tokens = -1;
  EXPECT_THAT(session->Finish(wrong), StatusIs(Code::kInvalidArgument, HasSubstr("slot 0 has -1 tokens")));
  wrong = options;
  wrong.loss_scale = 0;
  EXPECT_THAT(session->Finish(wrong), StatusIs(Code::kInvalidArgument, HasSubstr("loss scale 0")));
  ASSERT_OK_AND_ASSIGN(const TensorView view, session->gradient(spec.parameters[0].name));
  std::memset(view.data, 0xff, BytesPerElement(view.format));
  EXPECT_THAT(session->Finish(options), StatusIs(Code::kInvalidArgument, HasSubstr("is not finite")));
  ASSERT_OK_AND_ASSIGN(wrong, testing::WriteTaken(*session, work));
  wrong.tokens = 0;
  EXPECT_THAT(session->Finish(wrong),
              StatusIs(Code::kInvalidArgument, HasSubstr("has no tokens, and the gradient of")));
  ASSERT_OK(Finish(*session, work));
  ASSERT_OK_AND_ASSIGN(const Work next, session->Take(kLong));
  ASSERT_OK_AND_ASSIGN(wrong, testing::WriteTaken(*session, next));
  for (double& rate : wrong.learning_rates) rate *= 2;
  EXPECT_THAT(session->Finish(wrong), StatusIs(Code::kInvalidArgument, HasSubstr("learning rate")));
  ASSERT_OK(Finish(*session, next));
  ASSERT_OK(testing::PullTo(*session, 2));
  ExpectTheReference(*job, 2);
}

TEST_F(ConnectedPulling, AGradientThatIsNotFinite_SkipsTheStep) {
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(PulledJob("job", "fsdp=2", 1, 1)));
  ASSERT_OK_AND_ASSIGN(const auto session, Join(*job, /*connects=*/true));
  ASSERT_OK_AND_ASSIGN(const Work work, session->Take(kLong));
  ASSERT_OK_AND_ASSIGN(const FinishOptions options, testing::WriteTaken(*session, work));
  ASSERT_OK_AND_ASSIGN(const TensorView view, session->gradient(job->spec().parameters[0].name));
  std::memset(view.data, 0xff, BytesPerElement(view.format));
  ASSERT_OK_AND_ASSIGN(const PullingSession::Next next, session->FinishAndTake(options));
  EXPECT_EQ(next.result, SlotResult::kAccepted);
  EXPECT_TRUE(next.work.committed.skipped());
  EXPECT_THAT(next.work.committed.skip_reason(), HasSubstr("slot 0: gradient of"));
}

// Workers that a node keeps: a connected trainer's slot goes to others when its worker dies, and it takes a new seat.
TEST_F(ConnectedPulling, WorkersThatAreKilled_LoseNothing) {
  ClusterOptions options;
  options.retained = true;
  options.heartbeat_timeout = absl::Minutes(5);
  ASSERT_NO_FATAL_FAILURE(Start(options));
  const JobSpec spec = PulledJob("job", "ddp=2,fsdp=2", 8, 3);
  constexpr int64_t kSteps = 40;
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
  std::vector<std::thread> trainers;
  std::atomic<int> running{spec.num_trainers};
  for (int i = 0; i < spec.num_trainers; ++i) {
    trainers.emplace_back([&, i] {
      const auto session = Join(*job, /*connects=*/i != 1);
      absl::Status status = session.status();
      while (status.ok() && (*session)->committed_step().value() < kSteps) {
        status = testing::PullTo(**session, kSteps, absl::Minutes(2));
        if (absl::IsAborted(status)) status = absl::OkStatus();
      }
      EXPECT_OK(status);
      --running;
    });
  }
  int kills = 0;
  for (; running.load() > 0 && kills < 20; ++kills) {
    const std::string name = absl::StrCat("w-", kills % 4);
    const pid_t pid = cluster_->PidOf(name);
    if (pid > 0) kill(pid, SIGKILL);
    EXPECT_GT(cluster_->AwaitNextIncarnation(name, pid, kLong), 0);
  }
  for (std::thread& trainer : trainers) trainer.join();
  EXPECT_GT(kills, 3);
  ExpectTheReference(*job, kSteps);
}

}  // namespace
}  // namespace shardmesh
