// Slots that any trainer may take: whoever takes which, in whatever order they are finished, the bits are those of one
// process; nobody waits for a trainer that died or does not finish; a slot counts once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "core/mesh/mesh_spec.h"
#include "tests/testing/cluster.h"
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
constexpr absl::Duration kSlotTimeout = absl::Milliseconds(2);
constexpr absl::Duration kShort = absl::Milliseconds(20);  // for what may not come before another trainer goes on

uint32_t Seed() {
  const auto seed = static_cast<uint32_t>(testing::NumberOfEnvironment("SHARDMESH_SEED", std::random_device()()));
  std::cout << "SHARDMESH_SEED=" << seed << "\n";
  return seed;
}

class PulledSlots : public testing::PullingJobs {};

// Trainers whose calls one test thread makes, in an order that it draws: every delay that there may be between them.
class Schedule {
 public:
  Schedule(std::vector<std::unique_ptr<PullingSession>> sessions, uint32_t seed)
      : sessions_(std::move(sessions)), works_(sessions_.size()), random_(seed) {}

  absl::Status RunTo(int64_t last) {
    const absl::Time deadline = MonotonicNow() + absl::Minutes(2);
    while (!AllKnow(last)) {
      if (MonotonicNow() > deadline) return absl::DeadlineExceededError("the schedule did not end");
      RETURN_IF_ERROR(Advance(Draw(sessions_.size()), last));
    }
    return absl::OkStatus();
  }
  int peak() const { return peak_; }

 private:
  size_t Draw(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random_); }
  bool AllKnow(int64_t step) const {
    return std::all_of(sessions_.begin(), sessions_.end(),
                       [&](const auto& session) { return session->committed_step().value() >= step; });
  }

  absl::StatusOr<Work> Next(PullingSession& session, std::optional<Work>& taken) {
    if (!taken.has_value()) return session.Take(kShort);
    ASSIGN_OR_RETURN(FinishOptions options, testing::WriteTaken(session, *taken));
    taken.reset();
    options.timeout = kShort;
    ASSIGN_OR_RETURN(PullingSession::Next next, session.FinishAndTake(options));
    return std::move(next.work);
  }

  absl::Status Advance(size_t i, int64_t last) {
    if (sessions_[i]->committed_step().value() >= last) return absl::OkStatus();
    if (works_[i].has_value() && Draw(2) == 0) {
      ASSIGN_OR_RETURN(const FinishOptions options, testing::WriteTaken(*sessions_[i], *works_[i]));
      works_[i].reset();
      return sessions_[i]->Finish(options).status();
    }
    const absl::StatusOr<Work> work = Next(*sessions_[i], works_[i]);
    if (absl::IsDeadlineExceeded(work.status())) return absl::OkStatus();  // others have to go on first
    RETURN_IF_ERROR(work.status());
    if (work->slot.has_value()) works_[i] = *work;
    peak_ = std::max(peak_, work->committed.peak_gradients());
    return absl::OkStatus();
  }

  std::vector<std::unique_ptr<PullingSession>> sessions_;
  std::vector<std::optional<Work>> works_;  // taken, not finished
  std::mt19937 random_;
  int peak_ = 0;
};

TEST_F(PulledSlots, HundredOrdersOfArrival_AreTheBitsOfOneProcess) {
  std::mt19937 random(Seed());
  const auto draw = [&](int from, int to) { return std::uniform_int_distribution<int>(from, to)(random); };
  constexpr const char* kMeshes[] = {"fsdp=1", "fsdp=2", "fsdp=3", "ddp=2,fsdp=2", "fsdp=4"};
  constexpr int64_t kSteps = 3;
  for (int round = 0; round < 100; ++round) {
    JobSpec spec = PulledJob(absl::StrCat("round-", round), kMeshes[draw(0, 4)], draw(1, 19), draw(1, 6));
    spec.gradient_format = draw(0, 1) == 0 ? Format::kBf16 : Format::kFp32;
    spec.clip_norm = draw(0, 2) == 0 ? 0.5 : 0;
    spec.token_weights = spec.num_slots >= 3 && draw(0, 1) == 0;
    SCOPED_TRACE(absl::StrCat(spec.name, " on ", spec.mesh.ToString(), ", ", spec.num_slots, " slots, ",
                              spec.num_trainers, " trainers"));
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
    std::vector<std::unique_ptr<PullingSession>> sessions(draw(1, spec.num_trainers));
    for (auto& session : sessions) {
      ASSERT_OK_AND_ASSIGN(session, Join(*job, /*connects=*/draw(0, 3) == 0));
    }
    Schedule schedule(std::move(sessions), random());
    ASSERT_OK(schedule.RunTo(kSteps));
    EXPECT_LE(schedule.peak(), job->plan().slots().live_gradients() + 1);
    EXPECT_GT(schedule.peak(), 0);
    ASSERT_NO_FATAL_FAILURE(ExpectTheReference(*job, kSteps));
    ASSERT_FALSE(HasFailure());
    ASSERT_OK(testing::Delete(*client_, spec.name));
  }
}

TEST_F(PulledSlots, TrainersAtOnce_AreTheBitsOfOneProcess) {
  const JobSpec spec = PulledJob("job", "fsdp=2", 16, 4);
  constexpr int64_t kSteps = 20;
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
  std::vector<std::thread> trainers;
  for (int i = 0; i < spec.num_trainers; ++i) {
    trainers.emplace_back([&] {
      ASSERT_OK_AND_ASSIGN(const auto session, Join(*job));
      EXPECT_OK(testing::PullTo(*session, kSteps));
    });
  }
  for (std::thread& trainer : trainers) trainer.join();
  ExpectTheReference(*job, kSteps);
  ASSERT_OK_AND_ASSIGN(const v1::GetStatusReply status, job->worker(Rank(0)).GetStatus(kLong));
  EXPECT_EQ(status.jobs(0).slots_reopened(), 0);
  EXPECT_EQ(status.jobs(0).slots_differing(), 0);
}

TEST_F(PulledSlots, ASessionThatEnded_LeavesItsSeatToTheNext) {
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(PulledJob("job", "fsdp=2", 2, 1)));
  for (int i = 0; i < 5; ++i) {
    ASSERT_OK_AND_ASSIGN(const auto session, Join(*job));
    ASSERT_OK_AND_ASSIGN(const Work work, session->Take(kLong));
    EXPECT_EQ(work.slot, Slot(0));
  }
  ASSERT_OK_AND_ASSIGN(const auto session, Join(*job));
  ASSERT_OK(testing::PullTo(*session, 2));
  ExpectTheReference(*job, 2);
  ASSERT_OK_AND_ASSIGN(const v1::GetStatusReply status, job->worker(Rank(0)).GetStatus(kLong));
  EXPECT_EQ(status.jobs(0).slots_reopened(), 5);
  ASSERT_EQ(status.jobs(0).trainers_size(), 1);
  EXPECT_EQ(status.jobs(0).trainers(0).pid(), getpid());
  EXPECT_EQ(status.jobs(0).trainers(0).slots_finished(), 4);
}

TEST_F(PulledSlots, EveryKindOfCommand_AreTheBitsOfOneProcess) {
  JobSpec spec = PulledJob("job", "ddp=2,fsdp=2", 6, 2);
  spec.clip_norm = 0.5;
  spec.check_every = 2;
  spec.parameters.push_back(
      {"quantized", {70, 300}, WeightFormat::kBf16Sr, "", StateFormat::kDyn8, GatherFormat::kFp8Row});
  spec.parameters.push_back({"matrix", {70, 160}});
  spec.parameters.back().group = 1;
  spec.more_groups = {OptimizerHyper::Defaults(OptimizerKind::kMuon)};
  spec.parameters.push_back({"frozen", {5000}, WeightFormat::kBf16});
  spec.parameters.back().frozen = true;
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
  ASSERT_OK_AND_ASSIGN(const auto one, Join(*job));
  ASSERT_OK_AND_ASSIGN(const auto other, Join(*job));
  std::thread thread([&] { EXPECT_OK(testing::PullTo(*other, 6)); });
  EXPECT_OK(testing::PullTo(*one, 6));
  thread.join();
  ExpectTheReference(*job, 6);
}

TEST_F(PulledSlots, TokenWeights_OfAssignedSlots_AreTheBitsOfOneProcess) {
  JobSpec spec = testing::OddJob("job", "fsdp=2", 5);
  spec.token_weights = true;
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0), Slot(1), Slot(2), Slot(3), Slot(4)}));
  ASSERT_OK(session->AwaitWeights(kLong));
  ASSERT_OK(testing::TrainTo(*session, 4));
  ExpectTheReference(*job, 4);
  StepOptions options;
  EXPECT_THAT(session->Step(options), StatusIs(Code::kInvalidArgument, HasSubstr("0 numbers of tokens for 5 slots")));
  options.tokens = {1, 2, -3, 4, 5};
  EXPECT_THAT(session->Step(options), StatusIs(Code::kInvalidArgument, HasSubstr("slot 2 has -3 tokens")));
  options.tokens = {0, 0, 0, 0, 0};
  ASSERT_OK_AND_ASSIGN(const v1::StepReply reply, session->Step(options));
  EXPECT_TRUE(reply.skipped());
  EXPECT_EQ(reply.skip_reason(), "no slot had a token");
}

TEST_F(PulledSlots, ATrainerThatDies_GivesItsSlotToOthersAtOnce) {
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(PulledJob("job", "fsdp=2", 3, 2)));
  ASSERT_OK_AND_ASSIGN(auto dying, Join(*job));
  ASSERT_OK_AND_ASSIGN(const auto living, Join(*job));
  ASSERT_OK_AND_ASSIGN(Work work, dying->Take(kLong));
  ASSERT_OK(Finish(*dying, work));  // what it has finished stays
  ASSERT_OK(dying->Take(kLong));
  ASSERT_OK_AND_ASSIGN(work, living->Take(kLong));
  EXPECT_EQ(work.slot, Slot(2));
  ASSERT_OK(Finish(*living, work));
  EXPECT_THAT(living->Take(kShort), StatusIs(Code::kDeadlineExceeded, HasSubstr("no slot of step 1 was open")));
  dying.reset();
  ASSERT_OK_AND_ASSIGN(work, living->Take(kLong));
  EXPECT_EQ(work.slot, Slot(1));
  ASSERT_OK(Finish(*living, work));
  ExpectTheReference(*job, 1);
}

// `late` has taken a slot of two, too long ago, and `other` has it now.
struct LateTrainer : PulledSlots {
  void SetUp() override {
    PulledSlots::SetUp();
    JobSpec spec = PulledJob("job", "fsdp=2", 2, 2);
    spec.slot_timeout_ms = absl::ToInt64Milliseconds(kSlotTimeout);
    ASSERT_OK_AND_ASSIGN(job, Create(spec));
    ASSERT_OK_AND_ASSIGN(late, Join(*job));
    ASSERT_OK_AND_ASSIGN(other, Join(*job));
    ASSERT_OK_AND_ASSIGN(late_work, late->Take(kLong));
    EXPECT_EQ(late_work.slot, Slot(0));
    testing::Pause(kSlotTimeout * 3);
    ASSERT_OK_AND_ASSIGN(other_work, other->Take(kLong));
    EXPECT_EQ(other_work.slot, Slot(0));
  }
  std::shared_ptr<Job> job;
  std::unique_ptr<PullingSession> late, other;
  Work late_work, other_work;
};

TEST_F(LateTrainer, FinishesFirstAfterAll_AndCounts) {
  ExpectResult(Finish(*late, late_work), SlotResult::kAccepted);
  ASSERT_OK(testing::PullTo(*late, 1));
  ExpectTheReference(*job, 1);
  EXPECT_THAT(Finish(*other, other_work), StatusIs(Code::kAborted, HasSubstr("slot 0 of step 1 was taken back")));
}

TEST_F(LateTrainer, FinishesBehindTheCommit_AndIsToldSo) {
  ExpectResult(Finish(*other, other_work), SlotResult::kAccepted);
  ASSERT_OK(testing::PullTo(*other, 1));
  ExpectTheReference(*job, 1);
  EXPECT_THAT(Finish(*late, late_work), StatusIs(Code::kAborted, HasSubstr("take another slot")));
  ASSERT_OK_AND_ASSIGN(const Work next, late->Take(kLong));
  EXPECT_FALSE(next.slot.has_value());
  EXPECT_EQ(next.committed.step(), 1);
}

// Of three slots one is not finished, so the step is open when the second result of another comes.
TEST_F(PulledSlots, ASecondResult_IsComparedWithTheFirst) {
  for (const bool same : {true, false}) {
    JobSpec spec = PulledJob(absl::StrCat("job-", same), "fsdp=2", 3, 3);
    spec.slot_timeout_ms = absl::ToInt64Milliseconds(kSlotTimeout);
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
    ASSERT_OK_AND_ASSIGN(const auto late, Join(*job));
    ASSERT_OK_AND_ASSIGN(const auto other, Join(*job));
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
  }
}

TEST_F(PulledSlots, WhatIsWrong_IsSaid_AndTheSlotCanBeFinishedAgain) {
  JobSpec spec = PulledJob("job", "fsdp=2", 3, 1);
  spec.token_weights = true;
  spec.non_finite = NonFinitePolicy::kFail;
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
  EXPECT_THAT(job->Attach({Slot(0)}), StatusIs(Code::kInvalidArgument, HasSubstr("has pulled slots")));
  ASSERT_OK_AND_ASSIGN(const auto session, Join(*job));
  EXPECT_THAT(Join(*job), StatusIs(Code::kResourceExhausted, HasSubstr("job job has its 1 trainers")));
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
  std::fill_n(static_cast<char*>(view.data), BytesPerElement(view.format), '\x7f');
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

TEST_F(PulledSlots, AGradientThatIsNotFinite_SkipsTheStep) {
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(PulledJob("job", "fsdp=2", 2, 1)));
  ASSERT_OK_AND_ASSIGN(const auto session, Join(*job));
  ASSERT_OK_AND_ASSIGN(Work work, session->Take(kLong));
  ASSERT_OK(Finish(*session, work));
  ASSERT_OK_AND_ASSIGN(work, session->Take(kLong));
  ASSERT_OK_AND_ASSIGN(const FinishOptions options, testing::WriteTaken(*session, work));
  ASSERT_OK_AND_ASSIGN(const TensorView view, session->gradient(job->spec().parameters[0].name));
  std::fill_n(static_cast<char*>(view.data), BytesPerElement(view.format), '\x7f');
  ASSERT_OK_AND_ASSIGN(const PullingSession::Next next, session->FinishAndTake(options));
  EXPECT_EQ(next.result, SlotResult::kAccepted);
  EXPECT_TRUE(next.work.committed.skipped());
  EXPECT_THAT(next.work.committed.skip_reason(), HasSubstr("slot 1: gradient of"));
}

// Workers that a node keeps: trainers see a pause. A worker that is killed at its start again and again is started
// later and later, up to 5 s each time, so nobody here takes silence for death.
TEST_F(PulledSlots, WorkersThatAreKilled_LoseNothing) {
  ClusterOptions options;
  options.retained = true;
  options.heartbeat_timeout = absl::Minutes(5);
  ASSERT_NO_FATAL_FAILURE(Start(options));
  std::mt19937 random(Seed());
  const JobSpec spec = PulledJob("job", "ddp=2,fsdp=2", 12, 3);
  constexpr int64_t kSteps = 60;
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Create(spec));
  std::vector<std::thread> trainers;
  std::atomic<int> running{spec.num_trainers};
  for (int i = 0; i < spec.num_trainers; ++i) {
    trainers.emplace_back([&] {
      const auto session = Join(*job);
      EXPECT_OK(session.ok() ? testing::PullTo(**session, kSteps, absl::Minutes(2)) : session.status());
      --running;
    });
  }
  int kills = 0;
  for (; running.load() > 0 && kills < 40; ++kills) {
    const std::string name = absl::StrCat("w-", random() % 4);
    const pid_t pid = cluster_->PidOf(name);
    if (pid > 0) kill(pid, SIGKILL);
    EXPECT_GT(cluster_->AwaitNextIncarnation(name, pid, kLong), 0);
    testing::Pause(absl::Milliseconds(random() % 40));
  }
  for (std::thread& trainer : trainers) trainer.join();
  std::cout << kills << " kills\n";
  EXPECT_GT(kills, 5);
  ExpectTheReference(*job, kSteps);
}

}  // namespace
}  // namespace shardmesh
