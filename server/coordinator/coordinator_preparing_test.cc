// Members that are lost before their job is READY: it is assigned anew, since nothing of it is lost.
#include <gmock/gmock.h>

#include "server/coordinator/testing/coordinator_fixture.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class PreparingTest : public CoordinatorTest {
 protected:
  // Job "j" of two ranks, PREPARING on a and b; `others` have joined, too.
  void Prepare(const std::vector<std::string>& others = {}) {
    for (const char* worker : {"a", "b"}) ASSERT_OK(c_->Join(SmallWorker(worker), now_));
    for (const std::string& worker : others) ASSERT_OK(c_->Join(SmallWorker(worker), now_));
    ASSERT_OK(c_->CreateJob(SmallJob("j", 2), now_));
    ASSERT_EQ(View("j").state, JobState::kPreparing);
    c_->TakeEvents();
  }
  std::vector<std::string> Members() {
    std::vector<std::string> names;
    for (const JobView::Member& member : View("j").members) names.push_back(member.worker.name);
    return names;
  }
  void ExpectAssigned(int64_t epoch, const std::vector<std::string>& members) {
    const JobView view = View("j");
    EXPECT_EQ(view.state, JobState::kPreparing) << view.error << view.waiting_for;
    EXPECT_EQ(view.epoch, epoch);
    EXPECT_EQ(Members(), members);
    for (const JobView::Member& member : view.members) EXPECT_FALSE(member.ready);
  }
  void ExpectWaits() {
    const JobView view = View("j");
    EXPECT_EQ(view.state, JobState::kWaiting) << view.error;
    EXPECT_EQ(view.waiting_for, "2 live workers on one host; host h1 has 1");
    EXPECT_EQ(view.error, "");
    EXPECT_THAT(view.members, IsEmpty());
  }
  // What a says once it has seen that b is gone.
  MemberReport BIsGone() {
    MemberReport report = ReadyReport(Beat("a")[0]);
    report.state = MemberReport::State::kFailed;
    report.error = "worker b (rank 1, pid 71) is gone";
    report.lost_rank = 1;
    return report;
  }
};

TEST_F(PreparingTest, SilentMember_AnotherWorkerTakesItsPlace_AndTheSurvivorTheNewEpoch) {
  ASSERT_NO_FATAL_FAILURE(Prepare({"c"}));
  const MemberReport old = ReadyReport(Beat("a")[0]);
  Beat("a", {old});
  for (int i = 0; i < 7; ++i) {
    Advance(absl::Milliseconds(500));
    Beat("a");
    Beat("c");
  }
  ExpectAssigned(2, {"a", "c"});
  EXPECT_THAT(c_->TakeEvents(), AllOf(Contains(AllOf(HasSubstr("event=job_unassigned job=j epoch=1"),
                                                     HasSubstr("worker b (rank 1, pid 71) was silent for 3.5s"))),
                                      Contains(HasSubstr("event=job_assigned job=j epoch=2 workers=a,c"))));
  ASSERT_EQ(Beat("a", {old}).size(), 1u);
  EXPECT_EQ(Beat("a", {old})[0].epoch, 2);
  EXPECT_FALSE(View("j").members[0].ready) << "that was at the old epoch";
  for (const char* worker : {"a", "c"}) Beat(worker, {ReadyReport(Beat(worker)[0])});
  EXPECT_EQ(View("j").state, JobState::kReady);
  EXPECT_THAT(Beat("b"), IsEmpty()) << "heard again, and no member any more";
}

TEST_F(PreparingTest, SilentMember_NobodyElse_WaitsAndSaysForWhat_UntilItIsHeardAgain) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  for (int i = 0; i < 7; ++i) {
    Advance(absl::Milliseconds(500));
    Beat("a");
  }
  ExpectWaits();
  EXPECT_THAT(Beat("a"), IsEmpty());
  Restart();
  Beat("a");
  ExpectWaits();
  EXPECT_EQ(Beat("b").size(), 1u);
  ExpectAssigned(2, {"a", "b"});
}

TEST_F(PreparingTest, MemberLeaves_AssignedAnewAtOnce) {
  ASSERT_NO_FATAL_FAILURE(Prepare({"c"}));
  ASSERT_OK(c_->Leave("b", 1, now_));
  ExpectAssigned(2, {"a", "c"});
  ASSERT_OK(c_->Leave("c", 1, now_));
  ExpectWaits();
}

TEST_F(PreparingTest, NextIncarnation_WithOrWithoutTheMemory_TakesThePlaceAtANewEpoch) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  ASSERT_OK(c_->Join(SmallWorker("b", 2), now_, {}, {1}));
  ExpectAssigned(2, {"a", "b"});
  EXPECT_EQ(View("j").members[1].worker.incarnation, 2);
  WorkerIdentity retained = SmallWorker("b", 3);
  retained.address = SmallWorker("b", 2).address;
  ASSERT_OK(c_->Join(retained, now_, {}, {0, 2, {{"j", 2, 1}}}));
  ExpectAssigned(3, {"a", "b"});
  EXPECT_EQ(View("j").members[1].worker.incarnation, 3);
}

TEST_F(PreparingTest, PeerSaysThatAMemberIsGone_NotAssignedToItUntilItIsHeardAgain) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  const MemberReport gone = BIsGone();
  EXPECT_THAT(Beat("a", {gone}), IsEmpty());
  ExpectWaits();
  EXPECT_THAT(Beat("a", {gone}), IsEmpty()) << "the report is of the old epoch";
  Beat("b");
  ExpectAssigned(2, {"a", "b"});
}

TEST_F(PreparingTest, PeerSaysThatAMemberIsGone_TheNextIncarnationTakesItsPlace) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  Beat("a", {BIsGone()});
  ASSERT_OK(c_->Join(SmallWorker("b", 2), now_, {}, {1}));
  ExpectAssigned(2, {"a", "b"});
}

// It counts for jobs again only then.
TEST_F(PreparingTest, WhoAPeerSaysIsGone_IsHeardByAWholeHeartbeat) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  Beat("a", {BIsGone()});
  ASSERT_OK(c_->CreateJob(SmallJob("k", 2), now_));
  const Coordinator::Heard heard = c_->MayRepeat("b", {}, {}).value();
  EXPECT_FALSE(c_->HearAgain(heard, now_));
  const Coordinator::Heard again = c_->MayRepeat("b", {}, Beat("b")).value();
  EXPECT_TRUE(c_->HearAgain(again, now_));
}

TEST_F(PreparingTest, PeerSaysThatAMemberIsGone_OfAReadyJob_FailsIt) {
  MakeReadyJob();
  Beat("a", {BIsGone()});
  EXPECT_THAT(View("j").error, HasSubstr("worker b (rank 1, pid 71) is lost, as worker a (rank 0, pid 71) says: "));
  ASSERT_OK(c_->CreateJob(SmallJob("k", 2), now_));
  EXPECT_EQ(View("k").state, JobState::kPreparing) << "b may live";
}

TEST_F(PreparingTest, MemberFails_TheJobFails) {
  for (const int32_t lost : {-1, 2}) {  // its own cause; no member's
    ASSERT_NO_FATAL_FAILURE(Prepare());
    MemberReport report = BIsGone();
    report.error = "job j takes more than this host has";
    report.lost_rank = lost;
    Beat("a", {report});
    EXPECT_EQ(View("j").state, JobState::kFailed);
    EXPECT_THAT(View("j").error, HasSubstr("takes more than this host has"));
    ASSERT_OK(c_->DeleteJob("j", now_));
  }
}

TEST_F(PreparingTest, WeightsWerePlacedAllTheSame_FailsAndSaysSo) {
  ASSERT_NO_FATAL_FAILURE(Prepare({"c"}));
  Beat("a", {ReadyReport(Beat("a")[0], 0)});
  ASSERT_OK(c_->Leave("b", 1, now_));
  EXPECT_THAT(View("j").error, HasSubstr("worker b (rank 1, pid 71) left"));
}

TEST_F(PreparingTest, JobThatKillsItsMembers_FailsInTheEnd) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  for (int64_t incarnation = 2; incarnation <= 1 + options_.max_lost_members; ++incarnation) {
    ASSERT_OK(c_->Join(SmallWorker("b", incarnation), now_, {}, {incarnation - 1}));
    ExpectAssigned(incarnation, {"a", "b"});
  }
  const int64_t last = 1 + options_.max_lost_members;
  ASSERT_OK(c_->Join(SmallWorker("b", last + 1), now_, {}, {last}));
  EXPECT_THAT(View("j").error, AllOf(HasSubstr("worker b (rank 1, pid 79) ended; before it the job lost 8 members"),
                                     HasSubstr("create it again")));
  EXPECT_THAT(Beat("b", {}, last + 1), IsEmpty());
}

TEST_F(PreparingTest, WorkersThatLeave_AreNotItsFault) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  for (int64_t incarnation = 1; incarnation <= 2 * options_.max_lost_members; ++incarnation) {
    ASSERT_OK(c_->Leave("b", incarnation, now_));
    ExpectWaits();
    ASSERT_OK(c_->Join(SmallWorker("b", incarnation + 1), now_));
    ExpectAssigned(incarnation + 1, {"a", "b"});
  }
}

TEST_F(PreparingTest, StoreFails_NothingChanged) {
  ASSERT_NO_FATAL_FAILURE(Prepare({"c"}));
  const MemberReport gone = BIsGone();
  shared_.broken = true;
  EXPECT_FALSE(c_->Leave("b", 1, now_).ok());
  EXPECT_FALSE(c_->Heartbeat("a", 1, {gone}, now_).ok());
  ExpectAssigned(1, {"a", "b"});
  EXPECT_THAT(c_->TakeEvents(), IsEmpty());
  shared_.broken = false;
  ASSERT_OK(c_->Leave("c", 1, now_));
  ASSERT_OK(c_->CreateJob(SmallJob("k", 2), now_));
  EXPECT_EQ(View("k").state, JobState::kPreparing) << "b is not doubted";
}

// A job of many ranks would write all its members for each of them.
TEST_F(PreparingTest, ReadyOfMembers_IsStoredWhenAllAre) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  const int before = shared_.writes;
  Beat("a", {ReadyReport(Beat("a")[0])});
  EXPECT_TRUE(View("j").members[0].ready);
  EXPECT_EQ(shared_.writes, before);
  Beat("b", {ReadyReport(Beat("b")[0])});
  EXPECT_EQ(shared_.writes, before + 1);
  Restart();
  EXPECT_EQ(View("j").state, JobState::kReady);
  EXPECT_TRUE(View("j").members[0].ready && View("j").members[1].ready);
}

TEST_F(PreparingTest, CoordinatorRestarts_MembersSayReadyAgain) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  Beat("a", {ReadyReport(Beat("a")[0])});
  Restart();
  Beat("b", {ReadyReport(Beat("b")[0])});
  EXPECT_EQ(View("j").state, JobState::kPreparing) << "a was not heard yet";
  Beat("a", {ReadyReport(Beat("a")[0])});
  EXPECT_EQ(View("j").state, JobState::kReady);
}

TEST_F(PreparingTest, LastReadyCannotBeStored_TheJobIsReadyWhenItCan) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  Beat("a", {ReadyReport(Beat("a")[0])});
  const Assignment told = Beat("b")[0];
  shared_.broken = true;
  EXPECT_FALSE(c_->Heartbeat("b", 1, {ReadyReport(told)}, now_).ok());
  EXPECT_FALSE(View("j").members[1].ready);
  shared_.broken = false;
  Beat("b", {ReadyReport(told)});
  EXPECT_EQ(View("j").state, JobState::kReady);
}

}  // namespace
}  // namespace shardmesh
