// Jobs that are brought to another mesh: who is told what, when it counts, and what calls it off.
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
using ::testing::SizeIs;
using ::testing::StartsWith;
using Code = absl::StatusCode;

class ReshardTest : public ReformTest {
 protected:
  absl::Status To(const std::string& mesh) { return c_->Reshard("j", ParseMeshSpec(mesh).value(), now_); }
  // What the worker was told for the mesh to come. It is told of the present one as ever.
  Assignment Staged(const std::string& worker) {
    Assignment staged{SmallJob("j", 1), 0, 0, {}, {}};
    for (const Assignment& assignment : Beat(worker)) {
      if (assignment.staged) staged = assignment;
    }
    EXPECT_TRUE(staged.staged) << worker;
    return staged;
  }
  void Prepare(const Names& workers) {
    for (const std::string& worker : workers) Beat(worker, {Prepared(worker)});
  }
  MemberReport Prepared(const std::string& worker) {
    const Assignment staged = Staged(worker);
    MemberReport report = ReadyReport(staged);
    report.state = MemberReport::State::kPrepared;
    if (staged.leaves) report.plan_hash.clear();
    return report;
  }
  void ExpectAsItWas(const std::string& mesh, const std::string& why) {
    EXPECT_EQ(View("j").state, JobState::kReady);
    EXPECT_EQ(View("j").epoch, 1);
    EXPECT_EQ(View("j").definition->spec().mesh.ToString(), mesh);
    EXPECT_EQ(View("j").next, nullptr);
    EXPECT_THAT(View("j").reshard_error, HasSubstr(why));
    for (const char* worker : {"a", "b"}) EXPECT_THAT(Beat(worker), SizeIs(1)) << "it is not told of another mesh";
  }
};

TEST_F(ReshardTest, ToMoreWorkers_TheOldMembersComeFirst_AndNothingChangesBeforeAllHavePrepared) {
  ASSERT_NO_FATAL_FAILURE(MakeReady("fsdp=2", {"c", "d", "e"}));
  ASSERT_OK(To("fsdp=4"));
  EXPECT_THAT(c_->TakeEvents(),
              ElementsAre("event=reshard_begins job=j epoch=2 from_epoch=1 mesh=fsdp=4 workers=a,b,c,d leave="));
  EXPECT_OK(To("fsdp=4")) << "again";
  const Assignment told = Staged("c");
  EXPECT_EQ(told.epoch, 2);
  EXPECT_EQ(told.rank, 2);
  EXPECT_FALSE(told.leaves);
  EXPECT_EQ(told.definition->plan().hash(), SmallMeshJob("j", "fsdp=4")->plan().hash());
  EXPECT_EQ(told.from.epoch, 1);
  EXPECT_EQ(told.from.mesh, "fsdp=2");
  EXPECT_EQ(told.from.was, (Ranks{0, 1, -1, -1}));
  EXPECT_THAT(told.peers, SizeIs(4));
  EXPECT_THAT(Beat("a"), SizeIs(2)) << "its present place, and the one to come";
  EXPECT_THAT(Beat("e"), IsEmpty());
  Prepare({"a", "c", "d"});
  EXPECT_EQ(View("j").state, JobState::kReady);
  EXPECT_EQ(View("j").epoch, 1);
  Beat("a", {ReadyReport(Beat("a")[0], 9)});
  EXPECT_EQ(View("j").committed_step, 9) << "it trains on";
  Prepare({"b"});
  ExpectReforms(2, {"a", "b", "c", "d"}, {0, 1, -1, -1}, "fsdp=4", "fsdp=2");
  EXPECT_THAT(c_->TakeEvents(), Contains("event=job_reshards job=j epoch=2 from_epoch=1 mesh=fsdp=4"));
  ReportReady(9);
  ExpectReady(2);
  EXPECT_EQ(shared_.store->Load()->jobs.at("j").wanted_mesh, "fsdp=4");
}

TEST_F(ReshardTest, ToFewerWorkers_ThoseThatLeaveAreToldSo_AndHoldWhatTheyGive) {
  ASSERT_NO_FATAL_FAILURE(MakeReady("fsdp=4"));
  ASSERT_OK(To("fsdp=3"));
  const Assignment told = Staged("d");
  EXPECT_TRUE(told.leaves);
  EXPECT_EQ(told.rank, 3) << "of now";
  EXPECT_THAT(told.from.departing, ElementsAre(MemberRecord{SmallWorker("d"), false, 3}));
  Prepare({"a", "b", "c"});
  EXPECT_EQ(View("j").state, JobState::kReady) << "d does not know yet";
  Prepare({"d"});
  ExpectReforms(2, {"a", "b", "c"}, {0, 1, 2}, "fsdp=3", "fsdp=4");
  EXPECT_EQ(Told("d").epoch, 1);
  EXPECT_EQ(Told("a").from.departing.size(), 1u);
  ReportReady(7);
  ExpectReady(2);
  EXPECT_THAT(Beat("d"), IsEmpty()) << "what it holds is needed no more";
}

TEST_F(ReshardTest, WhatCallsItOff) {
  struct Case {
    const char* what;
    std::function<void()> happens;
    const char* why;
  };
  const Case cases[] = {
      {"its own mesh", [&] { EXPECT_OK(To("fsdp=2")); }, "called off"},
      {"a member to be that fails",
       [&] {
         MemberReport report = Prepared("c");
         report.state = MemberReport::State::kFailed;
         report.error = "no memory";
         Beat("c", {report});
       },
       "worker c (pid 71) failed: no memory"},
      {"one with another plan",
       [&] {
         MemberReport report = Prepared("c");
         report.plan_hash = std::string(32, '0');
         Beat("c", {report});
       },
       "worker c (pid 71) computed plan hash"},
      {"one that leaves", [&] { EXPECT_OK(c_->Leave("c", 1, now_)); }, "worker c (pid 71) left"},
      {"time",
       [&] {
         for (int i = 0; i < 1300; ++i) {
           now_ += absl::Milliseconds(500);
           for (const char* worker : {"a", "b", "c"}) Beat(worker);
           ASSERT_OK(c_->Tick(now_));
         }
       },
       "within 10m"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    shared_.store = NewMemoryStore();
    Restart();
    ASSERT_NO_FATAL_FAILURE(MakeReady("fsdp=2", {"c"}));
    ASSERT_OK(To("fsdp=3"));
    c.happens();
    ExpectAsItWas("fsdp=2", c.why);
    EXPECT_THAT(c_->TakeEvents(), Contains(StartsWith("event=reshard_given_up job=j epoch=2 mesh=fsdp=3 cause=")));
  }
}

// An epoch that workers were told of is not given again, to others.
TEST_F(ReshardTest, GivenUp_ItsEpochIsUsedUp_AlsoAfterARestart) {
  ASSERT_NO_FATAL_FAILURE(MakeReady("fsdp=2", {"c"}));
  ASSERT_OK(To("fsdp=3"));
  Restart();
  for (const char* worker : {"a", "b", "c"}) Beat(worker);
  EXPECT_EQ(View("j").next, nullptr);
  EXPECT_EQ(View("j").reshard_error, "");
  ASSERT_OK(To("fsdp=3"));
  EXPECT_EQ(View("j").next->epoch, 3);
  ASSERT_OK(To("fsdp=2"));
  ASSERT_OK(To("fsdp=3"));
  EXPECT_EQ(View("j").next->epoch, 4);
}

TEST_F(ReshardTest, JustRestarted_WorkersThatWereNotHeardYet_AreWaitedFor) {
  ASSERT_NO_FATAL_FAILURE(MakeReady("fsdp=2", {"c"}));
  Restart();
  EXPECT_THAT(To("fsdp=3"), StatusIs(Code::kUnavailable, HasSubstr("has not heard of all workers yet")));
  for (const char* worker : {"a", "b", "c"}) Beat(worker);
  EXPECT_OK(To("fsdp=3"));
}

TEST_F(ReshardTest, BrokenStore_NothingChanged) {
  ASSERT_NO_FATAL_FAILURE(MakeReady("fsdp=2", {"c"}));
  shared_.broken = true;
  EXPECT_THAT(To("fsdp=3"), StatusIs(Code::kUnavailable, HasSubstr("disk full")));
  EXPECT_EQ(View("j").next, nullptr);
  shared_.broken = false;
  ASSERT_OK(To("fsdp=3"));
  Prepare({"a", "b"});
  const MemberReport last = Prepared("c");
  shared_.broken = true;
  EXPECT_THAT(c_->Heartbeat("c", 1, {last}, now_).status(), StatusIs(Code::kUnavailable, HasSubstr("disk full")));
  EXPECT_EQ(View("j").state, JobState::kReady);
  shared_.broken = false;
  Beat("c", {last});
  ExpectReforms(2, {"a", "b", "c"}, {0, 1, -1}, "fsdp=3", "fsdp=2");
}

TEST_F(ReshardTest, Refused_WithTheReason) {
  ASSERT_NO_FATAL_FAILURE(MakeReady("fsdp=2", {"c"}));
  EXPECT_THAT(To("fsdp=4"), StatusIs(Code::kFailedPrecondition, HasSubstr("there are its 2 and 1 others")));
  EXPECT_THAT(To("fsdp=65"), StatusIs(Code::kInvalidArgument, HasSubstr("at most 64")));
  EXPECT_THAT(c_->Reshard("no", ParseMeshSpec("fsdp=1").value(), now_), StatusIs(Code::kNotFound, HasSubstr("no")));
  ASSERT_OK(To("fsdp=3"));
  EXPECT_THAT(To("fsdp=1"), StatusIs(Code::kFailedPrecondition, AllOf(HasSubstr("on its way to mesh fsdp=3"),
                                                                      HasSubstr("the mesh that it has, fsdp=2"))));
  Prepare({"a", "b", "c"});
  EXPECT_THAT(To("fsdp=1"), StatusIs(Code::kUnavailable, HasSubstr("is preparing")));
}

// Each job in the words of the table, wherever that refuses.
TEST_F(ReshardTest, JobsThatDoNot_StayOnTheirMesh_AndSayWhy) {
  struct Case {
    const char* host_of_b;
    bool on_device;
    Residency residency;
  };
  for (const Case& c : {Case{"h2", false, Residency::kFull}, Case{"h1", true, Residency::kFull},
                        Case{"h1", false, Residency::kBucket}, Case{"h1", false, Residency::kFull}}) {
    shared_ = {};
    Restart();
    const WorkerTraits traits{!c.on_device, c.on_device};
    ASSERT_OK(c_->Join(SmallWorker("a"), now_, traits));
    ASSERT_OK(c_->Join(SmallWorker("b", 1, c.host_of_b), now_, traits));
    JobSpec spec = SmallMeshSpec("j", "fsdp=2");
    spec.residency = c.residency;
    const auto definition = JobDefinition::Create(spec).value();
    const Topology topology{c.host_of_b == std::string("h1") ? 1 : 2, 2, c.on_device};
    if (!CheckSupported(spec, definition->plan(), topology).ok()) continue;
    ASSERT_OK(c_->CreateJob(definition, now_));
    for (const char* worker : {"a", "b"}) {
      const auto told = c_->Heartbeat(worker, 1, {}, now_, traits).value();
      ASSERT_OK(c_->Heartbeat(worker, 1, {ReadyReport(told.at(0))}, now_, traits));
    }
    ASSERT_EQ(View("j").state, JobState::kReady);
    EXPECT_EQ(To("fsdp=1"), CheckSupported(spec, definition->plan(), topology, Feature::kReshard));
  }
}

// While it moves, what was never a member may be done without; the mesh is the nearest to the one that was wanted.
TEST_F(ReshardTest, Moving_ANewMemberEnds_ItGoesOnWithFewer) {
  ASSERT_NO_FATAL_FAILURE(MakeReady("fsdp=2", {"c", "d"}));
  ASSERT_OK(To("fsdp=4"));
  Prepare({"a", "b", "c", "d"});
  ASSERT_OK(c_->Leave("d", 1, now_));
  ExpectReforms(3, {"a", "b", "c"}, {0, 1, -1}, "fsdp=3", "fsdp=2");
}

TEST_F(ReshardTest, Moving_TheOnlyHolderOfAShardLeaves_ItFails) {
  ASSERT_NO_FATAL_FAILURE(MakeReady("fsdp=2", {"c"}));
  ASSERT_OK(To("fsdp=3"));
  Prepare({"a", "b", "c"});
  ASSERT_OK(c_->Leave("b", 1, now_));
  ExpectFailed("worker b (rank 1", "its mesh has no replicas");
}

// Who leaves may be the one that gives a shard, and others may wait for it to end its part.
TEST_F(ReshardTest, Moving_OneThatLeavesIsLost_TheOthersBeginAgainWithoutIt_IfTheyNeedIt) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  ASSERT_OK(To("fsdp=1"));
  Prepare({"a", "b", "c", "d"});
  ExpectReforms(2, {"a"}, {0}, "fsdp=1");
  Silence({"a", "c", "d"});  // b has shard 1, as d
  ExpectReforms(3, {"a"}, {0}, "fsdp=1");
  EXPECT_EQ(Told("a").from.departing.size(), 2u);
  MemberReport report = ReadyReport(Told("d"));  // says so itself, and nobody else has it
  report.epoch = 3;
  report.state = MemberReport::State::kFailed;
  report.error = "as it says";
  Beat("d", {report});
  ExpectFailed("worker d (pid 71), which was to leave, failed: as it says", "shard 1 has no other copy");
}

TEST_F(ReshardTest, Moving_OneThatLeavesIsLost_AndNobodyNeedsIt_NothingChanges) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  ASSERT_OK(To("ddp=2,fsdp=1"));
  Prepare({"a", "b", "c", "d"});
  Silence({"a", "b", "d"});
  ExpectReforms(2, {"a", "b"}, {0, 1}, "ddp=2,fsdp=1");
  EXPECT_EQ(Told("a").from.departing.size(), 1u);
}

TEST_F(ReshardTest, Moving_OneThatLeavesIsLost_WithTheOnlyCopyOfItsShard_ItFails) {
  ASSERT_NO_FATAL_FAILURE(MakeReady("fsdp=2"));
  ASSERT_OK(To("fsdp=1"));
  Prepare({"a", "b"});
  Silence({"a"});
  ExpectFailed("worker b (pid 71), which was to leave, was silent", "its mesh has no replicas");
}

// A node has its memory: peers see that it is gone, and its next incarnation comes.
TEST_F(ReshardTest, Moving_TheOnlyHolderIsKilled_ItsNextIncarnationIsWaitedFor) {
  const WorkerTraits retained{false, false, true};
  const LastIncarnation last{0, 1, {{"j", 1, 1}}};
  WorkerIdentity next = SmallWorker("b", 2);
  next.address = SmallWorker("b").address;
  for (const bool comes : {true, false}) {
    shared_.store = NewMemoryStore();
    Restart();
    ASSERT_NO_FATAL_FAILURE(MakeReady("fsdp=2", {"c"}));
    ASSERT_OK(To("fsdp=3"));
    Prepare({"a", "b", "c"});
    ASSERT_OK(c_->Heartbeat("b", 1, {}, now_, retained));
    for (int again = 0; again < 12; ++again) Beat("a", {Failed("a", 1)});  // it says so with each heartbeat
    EXPECT_EQ(View("j").state, JobState::kPreparing);
    EXPECT_EQ(View("j").epoch, 2);
    EXPECT_THAT(View("j").waiting_for, HasSubstr("the next incarnation of a worker"));
    if (comes) {
      ASSERT_OK(c_->Join(next, now_, retained, last));
      ExpectReforms(3, {"a", "b", "c"}, {0, 1, -1}, "fsdp=3", "fsdp=2");
      EXPECT_THAT(View("j").waiting_for, IsEmpty());
    } else {
      Silence({"a", "c"});
      ExpectFailed("worker b (rank 1", "its mesh has no replicas");
    }
  }
}

}  // namespace
}  // namespace shardmesh
