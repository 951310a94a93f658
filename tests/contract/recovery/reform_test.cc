// A job that loses a worker for good goes on with the others, where they have a copy of each shard: on another mesh, at
// a later epoch, at the step that was decided. Trainers open it again, and it learns the bits of one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/fault_point.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"
#include "tests/testing/training/two_trainers.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(2), kLong = absl::Seconds(30);
constexpr int64_t kSteps = 12;
constexpr int kNth = 5;  // of coming to a point: after some steps, and before all

class Reform : public ::testing::Test {
 protected:
  void Start(int workers, const std::string& faults = "", ClusterOptions options = {}) {
    setenv("SHARDMESH_FAULT", faults.c_str(), 1);
    if (faults.empty()) unsetenv("SHARDMESH_FAULT");
    options.workers = workers;
    options.heartbeat_timeout = kHeartbeatTimeout;
    options.worker_program = "tests/testing/faulty_worker";
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start(options));
    Connect();
  }
  void Connect() {
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
  }
  void Create(const JobSpec& spec) {
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(spec));
    ASSERT_EQ(job_->members()[0].worker(), retained_ ? "w-0" : "w0");
    ASSERT_OK(testing::Initialize(*job_));
  }

  void Train(int64_t last) { testing::TrainByTwo(*client_, job_, last); }
  // On which mesh, at which epoch.
  void ExpectLearnt(const std::string& mesh, int64_t epoch, int64_t steps = kSteps) {
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_->OpenJob(job_->spec().name));
    EXPECT_EQ(job->spec().mesh.ToString(), mesh);
    EXPECT_EQ(job->epoch(), Epoch(epoch));
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, steps));
    EXPECT_EQ(learnt, testing::ReferenceOf(job_->spec(), steps));
  }
  void AwaitEvent(const std::string& event) const {  // of the coordinator
    const absl::Time deadline = MonotonicNow() + kLong;
    while (!absl::StrContains(cluster_->coordinator().Log(), "event=" + event) && MonotonicNow() < deadline) {
      testing::Pause(absl::Milliseconds(5));
    }
  }
  bool IsMember(const Job& job, const std::string& worker) const {
    return std::any_of(job.members().begin(), job.members().end(),
                       [&](const v1::Member& member) { return member.worker() == worker; });
  }

  bool retained_ = false;  // by a node
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
};

struct Case {
  FaultPointInfo info;
  std::string worker;  // w0 is the lead
  bool pulled = false;
  int nth = kNth;
  bool bucketed = false;
};

class ReformAtPoints : public Reform, public ::testing::WithParamInterface<Case> {};

TEST_P(ReformAtPoints, TheOthersGoOn_FromTheStepThatWasDecided) {
  const Case& c = GetParam();
  ASSERT_NO_FATAL_FAILURE(Start(4, absl::StrCat(c.worker, ":", c.info.name, ":kill:", c.nth)));
  JobSpec spec = testing::OddJob("job", "ddp=2,fsdp=2", 2);
  spec.clip_norm = 0.5;
  spec.parameters[1].gather = GatherFormat::kFp8Row;
  if (c.bucketed) spec.residency = Residency::kBucket;
  if (c.pulled) {
    spec.num_slots = 5;
    spec.slot_mode = SlotMode::kPulled;
    spec.num_trainers = 2;
  }
  ASSERT_NO_FATAL_FAILURE(Create(spec));
  Train(kSteps);
  ASSERT_OK_AND_ASSIGN(const int ended, cluster_->worker(c.worker).Wait(absl::Seconds(5)));
  EXPECT_EQ(ended, 128 + SIGKILL) << "the point was not reached";
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=2,fsdp=1", 2));
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const FaultPointInfo& info : kFaultPoints) {
    for (const bool pulled : {false, true}) {
      if (info.stage != (pulled ? FaultStage::kPulled : FaultStage::kStepping)) continue;
      const bool pushed = info.point == FaultPoint::kGradientShardReceived;  // slot 1's go to the second replica
      cases.push_back({info, pushed ? "w2" : "w0", pulled});
      if (!info.lead) cases.push_back({info, pushed ? "w3" : "w1", pulled});
      // The fifth command is kQuantize; the fourth is a step, which nobody has seen.
      if (info.point == FaultPoint::kDecided) cases.push_back({info, "w0", pulled, 4});
      // By bucket: in the sums of a step, before and behind them.
      if (!pulled && !pushed) cases.push_back({info, info.lead ? "w0" : "w1", pulled, kNth + 2, /*bucketed=*/true});
    }
  }
  return cases;
}

std::string NameOf(const ::testing::TestParamInfo<Case>& info) {
  std::string name = absl::StrCat(info.param.info.name, "_", info.param.worker, "_", info.param.nth,
                                  info.param.bucketed ? "_bucketed" : "");
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(, ReformAtPoints, ::testing::ValuesIn(Cases()), NameOf);

struct Mesh {
  const char *before, *after;
  int workers;
  std::vector<std::string> killed;
  Residency residency = Residency::kFull;
};

class ReformMeshes : public Reform, public ::testing::WithParamInterface<Mesh> {};

TEST_P(ReformMeshes, EveryFormat_LearnsTheReferencesBits) {
  const Mesh& mesh = GetParam();
  ASSERT_NO_FATAL_FAILURE(Start(mesh.workers));
  JobSpec spec = testing::EverythingJob("job", mesh.before);
  spec.residency = mesh.residency;
  ASSERT_NO_FATAL_FAILURE(Create(spec));
  Train(3);
  for (const std::string& worker : mesh.killed) cluster_->worker(worker).Kill9();
  Train(6);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_->OpenJob("job"));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt(mesh.after, job->epoch().value(), 6));
  EXPECT_GT(job->epoch(), Epoch(1));
}

INSTANTIATE_TEST_SUITE_P(, ReformMeshes,
                         ::testing::Values(Mesh{"ddp=2,fsdp=4", "ddp=2,fsdp=3", 8, {"w1"}},
                                           Mesh{"ddp=2,fsdp=4", "ddp=2,fsdp=2", 8, {"w0", "w2", "w5"}},
                                           Mesh{"ddp=3", "ddp=2", 3, {"w0"}}, Mesh{"ddp=2", "ddp=1", 2, {"w1"}},
                                           Mesh{"fsdp=3,ddp=2", "fsdp=2,ddp=2", 6, {"w3", "w4"}},
                                           Mesh{"ddp=2,fsdp=2", "ddp=2,fsdp=2", 5, {"w2"}},  // w4 takes its place
                                           Mesh{"ddp=2,fsdp=3", "ddp=2,fsdp=2", 6, {"w1"}, Residency::kBucket},
                                           Mesh{"ddp=3", "ddp=2", 3, {"w0"}, Residency::kBucket}));

// Sums of the open step end with the epoch, whatever they are of: its buckets are declared again, and so are uses.
TEST_F(Reform, BucketsThatAreSummedAlready_AreDeclaredAgain) {
  ASSERT_NO_FATAL_FAILURE(Start(4));
  JobSpec spec = testing::OddJob("job", "ddp=2,fsdp=2", 2);
  spec.residency = Residency::kBucket;
  ASSERT_NO_FATAL_FAILURE(Create(spec));
  Train(3);
  {
    ASSERT_OK_AND_ASSIGN(const auto session, job_->Attach({Slot(0), Slot(1)}));
    ASSERT_OK(session->AwaitWeights(kLong));
    ASSERT_OK(session->Acquire(1, kLong));
    ASSERT_GE(job_->plan().buckets().size(), 4u);
    for (const int bucket : {0, 1, 2}) {  // when the third may be followed by another, one is summed at least
      ASSERT_OK(testing::WriteBucketGradients(*session, Step(999), bucket));
      ASSERT_OK(session->DeclareBucket(bucket, kLong));
    }
    cluster_->worker("w1").Kill9();
    EXPECT_THAT(testing::TrainTo(*session, 4, kLong),
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr("open the job again")));
    EXPECT_THAT(session->Acquire(2, kLong), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("")));
  }
  Train(kSteps);
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=2,fsdp=1", 2));
}

TEST_F(Reform, OneAfterTheOther_AsLongAsACopyLives_ThenTheErrorNamesTheStep) {
  ASSERT_NO_FATAL_FAILURE(Start(4));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "ddp=2,fsdp=2", 2)));
  Train(3);
  cluster_->worker("w0").Kill9();
  Train(6);
  cluster_->worker("w1").Kill9();
  Train(9);
  cluster_->worker("w2").Kill9();
  Train(kSteps);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> last, client_->OpenJob("job"));
  ASSERT_EQ(last->members().size(), 1u);
  EXPECT_EQ(last->members()[0].worker(), "w3");
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=1,fsdp=1", last->epoch().value()));
  cluster_->worker("w3").Kill9();
  EXPECT_THAT(client_->Reopen(*last).status(),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr("worker w3"), HasSubstr("newest known step is"), HasSubstr("checkpoint"))));
}

TEST_F(Reform, AWorkerThatComesLater_HasNoCopyYet) {
  ASSERT_NO_FATAL_FAILURE(Start(2));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "ddp=2", 2)));
  Train(3);
  cluster_->worker("w1").Kill9();
  Train(6);
  ASSERT_OK(cluster_->StartWorker("w1"));
  cluster_->worker("w0").Kill9();
  const auto ended = testing::TrainOver(*client_, job_, [](Job& job) { return testing::TrainHalf(job, true, 9); });
  EXPECT_THAT(ended, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("its mesh has no replicas")));
}

TEST_F(Reform, Stopped_TheOthersGoOn_AndItGoesOnWithoutTheJob) {
  ASSERT_NO_FATAL_FAILURE(Start(4, "w0:decided:stop:5"));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "ddp=2,fsdp=2", 2)));
  const absl::Time begin = MonotonicNow();
  Train(kSteps);
  EXPECT_LT(MonotonicNow() - begin, 2 * kHeartbeatTimeout + absl::Seconds(8));
  cluster_->worker("w0").Continue();
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=2,fsdp=1", 2));
  Train(kSteps + 3);
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=2,fsdp=1", 2, kSteps + 3));
}

TEST_F(Reform, AWorkerThatIsToldToStop_IsNotMissed) {
  ASSERT_NO_FATAL_FAILURE(Start(4));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "ddp=2,fsdp=2", 2)));
  Train(5);
  cluster_->worker("w1").Signal(SIGTERM);
  Train(kSteps);
  AwaitEvent("job_reforms");  // the steps may be through before the worker is
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=2,fsdp=1", 2));
}

class SecondLoss : public Reform, public ::testing::WithParamInterface<std::string> {};

// Another member dies while its shard is on the way.
TEST_P(SecondLoss, WhileTheJobReforms_TheRestGoOn) {
  ASSERT_NO_FATAL_FAILURE(Start(6, absl::StrCat("w3:", GetParam(), ":kill:2")));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "ddp=3,fsdp=2", 2)));
  cluster_->worker("w1").Kill9();
  Train(kSteps);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_->OpenJob("job"));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt(job->spec().mesh.ToString(), job->epoch().value()));
  ASSERT_OK_AND_ASSIGN(const int ended, cluster_->worker("w3").Wait(absl::Seconds(5)));
  EXPECT_EQ(ended, 128 + SIGKILL) << "the point was not reached";
  EXPECT_FALSE(IsMember(*job, "w3"));
}

INSTANTIATE_TEST_SUITE_P(, SecondLoss, ::testing::Values("assigned", "prepared"));

// Gradients are the redo log: who goes on reads them until the step is done, whatever a trainer does that was told of
// the loss.
TEST_F(Reform, ATrainerThatWritesAfterItsStepFailed_ChangesNothing) {
  ASSERT_NO_FATAL_FAILURE(Start(4, "w1:command-seen:kill:5,w2:command-seen:delay:5,w3:command-seen:delay:5"));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "ddp=2,fsdp=2", 1)));
  ASSERT_OK_AND_ASSIGN(const auto session, job_->Attach({Slot(0)}));
  ASSERT_OK(session->AwaitWeights(kLong));
  EXPECT_THAT(testing::TrainTo(*session, kSteps, kLong),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("open the job again")));
  ASSERT_OK(testing::WriteGradients(*session, Step(999)));
  const auto train = [](Job& job) { return testing::TrainHalf(job, true, kSteps); };
  ASSERT_OK(testing::TrainOver(*client_, job_, train));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=2,fsdp=1", 2));
}

TEST_F(Reform, TheCoordinatorDiesMeanwhile_TheNextOneGoesOn) {
  ASSERT_NO_FATAL_FAILURE(Start(4, "w0:prepared:delay:2"));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "ddp=2,fsdp=2", 2)));
  Train(5);
  cluster_->worker("w1").Kill9();
  AwaitEvent("job_reforms");
  cluster_->coordinator().Kill9();
  ASSERT_OK(cluster_->RestartCoordinator());
  Train(kSteps);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_->OpenJob("job"));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=2,fsdp=1", job->epoch().value()));
}

// A version that was published is there again, and a step that was done is not done twice.
TEST_F(Reform, ReadersAndRepeatedSteps_FindWhatTheyFoundBefore) {
  ASSERT_NO_FATAL_FAILURE(Start(6));
  ASSERT_NO_FATAL_FAILURE(Create(testing::EverythingJob("job", "ddp=3,fsdp=2")));
  Train(5);
  ASSERT_OK_AND_ASSIGN(const Learnt before, testing::Learn(*job_, 5));
  std::shared_ptr<Job> job = job_;
  for (int lost = 0; lost < 2; ++lost) {  // and again, without a step or a digest between
    cluster_->worker(job->members()[0].worker()).Kill9();
    ASSERT_OK_AND_ASSIGN(job, client_->Reopen(*job));
  }
  ASSERT_OK_AND_ASSIGN(const Learnt after, testing::Learn(*job, 5));
  EXPECT_EQ(after, before);
  // Not with the plan of before. A worker that the job continues without may not have been told so yet: then it serves
  // what it published at its own epoch, and nothing of a later one.
  const absl::Time deadline = MonotonicNow() + kLong;
  for (auto pulled = job_->Pull({VersionChoice::kLatest}, kLong); pulled.ok();
       pulled = job_->Pull({VersionChoice::kLatest}, kLong)) {
    ASSERT_EQ(pulled->epoch(), job_->epoch());
    ASSERT_EQ(pulled->step(), Step(5));
    ASSERT_LT(MonotonicNow(), deadline);
  }
  v1::StepRequest again;
  again.set_job("job");
  again.set_epoch(job->epoch().value());
  again.add_slots(0);
  for (const int64_t step : {4, 5}) {
    again.set_step(step);
    ASSERT_OK_AND_ASSIGN(const v1::StepReply reply, job->worker(Rank(0)).Step(again, kLong));
    EXPECT_TRUE(reply.already_applied());
    EXPECT_GT(reply.gradient_norm(), 0) << step;
  }
}

// Its other members have a copy of each shard, and it may have no memory left.
TEST_F(Reform, AMemberThatCannotTakeItsPlace_IsDoneWithout) {
  ASSERT_NO_FATAL_FAILURE(Start(6, "w3:prepared:error:2"));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "ddp=3,fsdp=2", 2)));
  Train(5);
  cluster_->worker("w1").Kill9();
  Train(kSteps);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_->OpenJob("job"));
  EXPECT_FALSE(IsMember(*job, "w3"));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=3,fsdp=1", 3));
}

// Before anybody was told that it is READY again: workers hear so with their next heartbeat.
TEST_F(Reform, AnotherLoss_WhenItIsJustReady) {
  ASSERT_NO_FATAL_FAILURE(Start(4, "", {.heartbeat_interval = absl::Seconds(1)}));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "ddp=4", 2)));
  Train(3);
  std::shared_ptr<Job> job = job_;
  for (int lost = 0; lost < 3; ++lost) {
    cluster_->worker(job->members().back().worker()).Kill9();
    ASSERT_OK_AND_ASSIGN(job, client_->Reopen(*job));
  }
  Train(6);
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=1", 4, 6));
}

// Their trainers and readers may have been told of them.
TEST_F(Reform, InitialWeightsThatWereToldOf_AreThere) {
  ASSERT_NO_FATAL_FAILURE(Start(4, "w0:step-committed:kill:1"));
  ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(testing::OddJob("job", "ddp=2,fsdp=2", 2)));
  testing::Initialize(*job_).IgnoreError();  // it asks the one that dies, or another
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_->Reopen(*job_));
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, 0));
  EXPECT_EQ(learnt, testing::ReferenceOf(job_->spec(), 0));
}

// Workers of a node: one is stopped for too long; those that are left come back as ever.
TEST_F(Reform, KeptWorkers_ComeBackToAJobThatReformed) {
  retained_ = true;
  ASSERT_NO_FATAL_FAILURE(Start(4, "", {.retained = true}));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "ddp=2,fsdp=2", 2)));
  Train(3);
  const pid_t stopped = cluster_->PidOf("w-1");
  ASSERT_EQ(kill(stopped, SIGSTOP), 0);
  Train(6);
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=2,fsdp=1", 2, 6));
  ASSERT_OK_AND_ASSIGN(job_, client_->OpenJob("job"));
  for (const v1::Member& member : job_->members()) {
    const pid_t pid = cluster_->PidOf(member.worker());
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    ASSERT_GT(cluster_->AwaitNextIncarnation(member.worker(), pid, kLong), 0);
    Train(kSteps);
    ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=2,fsdp=1", 2));
  }
  kill(stopped, SIGCONT);
}

// It has joined, and what its last incarnation held is not mapped yet.
TEST_F(Reform, ANextIncarnationThatIsJustBuilding_GivesWhatItsLastOneHeld) {
  retained_ = true;
  ASSERT_NO_FATAL_FAILURE(Start(2, "w-0:assigned:delay:1", {.retained = true}));
  ASSERT_NO_FATAL_FAILURE(Create(testing::OddJob("job", "ddp=2", 2)));
  Train(3);
  const pid_t pid = cluster_->PidOf("w-0");
  ASSERT_EQ(kill(pid, SIGKILL), 0);
  AwaitEvent("worker_resumed");
  ASSERT_EQ(kill(cluster_->PidOf("w-1"), SIGTERM), 0);
  Train(6);
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=1", 2, 6));
}

TEST_F(Reform, WithoutWeights_ItBeginsAnew) {
  ASSERT_NO_FATAL_FAILURE(Start(4));
  ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(testing::OddJob("job", "ddp=2,fsdp=2", 2)));
  cluster_->worker("w1").Kill9();
  ASSERT_OK_AND_ASSIGN(job_, client_->Reopen(*job_));
  ASSERT_OK(testing::Initialize(*job_));
  Train(kSteps);
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=2,fsdp=1", 2));
}

}  // namespace
}  // namespace shardmesh
