// Who speaks for a worker, and who is told a job's secret: an incarnation by the secret that it joined with, a job's
// members by that of the job.
#include <gmock/gmock.h>

#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/incarnation.h"
#include "server/coordinator/testing/coordinator_fixture.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Code = absl::StatusCode;

constexpr char kOfA[] = "a-knows", kOfB[] = "b-knows";

class CoordinatorSecrets : public CoordinatorTest {
 protected:
  CoordinatorSecrets() {
    options_.new_secret = [this] { return absl::StrCat("job-secret-", ++made_); };
    Restart();
  }
  absl::Status Join(const WorkerIdentity& worker, absl::string_view secret, const LastIncarnation& last = {}) {
    return c_->Join(worker, now_, {}, last, absl::InfiniteFuture(), secret);
  }
  // Workers a and b hold job "j", ready.
  void MakeJob() {
    ASSERT_OK(Join(SmallWorker("a"), kOfA));
    ASSERT_OK(Join(SmallWorker("b"), kOfB));
    ASSERT_OK(c_->CreateJob(SmallJob("j", 2), now_, 5));
    Report("a", kOfA);
    Report("b", kOfB);
    ASSERT_EQ(View("j").state, JobState::kReady);
  }
  std::vector<Assignment> Beat(const std::string& name, const std::string& secret,
                               const std::vector<MemberReport>& reports = {}, int64_t incarnation = 1) {
    auto assignments = c_->Heartbeat(name, incarnation, reports, now_, {}, secret);
    EXPECT_OK(assignments);
    return assignments.ok() ? *assignments : std::vector<Assignment>();
  }
  void Report(const std::string& name, const std::string& secret) {
    std::vector<MemberReport> reports;
    for (const Assignment& told : Beat(name, secret)) reports.push_back(ReadyReport(told));
    Beat(name, secret, reports);
  }
  MemberReport FailureOfB() {
    MemberReport failed = ReadyReport(Beat("b", kOfB)[0]);
    failed.state = MemberReport::State::kFailed;
    failed.error = "forged";
    return failed;
  }
  std::string SecretOf(const std::string& job) { return shared_.store->Load()->jobs.at(job).secret; }

  int made_ = 0;
};

TEST_F(CoordinatorSecrets, HeartbeatWithoutTheSecret_ChangesNothing) {
  MakeJob();
  const MemberReport failed = FailureOfB();
  c_->TakeEvents();
  const int writes = shared_.writes;
  for (const char* const secret : {"", kOfA, "b-known", "b-knows-", "b-know"}) {
    EXPECT_THAT(c_->Heartbeat("b", 1, {failed}, now_, {true, true, true}, secret),
                StatusIs(Code::kPermissionDenied,
                         AllOf(HasSubstr("heartbeat of worker b incarnation 1 without the secret that it joined with"),
                               Not(HasSubstr("knows")))));
  }
  EXPECT_EQ(View("j").state, JobState::kReady);
  EXPECT_FALSE(View("j").members[1].retained);
  EXPECT_EQ(shared_.writes, writes);
  EXPECT_THAT(c_->TakeEvents(), IsEmpty());
  Beat("b", kOfB, {failed});
  EXPECT_EQ(View("j").state, JobState::kFailed) << "its own report counts";
}

TEST_F(CoordinatorSecrets, HeartbeatWithoutTheSecret_IsNoSignOfLife) {
  MakeJob();
  for (int i = 0; i < 7; ++i) {
    Advance(absl::Milliseconds(500));
    Beat("a", kOfA);
    EXPECT_THAT(c_->Heartbeat("b", 1, {}, now_, {}, "guessed"), StatusIs(Code::kPermissionDenied, HasSubstr("b")));
  }
  EXPECT_THAT(View("j").error, HasSubstr("worker b (rank 1, pid 71) was silent"));
}

TEST_F(CoordinatorSecrets, LeaveWithoutTheSecret_ChangesNothing) {
  MakeJob();
  for (const char* const secret : {"", kOfA}) {
    EXPECT_THAT(c_->Leave("b", 1, now_, secret),
                StatusIs(Code::kPermissionDenied, HasSubstr("leave of worker b incarnation 1 without the secret")));
  }
  EXPECT_EQ(View("j").state, JobState::kReady);
  Beat("b", kOfB);
  ASSERT_OK(c_->Leave("b", 1, now_, kOfB));
  EXPECT_THAT(c_->Leave("b", 1, now_, ""), StatusIs(Code::kPermissionDenied, HasSubstr("leave of worker b")));
  EXPECT_EQ(View("j").state, JobState::kFailed);
}

TEST_F(CoordinatorSecrets, JoinOfAnIncarnationThatJoined_WithAnotherSecret_IsToldNothing) {
  MakeJob();
  WorkerIdentity elsewhere = SmallWorker("b");
  elsewhere.address = "elsewhere:1";
  for (const WorkerIdentity& worker : {SmallWorker("b"), elsewhere}) {
    for (const char* const secret : {"", kOfA}) {
      const absl::Status refused = Join(worker, secret);
      EXPECT_THAT(refused, StatusIs(Code::kPermissionDenied,
                                    AllOf(HasSubstr("join of worker b incarnation 1"), Not(HasSubstr("localhost")))));
    }
  }
  ASSERT_OK(Join(SmallWorker("b"), kOfB)) << "its own can be repeated";
  Beat("b", kOfB);
  ASSERT_OK(c_->Leave("b", 1, now_, kOfB));
  const absl::Status left = Join(SmallWorker("b"), "guessed");
  EXPECT_THAT(left, StatusIs(Code::kPermissionDenied, HasSubstr("join of worker b")));
  EXPECT_EQ(NextIncarnationOf(left), 2) << "for a worker whose number another program took";
  EXPECT_THAT(Join(SmallWorker("b"), kOfB), StatusIs(Code::kAborted, HasSubstr("has left")));
}

TEST_F(CoordinatorSecrets, IncarnationWithoutASecret_IsThatWithoutOneAlone) {
  ASSERT_OK(Join(SmallWorker("a"), ""));
  Beat("a", "");
  EXPECT_THAT(c_->Heartbeat("a", 1, {}, now_, {}, "some"), StatusIs(Code::kPermissionDenied, HasSubstr("a")));
  EXPECT_THAT(Join(SmallWorker("a"), "some"), StatusIs(Code::kPermissionDenied, HasSubstr("a")));
}

TEST_F(CoordinatorSecrets, NextIncarnation_HasItsOwn) {
  MakeJob();
  EXPECT_THAT(c_->Heartbeat("b", 2, {}, now_, {}, kOfB), StatusIs(Code::kNotFound, HasSubstr("join first")));
  ASSERT_OK(Join(SmallWorker("b", 2), "second", {1, 0, {}}));
  EXPECT_THAT(c_->Heartbeat("b", 2, {}, now_, {}, kOfB), StatusIs(Code::kPermissionDenied, HasSubstr("b")));
  EXPECT_THAT(c_->Heartbeat("b", 1, {}, now_, {}, kOfB), StatusIs(Code::kAborted, HasSubstr("stale")));
  Beat("b", "second", {}, 2);
}

// What it knows of workers and jobs is stored, and an older copy of it as well.
TEST_F(CoordinatorSecrets, CoordinatorRestarts_TheSecretsStay) {
  MakeJob();
  const std::string secret = Beat("b", kOfB)[0].secret;
  EXPECT_FALSE(secret.empty());
  Restart();
  EXPECT_THAT(c_->Heartbeat("b", 1, {}, now_, {}, kOfA), StatusIs(Code::kPermissionDenied, HasSubstr("b")));
  EXPECT_EQ(Beat("b", kOfB)[0].secret, secret);
  ASSERT_OK(Join(SmallWorker("c"), "c-knows"));
  shared_.store = NewMemoryStore();  // one from before they joined
  Restart();
  EXPECT_THAT(c_->Heartbeat("c", 1, {}, now_, {}, "c-knows"), StatusIs(Code::kNotFound, HasSubstr("join first")));
  ASSERT_OK(Join(SmallWorker("c"), "c-knows"));
  Beat("c", "c-knows");
}

TEST_F(CoordinatorSecrets, Job_HasOneAsLongAsItLives_AndAnotherOneOfItsNameAnother) {
  MakeJob();
  const std::string first = Beat("a", kOfA)[0].secret;
  EXPECT_EQ(first, SecretOf("j"));
  EXPECT_EQ(Beat("b", kOfB)[0].secret, first) << "all members are told the same";
  ASSERT_OK(c_->CreateJob(SmallJob("k", 1), now_, 6));
  ASSERT_OK(c_->CreateJob(SmallJob("j", 2), now_, 7, 5));
  std::set<std::string> seen = {first, SecretOf("k"), SecretOf("j")};
  ASSERT_OK(c_->DeleteJob("j", now_));
  ASSERT_OK(c_->CreateJob(SmallJob("j", 2), now_, 8));
  seen.insert(SecretOf("j"));
  EXPECT_EQ(seen.size(), 4u);
  EXPECT_THAT(seen, Each(HasSubstr("job-secret-")));
  EXPECT_THAT(c_->TakeEvents(), Each(Not(HasSubstr("secret"))));
}

// Assigned anew, since a member left before it was READY: members of before and after need not be told apart.
TEST_F(CoordinatorSecrets, JobAssignedAnew_KeepsItsSecret) {
  ASSERT_OK(Join(SmallWorker("a"), kOfA));
  ASSERT_OK(Join(SmallWorker("b"), kOfB));
  ASSERT_OK(c_->CreateJob(SmallJob("j", 2), now_));
  const std::string secret = SecretOf("j");
  ASSERT_OK(c_->Leave("b", 1, now_, kOfB));
  ASSERT_OK(Join(SmallWorker("c"), "c-knows"));
  EXPECT_EQ(View("j").epoch, 2);
  EXPECT_EQ(Beat("c", "c-knows")[0].secret, secret);
}

// Members that hold it have none, and show each other none.
TEST_F(CoordinatorSecrets, JobOfAnOlderVersion_GetsOneWhenItIsNextAssigned) {
  options_.new_secret = [] { return std::string(); };
  Restart();
  MakeJob();
  ASSERT_OK(c_->CreateJob(SmallJob("waits", 3), now_));
  options_.new_secret = [] { return std::string("late"); };
  Restart();
  EXPECT_EQ(Beat("a", kOfA)[0].secret, "");
  EXPECT_EQ(Beat("b", kOfB).size(), 1u);
  ASSERT_OK(Join(SmallWorker("c"), "c-knows"));
  ASSERT_EQ(View("waits").state, JobState::kPreparing);
  EXPECT_EQ(SecretOf("waits"), "late");
  EXPECT_EQ(SecretOf("j"), "");
}

// Who knows all that DescribeJob says cannot take a live member's place in its jobs.
TEST_F(CoordinatorSecrets, ResumedWithoutTheJobsSecret_IsNotTakenOver) {
  for (const char* const secret : {"", "guessed", kOfB}) {
    shared_.store = NewMemoryStore();
    Restart();
    ASSERT_NO_FATAL_FAILURE(MakeJob());
    WorkerIdentity next = SmallWorker("b", 2);
    next.address = SmallWorker("b").address;
    ASSERT_OK(Join(next, "second", {0, 1, {{"j", 1, 1, secret}}}));
    EXPECT_EQ(View("j").state, JobState::kFailed) << "as when it came without the job";
    EXPECT_THAT(c_->Heartbeat("b", 2, {}, now_, {}, "second"), IsOk());
    EXPECT_EQ(View("j").members[1].worker.incarnation, 1);
  }
}

TEST_F(CoordinatorSecrets, ResumedWithTheJobsSecret_GoesOn) {
  MakeJob();
  WorkerIdentity next = SmallWorker("b", 2);
  next.address = SmallWorker("b").address;
  ASSERT_OK(Join(next, "second", {0, 1, {{"j", 1, 1, SecretOf("j")}}}));
  EXPECT_EQ(View("j").state, JobState::kReady);
  EXPECT_EQ(View("j").members[1].worker.incarnation, 2);
}

}  // namespace
}  // namespace shardmesh
