// Jobs with replicas that lose a member when they are READY: they go on without it, or say why not.
#include <gmock/gmock.h>

#include "absl/strings/str_cat.h"
#include "core/job/support.h"
#include "server/coordinator/testing/reform_fixture.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;
using Code = absl::StatusCode;

TEST_F(ReformTest, SilentMember_GoesOnWithASmallerMesh) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  const MemberReport old = ReadyReport(Told("a"), 9);
  Silence({"a", "c", "d"});
  ExpectReforms(2, {"a", "d"}, {0, 3}, "ddp=2,fsdp=1");
  EXPECT_THAT(c_->TakeEvents(),
              Contains("event=job_reforms job=j epoch=2 from_epoch=1 mesh=ddp=2,fsdp=1 workers=a,d cause=\"worker b "
                       "(rank 1, pid 71) was silent for 3.5s, longer than 3s\""));
  const Assignment other = Told("c");  // there is no place for it: it keeps what it holds
  EXPECT_EQ(other.epoch, 1);
  EXPECT_EQ(other.rank, 2);
  EXPECT_EQ(other.from.epoch, 1);
  EXPECT_THAT(shared_.store->Load()->jobs.at("j").others, ElementsAre(MemberRecord{SmallWorker("c"), false, 2}));
  Beat("a", {old});
  EXPECT_FALSE(View("j").members[0].ready) << "that was at the old epoch";
  EXPECT_EQ(View("j").committed_step, 7);
  ReportReady();
  ExpectReady(2);
  EXPECT_THAT(c_->TakeEvents(), ElementsAre("event=job_ready job=j epoch=2"));
  EXPECT_THAT(Beat("c"), IsEmpty()) << "what it holds is needed no more";
  EXPECT_EQ(View("j").committed_step, 7);
  Beat("a", {ReadyReport(Told("a"), 8)});
  EXPECT_EQ(View("j").committed_step, 8);
  EXPECT_THAT(Beat("b"), IsEmpty()) << "heard again, and no member any more";
}

TEST_F(ReformTest, TheJobIsTheOneThatWasCreated) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  ASSERT_OK(c_->Leave("b", 1, now_));
  for (int time = 0; time < 2; ++time) {
    EXPECT_EQ(View("j").definition->spec().mesh.ToString(), "ddp=2,fsdp=1");
    EXPECT_EQ((*c_->Definition("j"))->plan().num_shards(), 1);
    EXPECT_FALSE(c_->CreateJob(SmallMeshJob("j", kMesh), now_).value()) << "it is there";
    EXPECT_THAT(c_->CreateJob(SmallMeshJob("j", "ddp=2,fsdp=1"), now_),
                StatusIs(Code::kAlreadyExists, HasSubstr("mesh: ddp=2,fsdp=2 there, ddp=2,fsdp=1 here")));
    ReportReady();
    ExpectReady(2);
    Restart();
  }
  ASSERT_OK(c_->DeleteJob("j", now_));
  for (const char* worker : {"a", "c", "d"}) Beat(worker);
  ASSERT_OK(c_->CreateJob(SmallMeshJob("j", "ddp=3"), now_));
  EXPECT_EQ(View("j").epoch, 3);
  EXPECT_EQ(Told("a").from.epoch, 0);
}

TEST_F(ReformTest, PeerSaysThatAMemberIsGone_ItIsNotChosenUntilItIsHeard) {
  ASSERT_NO_FATAL_FAILURE(MakeReady(kMesh, {"e"}));
  const MemberReport from_a = Failed("a", 1), from_c = Failed("c", 1);
  Beat("a", {from_a});
  ExpectReforms(2, {"a", "d", "c", "e"}, {0, 3, 2, -1}, kMesh);
  Beat("c", {from_c});
  EXPECT_EQ(View("j").epoch, 2) << "its report is of the old epoch";
  ASSERT_OK(c_->CreateJob(SmallJob("k", 5), now_));
  EXPECT_EQ(View("k").waiting_for, "5 live workers on one host; host h1 has 4");
  EXPECT_EQ(Beat("b").size(), 1u) << "k's";
  EXPECT_EQ(Members(), (Names{"a", "d", "c", "e"}));
  ReportReady();
  ExpectReady(2);
}

TEST_F(ReformTest, MemberLeaves_ASpareTakesItsPlace) {
  ASSERT_NO_FATAL_FAILURE(MakeReady(kMesh, {"e"}));
  ASSERT_OK(c_->Leave("a", 1, now_));
  ExpectReforms(2, {"c", "b", "d", "e"}, {2, 1, 3, -1}, kMesh);
  ReportReady();
  ExpectReady(2);
  EXPECT_EQ(shared_.store->Load()->jobs.at("j").mesh, "") << "as defined";
}

TEST_F(ReformTest, NextIncarnation_WithoutTheMemory_IsASpare) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  ASSERT_OK(c_->Join(SmallWorker("b", 2), now_, {}, {1}));
  ExpectReforms(2, {"a", "d", "c", "b"}, {0, 3, 2, -1}, kMesh);
  EXPECT_EQ(View("j").members[3].worker.incarnation, 2);
  EXPECT_THAT(c_->TakeEvents(),
              ElementsAre(HasSubstr("event=worker_dead worker=b incarnation=1"), HasSubstr("event=job_reforms job=j"),
                          HasSubstr("event=worker_joined worker=b incarnation=2")));
}

TEST_F(ReformTest, NextIncarnation_WithTheMemory_TakesOverWhenReady_AndNotWhileItReforms) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  const auto next = [](const std::string& name, int64_t incarnation) {
    WorkerIdentity worker = SmallWorker(name, incarnation);
    worker.address = SmallWorker(name).address;
    return worker;
  };
  ASSERT_OK(c_->Join(next("b", 2), now_, {}, {0, 1, {{"j", 1, 1}}}));
  EXPECT_EQ(View("j").state, JobState::kReady);
  ASSERT_OK(c_->Leave("c", 1, now_));
  ExpectReforms(2, {"a", "b"}, {0, 1}, "ddp=2,fsdp=1");
  ASSERT_OK(c_->Join(next("b", 3), now_, {}, {0, 2, {{"j", 2, 1}}}));
  ExpectReforms(3, {"a", "d"}, {0, 3}, "ddp=2,fsdp=1");
  ASSERT_OK(c_->Leave("d", 1, now_));
  ExpectFailed("worker d (rank 1, pid 71) left", "it cannot re-form: shard 1 has no other copy");
}

TEST_F(ReformTest, OneWithoutAPlace_StepsInWhenAnotherIsLost) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  ASSERT_OK(c_->Leave("b", 1, now_));
  ExpectReforms(2, {"a", "d"}, {0, 3}, "ddp=2,fsdp=1");
  Restart();
  Silence({"c", "d"});
  ExpectReforms(3, {"c", "d"}, {2, 3}, "ddp=2,fsdp=1");
  EXPECT_THAT(shared_.store->Load()->jobs.at("j").others, IsEmpty());
  ReportReady();
  ExpectReady(3);
}

TEST_F(ReformTest, Spares_AreOfThisHost_OnProcessors_AndHeard) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  ASSERT_OK(c_->Join(SmallWorker("device"), now_, {false, true}));
  ASSERT_OK(c_->Join(SmallWorker("elsewhere", 1, "h2"), now_, {true}));
  ASSERT_OK(c_->Join(SmallWorker("silent"), now_ - absl::Seconds(4)));
  ASSERT_OK(c_->Leave("b", 1, now_));
  EXPECT_EQ(Members(), (Names{"a", "d"}));
}

TEST_F(ReformTest, Spares_FewestJobsFirst) {
  ASSERT_NO_FATAL_FAILURE(MakeReady(kMesh, {"e", "f"}));
  ASSERT_OK(c_->CreateJob(SmallJob("k", 1), now_));
  ASSERT_EQ(View("k").members[0].worker.name, "e");
  ASSERT_OK(c_->Leave("b", 1, now_));
  EXPECT_EQ(Members(), (Names{"a", "d", "c", "f"}));
}

TEST_F(ReformTest, TwoSilentAtOnce_OneCopyEach_GoesOn_SameShard_Fails) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  Silence({"a", "d"});
  ExpectReforms(2, {"a", "d"}, {0, 3}, "ddp=2,fsdp=1");
  shared_ = {};
  Restart();
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  Silence({"a", "c"});
  ExpectFailed("worker b (rank 1, pid 71) was silent for 3.5s", "it cannot re-form: shard 1 has no other copy");
  EXPECT_THAT(c_->TakeEvents(), Contains(HasSubstr("event=job_failed job=j epoch=1 step=7")));
}

TEST_F(ReformTest, LostAgain_WithACopyOfEveryShard_GoesOnFromTheSameEpoch) {
  ASSERT_NO_FATAL_FAILURE(MakeReady(kMesh, {"e"}));
  ASSERT_OK(c_->Leave("b", 1, now_));
  ExpectReforms(2, {"a", "d", "c", "e"}, {0, 3, 2, -1}, kMesh);
  Beat("d", {ReadyReport(Told("d"))});
  Beat("a", {Failed("a", 0)});  // as if another had said so
  ExpectReforms(3, {"c", "d"}, {2, 3}, "ddp=2,fsdp=1");
  Beat("a");
  Beat("d", {Failed("d", 0)});
  ExpectFailed("worker c (rank 0, pid 71) is lost, as worker d", "it cannot re-form: shard 0 has no other copy");
  EXPECT_EQ(Told("d").from.epoch, 1) << "it still has what it had";
}

TEST_F(ReformTest, LostAgain_ANewcomer_TheNextOneComes) {
  ASSERT_NO_FATAL_FAILURE(MakeReady(kMesh, {"e"}));
  ASSERT_OK(c_->Leave("b", 1, now_));
  ASSERT_OK(c_->Join(SmallWorker("f"), now_));
  Beat("c", {Failed("c", 3)});
  ExpectReforms(3, {"a", "d", "c", "f"}, {0, 3, 2, -1}, kMesh);
  ASSERT_OK(c_->Leave("c", 1, now_));
  ExpectReforms(4, {"a", "d"}, {0, 3}, "ddp=2,fsdp=1");
  ReportReady();
  ExpectReady(4);
}

TEST_F(ReformTest, LostAgain_NewcomerThatLives_StaysASpare) {
  ASSERT_NO_FATAL_FAILURE(MakeReady("ddp=2", {"e", "f"}));
  ASSERT_OK(c_->Leave("a", 1, now_));
  ExpectReforms(2, {"b", "e"}, {1, -1}, "ddp=2", "ddp=2");
  ASSERT_OK(c_->Leave("f", 1, now_));
  ASSERT_OK(c_->Leave("b", 1, now_));
  ExpectFailed("worker b (rank 0, pid 71) left", "shard 0 has no other copy");
}

TEST_F(ReformTest, CoordinatorRestarts_InTheMiddle_GoesOn) {
  ASSERT_NO_FATAL_FAILURE(MakeReady(kMesh, {"e"}));
  ASSERT_OK(c_->Leave("b", 1, now_));
  Beat("a", {ReadyReport(Told("a"))});
  Restart();
  EXPECT_FALSE(View("j").members[0].ready) << "it says so again with its next heartbeat";
  Beat("a", {ReadyReport(Told("a"))});
  EXPECT_TRUE(View("j").members[0].ready);
  EXPECT_EQ(Told("e").from.was, (Ranks{0, 3, 2, -1}));
  ASSERT_OK(c_->Leave("c", 1, now_));
  ExpectReforms(3, {"a", "d"}, {0, 3}, "ddp=2,fsdp=1");
  Restart();
  ExpectReforms(3, {"a", "d"}, {0, 3}, "ddp=2,fsdp=1");
  ReportReady();
  ExpectReady(3);
  Restart();
  ExpectReady(3);
  EXPECT_EQ(View("j").definition->spec().mesh.ToString(), "ddp=2,fsdp=1");
}

TEST_F(ReformTest, Shrinks_AndGrowsAgainWhenItLosesAMemberWithSparesThere) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  ASSERT_OK(c_->Leave("b", 1, now_));
  ReportReady();
  ExpectReady(2);
  for (const char* worker : {"e", "f"}) ASSERT_OK(c_->Join(SmallWorker(worker), now_));
  EXPECT_EQ(View("j").epoch, 2) << "a READY job is not disturbed";
  ASSERT_OK(c_->Leave("a", 1, now_));
  ExpectReforms(3, {"d", "c", "e", "f"}, {1, -1, -1, -1}, kMesh, "ddp=2,fsdp=1", 2);
  ReportReady();
  ExpectReady(3);
}

TEST_F(ReformTest, ShrunkUntilNoReplicaIsLeft_TheNextLossFailsIt) {
  ASSERT_NO_FATAL_FAILURE(MakeReady("ddp=2"));
  ASSERT_OK(c_->Leave("a", 1, now_));
  ExpectReforms(2, {"b"}, {1}, "ddp=1", "ddp=2");
  ReportReady();
  ExpectReady(2);
  ASSERT_OK(c_->Leave("b", 1, now_));
  ExpectFailed("worker b (rank 0, pid 71) left", "it cannot re-form: its mesh has no replicas");
}

TEST_F(ReformTest, AnotherPlanWhileItReforms_FailsIt) {
  ASSERT_NO_FATAL_FAILURE(MakeReady(kMesh, {"e"}));
  ASSERT_OK(c_->Leave("b", 1, now_));
  MemberReport report = Failed("a", -1);
  report.plan_hash = std::string(32, '0');
  EXPECT_FALSE(c_->Heartbeat("a", 1, {report}, now_).ok());
  ExpectFailed("worker a (rank 0, pid 71)", "computed plan hash 000");
  EXPECT_THAT(View("j").error, Not(HasSubstr("cannot re-form")));
  EXPECT_EQ(Told("a").from.epoch, 1);
}

TEST_F(ReformTest, AMemberThatCannotTakeItsPlace_IsDoneWithout_AndNotAskedAgain) {
  ASSERT_NO_FATAL_FAILURE(MakeReady(kMesh, {"e"}));
  ASSERT_OK(c_->Leave("b", 1, now_));
  ExpectReforms(2, {"a", "d", "c", "e"}, {0, 3, 2, -1}, kMesh);
  MemberReport report = Failed("a", -1);
  report.committed_step = 9;
  Beat("a", {report});
  ExpectReforms(3, {"c", "d"}, {2, 3}, "ddp=2,fsdp=1");
  EXPECT_EQ(View("j").committed_step, 9);
  Beat("c", {Failed("c", 1)});
  ExpectFailed("worker d (rank 1, pid 71) is lost, as worker c", "shard 1 has no other copy", "newest known step is 9");
}

TEST_F(ReformTest, JobsThatDoNot_SayWhy) {
  ASSERT_NO_FATAL_FAILURE(MakeReady("fsdp=2"));
  ASSERT_OK(c_->Leave("b", 1, now_));
  ExpectFailed("worker b (rank 1, pid 71) left", "; it cannot re-form: its mesh has no replicas; its newest");
  struct Case {
    const char* host_of_b;
    bool on_device;
    Residency residency;
  };
  for (const Case& c :
       {Case{"h2", false, Residency::kFull}, {"h1", true, Residency::kFull}, {"h1", false, Residency::kBucket}}) {
    shared_ = {};
    Restart();
    const WorkerTraits traits{!c.on_device, c.on_device};
    ASSERT_OK(c_->Join(SmallWorker("a"), now_, traits));
    ASSERT_OK(c_->Join(SmallWorker("b", 1, c.host_of_b), now_, traits));
    JobSpec spec = SmallMeshSpec("j", "ddp=2");
    spec.residency = c.residency;
    const auto definition = JobDefinition::Create(spec).value();
    const Topology topology{c.host_of_b == std::string("h1") ? 1 : 2, 2, c.on_device};
    const absl::Status refusal = CheckSupported(spec, definition->plan(), topology, Feature::kReform);
    if (refusal.ok()) continue;  // it re-forms
    EXPECT_EQ(refusal.code(), absl::StatusCode::kUnimplemented);
    if (!CheckSupported(spec, definition->plan(), topology).ok()) continue;  // it cannot even be there
    ASSERT_OK(c_->CreateJob(definition, now_));
    for (const char* worker : {"a", "b"}) {
      const auto told = c_->Heartbeat(worker, 1, {}, now_, traits).value();
      ASSERT_OK(c_->Heartbeat(worker, 1, {ReadyReport(told.at(0))}, now_, traits));
    }
    ASSERT_EQ(View("j").state, JobState::kReady);
    ASSERT_OK(c_->Leave("b", 1, now_));
    ExpectFailed("worker b (rank 1, pid 71) left", absl::StrCat("; it cannot re-form: ", refusal.message()),
                 "no step of it is known");
  }
}

// Each next incarnation of b kills itself again.
TEST_F(ReformTest, JobThatKillsItsMembers_FailsInTheEnd_UnlessItDoesSteps) {
  ASSERT_NO_FATAL_FAILURE(MakeReady("ddp=2"));
  int64_t incarnation = 1;
  for (int step = 8; incarnation < 2 * options_.max_lost_members; ++step) {
    ASSERT_OK(c_->Join(SmallWorker("b", incarnation + 1), now_, {}, {incarnation}));
    ++incarnation;
    ReportReady(step);
    ASSERT_EQ(View("j").state, JobState::kReady) << incarnation;
  }
  for (int lost = 0; lost < options_.max_lost_members; ++lost) {
    ASSERT_OK(c_->Join(SmallWorker("b", incarnation + 1), now_, {}, {incarnation}));
    ++incarnation;
    if (lost % 2 == 0) ReportReady();
    ASSERT_NE(View("j").state, JobState::kFailed) << View("j").error;
  }
  ASSERT_OK(c_->Join(SmallWorker("b", incarnation + 1), now_, {}, {incarnation}));
  ExpectFailed("worker b", "before it the job lost 8 members without a step between them", "step is");
}

// Of its steps nothing is heard but by members that have lost another one.
TEST_F(ReformTest, JobThatDoesStepsBetweenLosses_GoesOn_ThoughOnlyFailuresSaySo) {
  ASSERT_NO_FATAL_FAILURE(MakeReady("ddp=2", {"c"}));
  for (int lost = 1; lost <= 2 * options_.max_lost_members; ++lost) {
    const WorkerIdentity other = View("j").members[1].worker;
    MemberReport failed = Failed("a", 1);
    failed.committed_step = 7 + lost;
    Beat("a", {failed});
    ASSERT_OK(c_->Join(SmallWorker(other.name, other.incarnation + 1), now_, {}, {other.incarnation}));
    ReportReady();
    ASSERT_EQ(View("j").state, JobState::kReady) << lost << ": " << View("j").error;
  }
}

TEST_F(ReformTest, StoreFails_NothingChanged) {
  ASSERT_NO_FATAL_FAILURE(MakeReady(kMesh, {"e"}));
  const MemberReport gone = Failed("a", 1);
  shared_.broken = true;
  EXPECT_FALSE(c_->Leave("b", 1, now_).ok());
  EXPECT_FALSE(c_->Heartbeat("a", 1, {gone}, now_).ok());
  EXPECT_FALSE(c_->Join(SmallWorker("b", 2), now_, {}, {1}).ok());
  EXPECT_EQ(View("j").state, JobState::kReady);
  EXPECT_EQ(Members(), (Names{"a", "b", "c", "d"}));
  EXPECT_EQ(Told("b").from.epoch, 0);
  EXPECT_THAT(c_->TakeEvents(), IsEmpty());
  shared_.broken = false;
  Beat("a", {gone});
  ExpectReforms(2, {"a", "d", "c", "e"}, {0, 3, 2, -1}, kMesh);
}

TEST_F(ReformTest, StateFileSaysNonsense_DataLoss) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  ASSERT_OK(c_->Leave("b", 1, now_));
  const JobRecord good = shared_.store->Load()->jobs.at("j");
  JobRecord mesh = good, from_mesh = good, was = good;
  mesh.mesh = "ddp=0";
  from_mesh.from_mesh = "";
  std::vector<MemberRecord> members = good.members.ToVector();
  members[1].was = 4;
  was.members = members;
  for (const JobRecord& bad : {mesh, from_mesh, was}) {
    StoreBatch batch;
    batch.put_jobs = {bad};
    ASSERT_OK(shared_.store->Write(batch));
    EXPECT_THAT(Coordinator::Create(options_, std::make_unique<SharedStore>(shared_), now_),
                StatusIs(Code::kDataLoss, HasSubstr("the mesh of job j is damaged")));
  }
}

// Its end would never be noticed.
TEST_F(ReformTest, StateFileHasAMemberThatNeverJoined_DataLoss) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  const JobRecord good = shared_.store->Load()->jobs.at("j");
  JobRecord incarnation = good, name = good;
  std::vector<MemberRecord> members = good.members.ToVector();
  members[1].worker.incarnation += 1000;
  incarnation.members = members;
  members = good.members.ToVector();
  members[1].worker.name = "nobody";
  name.members = members;
  for (const JobRecord& bad : {incarnation, name}) {
    StoreBatch batch;
    batch.put_jobs = {bad};
    ASSERT_OK(shared_.store->Write(batch));
    EXPECT_THAT(Coordinator::Create(options_, std::make_unique<SharedStore>(shared_), now_),
                StatusIs(Code::kDataLoss, HasSubstr("has joined; restore a copy of the state file")));
  }
}

}  // namespace
}  // namespace shardmesh
