// Jobs with replicas over several hosts that lose one, or a part of one.
#include <gmock/gmock.h>

#include "server/coordinator/testing/reform_fixture.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Ranks a b on h1, c d on h2; e f of h3 are free.
class ReformOnHostsTest : public ReformTest {
 protected:
  void MakeReadyOnHosts() {
    ASSERT_NO_FATAL_FAILURE(JoinHost("h1", {"a", "b"}));
    ASSERT_NO_FATAL_FAILURE(JoinHost("h2", {"c", "d"}));
    ASSERT_OK(c_->CreateJob(SmallMeshJob("j", kMesh), now_));
    ASSERT_EQ(Members(), (Names{"a", "b", "c", "d"}));
    ReportReady(7);
    ASSERT_EQ(View("j").state, JobState::kReady);
    c_->TakeEvents();
  }
  // The call of h2's node ends after its workers were heard in it.
  void EndCall() {
    ASSERT_OK(c_->TickHosts(now_));
    for (const char* worker : {"c", "d"}) {
      Beat(worker);
      c_->HearInCall(worker, 1);
    }
    c_->EndCall(1, now_);
  }
  // Only these are heard, and ticks come often.
  void Wait(absl::Duration time, const Names& living) {
    for (const absl::Time until = now_ + time; now_ < until;) {
      now_ += absl::Milliseconds(50);
      for (const std::string& worker : living) Beat(worker);
      ASSERT_OK(c_->Tick(now_));
      ASSERT_OK(c_->TickHosts(now_));
    }
  }
  void JoinHost(const std::string& host, const Names& workers) {
    traits_.spans_hosts = true;
    for (const std::string& worker : workers) ASSERT_OK(c_->Join(SmallWorker(worker, 1, host), now_, traits_));
  }
};

TEST_F(ReformOnHostsTest, LossOfAHost_TheOtherGoesOn) {
  ASSERT_NO_FATAL_FAILURE(MakeReadyOnHosts());
  Silence({"c", "d"});
  EXPECT_EQ(Members(), (Names{"c", "d"}));
  EXPECT_EQ(View("j").definition->spec().mesh.ToString(), "ddp=1,fsdp=2");
  ReportReady();
  ExpectReady(View("j").epoch);
}

TEST_F(ReformOnHostsTest, LossOfAHost_AFreeOneTakesItsPlace) {
  ASSERT_NO_FATAL_FAILURE(MakeReadyOnHosts());
  ASSERT_NO_FATAL_FAILURE(JoinHost("h3", {"e", "f"}));
  Silence({"c", "d", "e", "f"});
  EXPECT_EQ(Members(), (Names{"c", "d", "e", "f"}));
  EXPECT_EQ(View("j").definition->spec().mesh.ToString(), kMesh);
  ReportReady();
  ExpectReady(View("j").epoch);
}

TEST_F(ReformOnHostsTest, AnotherHostsLeadIsGone_ItsMembersAreHeardFirst) {
  ASSERT_NO_FATAL_FAILURE(MakeReadyOnHosts());
  now_ += absl::Milliseconds(10);
  const MemberReport lost = Failed("a", 2);
  Beat("a", {lost});
  EXPECT_EQ(View("j").state, JobState::kReady);
  Beat("d");
  Beat("a", {lost});
  EXPECT_EQ(Members(), (Names{"a", "d"})) << "d is there";
  EXPECT_EQ(View("j").definition->spec().mesh.ToString(), "ddp=2,fsdp=1");
}

// A node leaves out every second of the heartbeats that are as the last ones.
TEST_F(ReformOnHostsTest, AnotherHostsLeadIsGone_WhoIsHeardEverySecondTime_IsThere) {
  ASSERT_NO_FATAL_FAILURE(MakeReadyOnHosts());
  const absl::Duration interval = options_.heartbeat_timeout / 6;
  const MemberReport lost = Failed("a", 2);
  const std::vector<MemberReport> of_d = {ReadyReport(Told("d"), -1)};
  Beat("d", of_d);
  const absl::Time begin = now_;
  now_ = begin + interval;
  Beat("b");
  now_ = begin + 2 * interval - absl::Milliseconds(5);
  Beat("a", {lost});
  EXPECT_EQ(View("j").state, JobState::kReady);
  now_ = begin + 2 * interval + absl::Milliseconds(50);
  Beat("a", {lost});
  EXPECT_EQ(View("j").state, JobState::kReady) << "d is heard soon, since it was there";
  now_ += absl::Milliseconds(50);
  Beat("d", of_d);
  Beat("a", {lost});
  EXPECT_EQ(Members(), (Names{"a", "d"}));
}

TEST_F(ReformOnHostsTest, AnotherHostsLeadIsGone_WhoIsNotHeardDiedWithIt) {
  ASSERT_NO_FATAL_FAILURE(MakeReadyOnHosts());
  const MemberReport lost = Failed("a", 2);
  now_ += absl::Milliseconds(10);
  Beat("a", {lost});
  now_ += options_.heartbeat_timeout / 2;
  EXPECT_EQ(View("j").state, JobState::kReady);
  Beat("a", {lost});
  EXPECT_EQ(Members(), (Names{"a", "b"}));
  EXPECT_EQ(View("j").definition->spec().mesh.ToString(), "ddp=1,fsdp=2");
  ReportReady();
  ExpectReady(2);
}

// The leads of the other hosts have waited for its lead to come back.
TEST_F(ReformOnHostsTest, AnotherHostsLeadIsGone_ItsMembersWereSilentBefore) {
  ASSERT_NO_FATAL_FAILURE(MakeReadyOnHosts());
  const MemberReport lost = Failed("a", 2);
  now_ += options_.heartbeat_timeout / 2;
  for (const char* worker : {"b", "d"}) Beat(worker);
  now_ += options_.heartbeat_timeout / 4;
  Beat("a", {lost});
  EXPECT_EQ(View("j").state, JobState::kReady) << "d was heard a moment ago";
  now_ += options_.heartbeat_timeout / 4;
  Beat("a", {lost});
  EXPECT_EQ(Members(), (Names{"a", "b"}));
}

TEST_F(ReformOnHostsTest, AnotherHostsLeadIsGone_ItsMembersWereSilentForLong) {
  ASSERT_NO_FATAL_FAILURE(MakeReadyOnHosts());
  const MemberReport lost = Failed("a", 2);
  now_ += options_.heartbeat_timeout / 2;
  Beat("b");
  Beat("a", {lost});
  EXPECT_EQ(Members(), (Names{"a", "b"}));
}

// Each says it of the other as often as it is heard.
TEST_F(ReformOnHostsTest, TwoHostsThatDoNotHearEachOther_OneGoesOn) {
  ASSERT_NO_FATAL_FAILURE(MakeReadyOnHosts());
  const MemberReport from_a = Failed("a", 2), from_c = Failed("c", 0);
  for (int beat = 0; beat < 20 && View("j").state == JobState::kReady; ++beat) {
    now_ += absl::Milliseconds(100);
    Beat("a", {from_a});
    if (View("j").state == JobState::kReady) Beat("c", {from_c});
  }
  EXPECT_EQ(View("j").state, JobState::kPreparing);
}

TEST_F(ReformOnHostsTest, LossOfAMember_ItsHostKeepsOne) {
  ASSERT_NO_FATAL_FAILURE(MakeReadyOnHosts());
  Silence({"a", "c", "d"});
  ExpectReforms(2, {"a", "c"}, {0, 2}, "ddp=2,fsdp=1");
  const Assignment other = Told("d");
  EXPECT_EQ(other.epoch, 1) << "it has shard 1, which no member has";
  ASSERT_OK(c_->Leave("d", 1, now_));
  ExpectFailed("worker d (pid 71), which was to leave, left", "shard 1 has no other copy");
}

TEST_F(ReformOnHostsTest, ANodesCallEnds_NobodyOfItsHostIsHeard_ItIsLostBeforeTheTimeOut) {
  ASSERT_NO_FATAL_FAILURE(MakeReadyOnHosts());
  ASSERT_NO_FATAL_FAILURE(EndCall());
  Wait(options_.host_timeout, {"a", "b"});
  EXPECT_EQ(View("j").state, JobState::kReady);
  Wait(absl::Milliseconds(50), {"a", "b"});
  EXPECT_EQ(Members(), (Names{"a", "b"}));
  EXPECT_EQ(View("j").epoch, 2) << "both are lost at once";
  EXPECT_THAT(c_->TakeEvents(),
              ElementsAre("event=worker_dead worker=c incarnation=1 silent_for=800ms node_gone=true",
                          "event=worker_dead worker=d incarnation=1 silent_for=800ms node_gone=true",
                          AllOf(HasSubstr("event=job_reforms"),
                                HasSubstr("was silent for 800ms, and its node, which relayed it, is gone"))));
  ReportReady();
  ExpectReady(2);
}

TEST_F(ReformOnHostsTest, ANodesCallEnds_OneOfItsHostIsHeard_NobodyIsLost) {
  ASSERT_NO_FATAL_FAILURE(MakeReadyOnHosts());
  ASSERT_NO_FATAL_FAILURE(EndCall());
  Wait(absl::Milliseconds(300), {"a", "b", "d"});
  Wait(absl::Seconds(2), {"a", "b"});
  EXPECT_EQ(View("j").state, JobState::kReady);
  Wait(absl::Seconds(2), {"a", "b", "d"});
  EXPECT_EQ(Members(), (Names{"a", "d"})) << "c alone was silent for the time-out";
}

// They say at once that their node is gone.
TEST_F(ReformOnHostsTest, ANodesCallEnds_ItsWorkersEndNext_TheHostIsLost) {
  ASSERT_NO_FATAL_FAILURE(MakeReadyOnHosts());
  ASSERT_NO_FATAL_FAILURE(EndCall());
  Wait(absl::Milliseconds(50), {"a", "b", "c", "d"});
  Wait(options_.host_timeout, {"a", "b"});
  EXPECT_EQ(Members(), (Names{"a", "b"}));
}

TEST_F(ReformOnHostsTest, ANodesCallEnds_AndAnotherBegan_NobodyIsLost) {
  ASSERT_NO_FATAL_FAILURE(MakeReadyOnHosts());
  ASSERT_NO_FATAL_FAILURE(EndCall());
  c_->HearInCall("c", 2);
  c_->EndCall(1, now_);  // it is told late
  Wait(absl::Seconds(2), {"a", "b"});
  EXPECT_EQ(View("j").state, JobState::kReady);
}

// Heartbeats may have come meanwhile that it has not read yet.
TEST_F(ReformOnHostsTest, ANodesCallEnds_TheCoordinatorIsHeldUp_HostsGetTheWholeTime) {
  ASSERT_NO_FATAL_FAILURE(MakeReadyOnHosts());
  ASSERT_NO_FATAL_FAILURE(EndCall());
  now_ += absl::Seconds(1);
  ASSERT_OK(c_->TickHosts(now_));
  Wait(options_.host_timeout, {"a", "b"});
  EXPECT_EQ(View("j").state, JobState::kReady);
  Wait(absl::Milliseconds(50), {"a", "b"});
  EXPECT_EQ(Members(), (Names{"a", "b"}));
}

}  // namespace
}  // namespace shardmesh
