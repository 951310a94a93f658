// A worker's next incarnation takes over what its last one held: which jobs go on, which fail, and what is said of it.
#include <gmock/gmock.h>

#include "server/coordinator/testing/coordinator_fixture.h"

namespace shardmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Code = absl::StatusCode;

// At the place of incarnation 1.
WorkerIdentity NextIncarnation(const std::string& name, int64_t incarnation = 2, const std::string& host = "h1") {
  WorkerIdentity worker = SmallWorker(name, incarnation, host);
  worker.address = SmallWorker(name).address;
  return worker;
}

LastIncarnation Resumes(int64_t incarnation, std::vector<ResumedJob> resumed) {
  return {0, incarnation, std::move(resumed)};
}

TEST_F(CoordinatorTest, Resume_ReadyJob_GoesOnWithTheNextIncarnation) {
  MakeReadyJob();
  Beat("a", {ReadyReport(Beat("a")[0], 7)});
  c_->TakeEvents();
  ASSERT_OK(c_->Join(NextIncarnation("b"), now_, {}, Resumes(1, {{"j", 1, 1}})));
  EXPECT_THAT(c_->TakeEvents(), ElementsAre("event=worker_resumed worker=b incarnation=2 was=1 jobs=1 pid=72"));
  const JobView view = View("j");
  EXPECT_EQ(view.state, JobState::kReady);
  EXPECT_EQ(view.epoch, 1);
  EXPECT_EQ(view.committed_step, 7);
  EXPECT_EQ(view.error, "");
  EXPECT_TRUE(view.members[1].worker == NextIncarnation("b"));
  EXPECT_TRUE(view.members[1].alive && view.members[1].ready);
  EXPECT_TRUE(view.members[0].worker == SmallWorker("a"));
  const std::vector<Assignment> told = Beat("b", {}, 2);
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].epoch, 1);
  EXPECT_EQ(told[0].rank, 1);
  EXPECT_TRUE(told[0].peers[0] == SmallWorker("a"));
  EXPECT_TRUE(told[0].peers[1] == NextIncarnation("b"));
  EXPECT_EQ(Beat("a")[0].peers[1].incarnation, 2) << "the others are told as well";
  EXPECT_THAT(c_->Heartbeat("b", 1, {}, now_), StatusIs(Code::kAborted, HasSubstr("2 has joined since")));
  EXPECT_THAT(c_->Leave("b", 1, now_), StatusIs(Code::kAborted, HasSubstr("2 has joined since")));
}

TEST_F(CoordinatorTest, Resume_LeadingRank_GoesOnReportingSteps) {
  MakeReadyJob();
  Beat("a", {ReadyReport(Beat("a")[0], 7)});
  ASSERT_OK(c_->Join(NextIncarnation("a"), now_, {}, Resumes(1, {{"j", 1, 0}})));
  Beat("a", {ReadyReport(Beat("a", {}, 2)[0], 8)}, 2);
  EXPECT_EQ(View("j").committed_step, 8);
  EXPECT_EQ(View("j").state, JobState::kReady);
}

TEST_F(CoordinatorTest, Resume_RepeatedAndAfterARestart_IsAsItWas) {
  MakeReadyJob();
  for (int time = 0; time < 2; ++time) {
    ASSERT_OK(c_->Join(NextIncarnation("b"), now_, {}, Resumes(1, {{"j", 1, 1}}))) << "can be repeated";
  }
  Restart();
  EXPECT_EQ(View("j").state, JobState::kReady);
  EXPECT_TRUE(View("j").members[1].worker == NextIncarnation("b"));
  EXPECT_TRUE(View("j").members[1].alive && View("j").members[1].ready);
  EXPECT_EQ(Beat("b", {}, 2).size(), 1u);
  EXPECT_THAT(c_->Heartbeat("b", 1, {}, now_), StatusIs(Code::kAborted, HasSubstr("stale")));
  ASSERT_OK(c_->Join(NextIncarnation("b", 3), now_, {}, Resumes(2, {{"j", 1, 1}})));
  EXPECT_EQ(Beat("b", {}, 3).size(), 1u) << "and so the incarnation after that";
}

TEST_F(CoordinatorTest, Resume_IncarnationBetweenNeverJoined_ItsMemoryTellsWhoseItWas) {
  MakeReadyJob();
  const auto join = [&](int64_t incarnation, int64_t resumes, std::vector<ResumedJob> resumed) {
    LastIncarnation last = Resumes(resumes, std::move(resumed));
    last.dead = 1;  // its socket had the first incarnation's name
    return c_->Join(NextIncarnation("b", incarnation), now_, {}, last);
  };
  ASSERT_OK(join(5, 4, {{"j", 1, 1}}));
  EXPECT_EQ(View("j").state, JobState::kReady);
  EXPECT_TRUE(View("j").members[1].worker == NextIncarnation("b", 5));
  EXPECT_EQ(Beat("b", {}, 5).size(), 1u);
  // Without memory of that incarnation, or with another's, it is not known to be dead.
  for (const ResumedJob& other : {ResumedJob{"j", 1, 0}, {"j", 2, 1}, {"j", 1, 2}, {"none", 1, 1}}) {
    EXPECT_THAT(join(9, 8, {other}), StatusIs(Code::kAlreadyExists, HasSubstr("alive as incarnation 5")));
  }
  EXPECT_THAT(join(9, 8, {}), StatusIs(Code::kAlreadyExists, HasSubstr("alive")));
  EXPECT_THAT(join(9, 4, {{"j", 1, 1}}), StatusIs(Code::kAlreadyExists, HasSubstr("alive")))
      << "an older incarnation than the one that joined";
  EXPECT_EQ(View("j").state, JobState::kReady);
}

TEST_F(CoordinatorTest, Resume_OtherJobsOfTheLastIncarnation_FailOrAreAssignedAnew) {
  for (const char* worker : {"a", "b"}) ASSERT_OK(c_->Join(SmallWorker(worker), now_));
  const std::vector<std::string> jobs = {"named", "other_epoch", "other_rank", "preparing", "unnamed", "failed"};
  for (const std::string& job : jobs) ASSERT_OK(c_->CreateJob(SmallJob(job, 2), now_));
  for (const char* worker : {"a", "b"}) {
    std::vector<MemberReport> reports;
    for (const Assignment& told : Beat(worker)) {
      reports.push_back(ReadyReport(told));
      if (reports.back().job == "preparing") reports.back().state = MemberReport::State::kPreparing;
      if (reports.back().job == "failed") reports.back().state = MemberReport::State::kFailed;
    }
    Beat(worker, reports);
  }
  const std::string first_cause = View("failed").error;
  ASSERT_OK(c_->Join(NextIncarnation("b"), now_, {},
                     Resumes(1, {{"named", 1, 1},
                                 {"other_epoch", 2, 1},
                                 {"other_rank", 1, 0},
                                 {"preparing", 1, 1},
                                 {"failed", 1, 1},
                                 {"no_such_job", 1, 1}})));
  EXPECT_EQ(View("named").state, JobState::kReady);
  for (const char* job : {"other_epoch", "other_rank", "unnamed"}) {
    EXPECT_EQ(View(job).state, JobState::kFailed) << job;
    EXPECT_THAT(View(job).error, HasSubstr("worker b (rank 1, pid 71) ended")) << job;
  }
  EXPECT_EQ(View("failed").error, first_cause);
  EXPECT_EQ(View("preparing").epoch, 2);
  const std::vector<Assignment> told = Beat("b", {}, 2);
  ASSERT_EQ(told.size(), 2u);
  EXPECT_EQ(told[0].definition->spec().name, "named");
  EXPECT_EQ(told[1].definition->spec().name, "preparing");
  EXPECT_EQ(told[1].epoch, 2);
}

TEST_F(CoordinatorTest, Resume_SilentButNotMarkedDead_GoesOn) {
  MakeReadyJob();
  now_ += absl::Seconds(3.1);  // no tick yet
  Beat("a");
  ASSERT_OK(c_->CreateJob(SmallJob("w", 2), now_));
  ASSERT_EQ(View("w").state, JobState::kWaiting);
  ASSERT_OK(c_->Join(NextIncarnation("b"), now_, {}, Resumes(1, {{"j", 1, 1}})));
  EXPECT_EQ(View("j").state, JobState::kReady);
  EXPECT_TRUE(View("j").members[1].alive);
  EXPECT_EQ(View("w").state, JobState::kPreparing) << "the worker counts again";
}

TEST_F(CoordinatorTest, Resume_DeadOrLeft_JoinsWithoutTheJobs) {
  MakeReadyJob();
  Advance(absl::Seconds(4));
  const std::string error = View("j").error;
  c_->TakeEvents();
  ASSERT_OK(c_->Join(NextIncarnation("b"), now_, {}, Resumes(1, {{"j", 1, 1}})));
  EXPECT_THAT(c_->TakeEvents(), ElementsAre(HasSubstr("event=worker_joined worker=b incarnation=2")));
  EXPECT_EQ(View("j").error, error);
  EXPECT_THAT(Beat("b", {}, 2), IsEmpty());
  ASSERT_OK(c_->DeleteJob("j", now_));
  ASSERT_OK(c_->CreateJob(SmallJob("k", 1), now_));
  Beat("b", {ReadyReport(Beat("b", {}, 2)[0])}, 2);
  ASSERT_OK(c_->Leave("b", 2, now_));
  EXPECT_THAT(View("k").error, HasSubstr("worker b (rank 0, pid 72) left"));
  ASSERT_OK(c_->Join(NextIncarnation("b", 3), now_, {}, Resumes(2, {{"k", 2, 0}})));
  EXPECT_EQ(View("k").state, JobState::kFailed);
}

TEST_F(CoordinatorTest, Resume_AtAnotherPlace_IsAnotherIncarnation) {
  WorkerIdentity address = NextIncarnation("b"), socket = NextIncarnation("b");
  address.address = "localhost:9";
  socket.local_socket = "/run/other";
  for (const WorkerIdentity& elsewhere : {address, socket}) {
    shared_ = {};
    Restart();
    MakeReadyJob();
    c_->TakeEvents();
    ASSERT_OK(c_->Join(elsewhere, now_, {}, Resumes(1, {{"j", 1, 1}})));
    EXPECT_THAT(c_->TakeEvents(), ElementsAre(HasSubstr("event=worker_dead worker=b incarnation=1 found_by"),
                                              HasSubstr("event=job_failed job=j"), HasSubstr("event=worker_joined")));
    EXPECT_THAT(View("j").error, HasSubstr("worker b (rank 1, pid 71) ended"));
    EXPECT_THAT(Beat("b", {}, 2), IsEmpty());
  }
}

TEST_F(CoordinatorTest, Resume_OtherHostOrOtherIncarnation_RefusedWhileThatOneLives) {
  MakeReadyJob();
  EXPECT_THAT(c_->Join(NextIncarnation("b", 5, "h2"), now_, {}, Resumes(1, {{"j", 1, 1}})),
              StatusIs(Code::kAlreadyExists, HasSubstr("alive as incarnation 1")));
  EXPECT_THAT(c_->Join(NextIncarnation("b", 5), now_, {}, Resumes(3, {})),
              StatusIs(Code::kAlreadyExists, HasSubstr("alive as incarnation 1")));
  EXPECT_EQ(View("j").state, JobState::kReady);
  EXPECT_EQ(Beat("b").size(), 1u);
  now_ += absl::Seconds(3.1);
  ASSERT_OK(c_->Join(NextIncarnation("b", 5), now_, {}, Resumes(3, {}))) << "silent, and still another incarnation";
  EXPECT_THAT(View("j").error, HasSubstr("worker b (rank 1, pid 71) was silent for 3.1s"));
  EXPECT_THAT(Beat("b", {}, 5), IsEmpty());
}

TEST_F(CoordinatorTest, Resume_JobOnSeveralHosts_GoesOn) {
  const WorkerTraits spans{true, false};
  ASSERT_OK(c_->Join(SmallWorker("a", 1, "h1"), now_, spans));
  ASSERT_OK(c_->Join(SmallWorker("b", 1, "h2"), now_, spans));
  ASSERT_OK(c_->CreateJob(SmallJob("j", 2), now_));
  for (const char* worker : {"a", "b"}) {
    const auto told = c_->Heartbeat(worker, 1, {}, now_, spans).value();
    ASSERT_OK(c_->Heartbeat(worker, 1, {ReadyReport(told[0])}, now_, spans));
  }
  ASSERT_EQ(View("j").state, JobState::kReady);
  const WorkerIdentity next = NextIncarnation("b", 2, "h2");
  ASSERT_OK(c_->Join(next, now_, spans, Resumes(1, {{"j", 1, 1}})));
  EXPECT_EQ(View("j").state, JobState::kReady) << View("j").error;
  EXPECT_EQ(View("j").epoch, 1);
  EXPECT_TRUE(View("j").members[1].worker == next);
  EXPECT_EQ(c_->Heartbeat("b", 2, {}, now_, spans).value().size(), 1u);
}

TEST_F(CoordinatorTest, Resume_StoreFails_NothingChanged) {
  MakeReadyJob();
  ASSERT_OK(c_->CreateJob(SmallJob("other", 2), now_));
  c_->TakeEvents();
  shared_.broken = true;
  EXPECT_THAT(c_->Join(NextIncarnation("b"), now_, {}, Resumes(1, {{"j", 1, 1}})),
              StatusIs(Code::kUnavailable, HasSubstr("disk full")));
  EXPECT_THAT(c_->TakeEvents(), IsEmpty());
  EXPECT_TRUE(View("j").members[1].worker == SmallWorker("b"));
  EXPECT_EQ(View("other").epoch, 1);
  EXPECT_EQ(Beat("b").size(), 2u);
  shared_.broken = false;
  ASSERT_OK(c_->Join(NextIncarnation("b"), now_, {}, Resumes(1, {{"j", 1, 1}})));
  EXPECT_EQ(View("j").state, JobState::kReady);
  EXPECT_EQ(View("other").state, JobState::kPreparing);
  EXPECT_EQ(View("other").epoch, 2);
}

TEST_F(CoordinatorTest, Kept_IsWhatTheLivingWorkerSaidLast) {
  const WorkerTraits retained{false, false, true};
  MakeReadyJob();
  EXPECT_FALSE(retained == WorkerTraits());
  EXPECT_FALSE(View("j").members[1].retained);
  ASSERT_OK(c_->Heartbeat("b", 1, {}, now_, retained));
  EXPECT_TRUE(View("j").members[1].retained);
  EXPECT_FALSE(View("j").members[0].retained);
  Beat("b");
  EXPECT_FALSE(View("j").members[1].retained) << "its node is gone";
  ASSERT_OK(c_->Join(NextIncarnation("b"), now_, retained, Resumes(1, {{"j", 1, 1}})));
  EXPECT_TRUE(View("j").members[1].retained);
  now_ += absl::Seconds(3.1);
  EXPECT_FALSE(View("j").members[1].alive);
  EXPECT_TRUE(View("j").members[1].retained) << "silent: that is when one wants to know";
  Advance(absl::Seconds(8));
  EXPECT_FALSE(View("j").members[1].retained) << "dead";
}

// A waiting job that could start now, but of which nothing told the coordinator: it is looked at again once something
// happens that may let it start.
TEST_F(CoordinatorTest, Kept_AssignsNothing) {
  for (const char* worker : {"a", "b"}) ASSERT_OK(c_->Join(SmallWorker(worker), now_));
  ASSERT_OK(c_->CreateJob(SmallJob("j", 2), now_ + absl::Seconds(4)));  // both are silent
  ASSERT_OK(c_->Heartbeat("a", 1, {}, now_, {false, false, true}));
  EXPECT_EQ(View("j").state, JobState::kWaiting);
  ASSERT_OK(c_->Heartbeat("a", 1, {}, now_, {true, false, true}));
  EXPECT_EQ(View("j").state, JobState::kPreparing);
}

}  // namespace
}  // namespace shardmesh
