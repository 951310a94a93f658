#include "server/coordinator/coordinator.h"

#include <gmock/gmock.h>

#include <limits>
#include <optional>

#include "absl/strings/str_cat.h"
#include "core/base/incarnation.h"
#include "server/coordinator/testing/coordinator_fixture.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

TEST_F(CoordinatorTest, CreateJob_Repeated_FindsTheSameJob) {
  EXPECT_TRUE(c_->CreateJob(SmallJob("j", 2), now_).value());
  EXPECT_FALSE(c_->CreateJob(SmallJob("j", 2), now_).value());
  EXPECT_THAT(c_->CreateJob(SmallJob("j", 3), now_),
              StatusIs(Code::kAlreadyExists, AllOf(HasSubstr("job j"), HasSubstr("mesh: fsdp=2 there, fsdp=3 here"))));
}

TEST_F(CoordinatorTest, CreateJob_RepeatedWithItsUid_WasCreated) {
  EXPECT_TRUE(c_->CreateJob(SmallJob("j", 2), now_, 5).value());
  EXPECT_TRUE(c_->CreateJob(SmallJob("j", 2), now_, 5).value());
  EXPECT_FALSE(c_->CreateJob(SmallJob("j", 2), now_, 6).value());
  Restart();
  EXPECT_TRUE(c_->CreateJob(SmallJob("j", 2), now_, 5).value());
  EXPECT_EQ(View("j").uid, 5);
}

TEST_F(CoordinatorTest, CreateJob_InThePlaceOfAnother) {
  MakeReadyJob();
  const int64_t old_epoch = View("j").epoch;
  EXPECT_THAT(c_->CreateJob(SmallJob("k", 2), now_, 6, 5), StatusIs(Code::kNotFound, HasSubstr("no job k")));
  EXPECT_THAT(c_->CreateJob(SmallJob("j", 1), now_, 6, 5), StatusIs(Code::kAborted, HasSubstr("has uid 0, not 5")));
  EXPECT_EQ(View("j").epoch, old_epoch);
  ASSERT_OK(c_->DeleteJob("j", now_));
  ASSERT_OK(c_->CreateJob(SmallJob("j", 2), now_, 5));
  const int64_t epoch = View("j").epoch;
  for (int time = 0; time < 2; ++time) {  // the second one finds what the first one made
    const int writes = shared_.writes;
    EXPECT_TRUE(c_->CreateJob(SmallJob("j", 1), now_, 6, 5).value());
    EXPECT_EQ(shared_.writes, writes + 1 - time) << "a crash between two would leave neither job";
    EXPECT_EQ(View("j").uid, 6);
    EXPECT_EQ(View("j").epoch, epoch + 1);
    Restart();
    EXPECT_EQ(View("j").definition->plan().num_ranks(), 1) << "the new specification is stored";
  }
  EXPECT_THAT(c_->CreateJob(SmallJob("j", 1), now_, 7, 5), StatusIs(Code::kAborted, HasSubstr("not 5")));
  EXPECT_THAT(c_->DeleteJob("j", now_, 5), StatusIs(Code::kNotFound, HasSubstr("has uid 6, not 5")));
  EXPECT_EQ(View("j").uid, 6);
  ASSERT_OK(c_->DeleteJob("j", now_, 6));
}

TEST_F(CoordinatorTest, CreateJob_InThePlaceOfAnother_NotStored_TheOldOneStays) {
  ASSERT_OK(c_->CreateJob(SmallJob("j", 2), now_, 5));
  shared_.broken = true;
  EXPECT_FALSE(c_->CreateJob(SmallJob("j", 1), now_, 6, 5).ok());
  shared_.broken = false;
  EXPECT_EQ(View("j").uid, 5);
  EXPECT_EQ(View("j").definition->plan().num_ranks(), 2);
}

TEST_F(CoordinatorTest, UnknownJob_ListsThoseThereAre) {
  EXPECT_THAT(c_->DescribeJob("x", now_), StatusIs(Code::kNotFound, HasSubstr("there are no jobs")));
  ASSERT_OK(c_->CreateJob(SmallJob("j", 2), now_));
  ASSERT_OK(c_->CreateJob(SmallJob("k", 2), now_));
  for (const absl::Status& status :
       {c_->DescribeJob("x", now_).status(), c_->DeleteJob("x", now_), c_->Definition("x").status()}) {
    EXPECT_THAT(status, StatusIs(Code::kNotFound, HasSubstr("no job x; there are: j, k")));
  }
}

TEST_F(CoordinatorTest, Job_IsReadyWhenAllMembersAre) {
  ASSERT_OK(c_->Join(SmallWorker("a"), now_));
  ASSERT_OK(c_->Join(SmallWorker("b"), now_));
  ASSERT_OK(c_->CreateJob(SmallJob("j", 2), now_));
  const std::vector<Assignment> to_a = Beat("a"), to_b = Beat("b");
  ASSERT_EQ(to_a.size(), 1u);
  EXPECT_EQ(to_a[0].epoch, 1);
  EXPECT_EQ(to_a[0].peers[1].name, "b");
  EXPECT_TRUE(Beat("b")[0].peers.SharesWith(to_a[0].peers)) << "one list for all members";
  EXPECT_EQ(to_b[0].rank, 1);
  Beat("a", {ReadyReport(to_a[0])});
  EXPECT_EQ(View("j").state, JobState::kPreparing);
  Beat("b", {ReadyReport(to_b[0])});
  EXPECT_EQ(View("j").state, JobState::kReady);
}

TEST_F(CoordinatorTest, OtherStateFile_WorkerKeepsItsJob) {
  MakeReadyJob();
  const MemberReport report = ReadyReport(Beat("a")[0], 7);
  SharedStore::Shared other;
  std::swap(shared_, other);
  Restart();
  ASSERT_OK(c_->Join(SmallWorker("c"), now_));
  ASSERT_OK(c_->CreateJob(SmallJob("other", 1), now_));
  ASSERT_OK(c_->DeleteJob("other", now_));  // so epoch 1 was given in this store, too
  c_->TakeEvents();
  for (int time = 0; time < 2; ++time) {
    EXPECT_THAT(c_->Heartbeat("a", 1, {report}, now_),
                StatusIs(Code::kFailedPrecondition, HasSubstr("worker a holds job j (epoch 1), which was never made")));
  }
  EXPECT_THAT(c_->TakeEvents(), ElementsAre(HasSubstr("event=other_state_file worker=a")));
  std::swap(shared_, other);
  Restart();
  EXPECT_EQ(Beat("a", {report}).size(), 1u);
}

TEST_F(CoordinatorTest, OlderStateFile_WorkerKeepsTheJobMadeSince_AndOthersGoOn) {
  MakeReadyJob();
  const MemberReport known = ReadyReport(Beat("a")[0], 7);
  MemberReport since = known, later = known;
  since.job = "made_since";
  EXPECT_THAT(c_->Heartbeat("a", 1, {since, known}, now_),
              StatusIs(Code::kFailedPrecondition, HasSubstr("holds job made_since (epoch 1)")));
  EXPECT_EQ(View("j").committed_step, 7);
  later.epoch = 2;
  EXPECT_THAT(c_->Heartbeat("a", 1, {later}, now_), StatusIs(Code::kFailedPrecondition, HasSubstr("job j (epoch 2)")));
  ASSERT_OK(c_->DeleteJob("j", now_));
  Restart();
  EXPECT_TRUE(Beat("a", {known}).empty()) << "deleted while the worker was away: closed";
}

TEST_F(CoordinatorTest, Progress_ComesFromRankZeroAtTheSameEpochAndNeverFalls) {
  MakeReadyJob();
  const auto report = [&](const char* worker, int64_t step, int64_t epoch, std::vector<int64_t> published) {
    MemberReport r = ReadyReport(Beat(worker)[0], step);
    r.epoch = epoch;
    r.published_steps = std::move(published);
    Beat(worker, {r});
  };
  report("a", 5, 1, {4, 5});
  EXPECT_EQ(View("j").committed_step, 5);
  EXPECT_EQ(View("j").published_steps, (std::vector<int64_t>{4, 5}));
  report("b", 9, 1, {9});  // not rank 0
  report("a", 8, 0, {8});  // an older epoch
  report("a", 3, 1, {2});  // late
  EXPECT_EQ(View("j").committed_step, 5);
  EXPECT_EQ(View("j").published_steps, (std::vector<int64_t>{4, 5}));
  const int writes = shared_.writes;
  report("a", 6, 1, {});
  EXPECT_EQ(shared_.writes, writes) << "progress is stored by the tick";
  ASSERT_OK(c_->Tick(now_));
  Restart();
  EXPECT_EQ(View("j").committed_step, 6);
}

TEST_F(CoordinatorTest, SilentWorker_FailsItsJobsNamingItself) {
  MakeReadyJob();
  for (int i = 0; i < 7; ++i) {
    Advance(absl::Milliseconds(500));
    Beat("a");
  }
  const JobView view = View("j");
  EXPECT_EQ(view.state, JobState::kFailed);
  EXPECT_THAT(view.error, AllOf(HasSubstr("worker b (rank 1, pid 71)"), HasSubstr("silent for 3.5s, longer than 3s"),
                                HasSubstr("create it again")));
  EXPECT_TRUE(view.members[0].alive);
  EXPECT_FALSE(view.members[1].alive);
  ASSERT_OK(c_->Leave("a", 1, now_));
  EXPECT_EQ(View("j").error, view.error) << "the first cause is kept";
}

TEST_F(CoordinatorTest, DeadWorkerHeardAgain_KeepsItsFailedJobUntilItIsDeleted) {
  MakeReadyJob();
  Advance(absl::Seconds(4));
  EXPECT_EQ(View("j").state, JobState::kFailed);
  EXPECT_EQ(Beat("b").size(), 1u);
  EXPECT_TRUE(View("j").members[1].alive);
  EXPECT_EQ(View("j").state, JobState::kFailed);
  ASSERT_OK(c_->DeleteJob("j", now_));
  EXPECT_TRUE(Beat("b").empty());
}

TEST_F(CoordinatorTest, DeletedAndCreatedAgain_HasALargerEpoch) {
  MakeReadyJob();
  ASSERT_OK(c_->DeleteJob("j", now_));
  Restart();
  for (const char* worker : {"a", "b"}) Beat(worker);
  ASSERT_OK(c_->CreateJob(SmallJob("j", 2), now_));
  EXPECT_EQ(View("j").epoch, 2) << "a worker would take it for the job whose memory it still holds";
}

TEST_F(CoordinatorTest, MemberReportsFailure_FailsTheJob) {
  MakeReadyJob();
  MemberReport report = ReadyReport(Beat("b")[0]);
  report.state = MemberReport::State::kFailed;
  report.error = "peer a hung";
  EXPECT_EQ(Beat("b", {report}).size(), 1u);
  EXPECT_THAT(View("j").error, HasSubstr("worker b (rank 1, pid 71) failed: peer a hung"));
}

TEST_F(CoordinatorTest, Leave_FailsJobsAndEndsTheIncarnation) {
  MakeReadyJob();
  ASSERT_OK(c_->Leave("b", 1, now_));
  ASSERT_OK(c_->Leave("b", 1, now_)) << "can be repeated";
  EXPECT_THAT(View("j").error, HasSubstr("worker b (rank 1, pid 71) left"));
  EXPECT_THAT(c_->Heartbeat("b", 1, {}, now_), StatusIs(Code::kAborted, HasSubstr("has left")));
  EXPECT_THAT(c_->Join(SmallWorker("b"), now_), StatusIs(Code::kAborted, HasSubstr("has left")));
  EXPECT_OK(c_->Join(SmallWorker("b", 2), now_));
}

TEST_F(CoordinatorTest, PlanHashDiffers_WhilePreparing_AnotherWorkerTakesItsPlace) {
  for (const char* name : {"a", "b", "c"}) ASSERT_OK(c_->Join(SmallWorker(name), now_));
  ASSERT_OK(c_->CreateJob(SmallJob("j", 2), now_));
  MemberReport report = ReadyReport(Beat("a")[0]);
  const std::string ours = report.plan_hash;
  report.plan_hash = std::string(32, '0');
  EXPECT_THAT(
      c_->Heartbeat("a", 1, {report}, now_),
      StatusIs(Code::kFailedPrecondition, AllOf(HasSubstr(ours), HasSubstr(report.plan_hash), HasSubstr("worker a"))));
  const JobView view = View("j");
  EXPECT_EQ(view.state, JobState::kPreparing);
  EXPECT_EQ(view.epoch, 2);
  EXPECT_EQ(view.members[0].worker.name, "b");
  EXPECT_EQ(view.members[1].worker.name, "c");
  EXPECT_TRUE(Beat("a", {report}).empty()) << "its report is of the old epoch now";
  EXPECT_OK(c_->Leave("a", 1, now_));
  EXPECT_EQ(View("j").state, JobState::kPreparing) << "it is no member any more";
}

TEST_F(CoordinatorTest, PlanHashDiffers_NobodyElse_WaitsWithoutThatIncarnation) {
  ASSERT_OK(c_->Join(SmallWorker("a"), now_));
  ASSERT_OK(c_->CreateJob(SmallJob("j", 1), now_));
  MemberReport report = ReadyReport(Beat("a")[0]);
  report.plan_hash = std::string(32, '0');
  EXPECT_FALSE(c_->Heartbeat("a", 1, {report}, now_).ok());
  EXPECT_EQ(View("j").state, JobState::kWaiting);
  EXPECT_EQ(View("j").waiting_for, "1 live worker on one host; none is there");
  Restart();
  Beat("a");
  EXPECT_EQ(View("j").state, JobState::kWaiting);
  ASSERT_OK(c_->Leave("a", 1, now_));
  ASSERT_OK(c_->Join(SmallWorker("a", 2), now_));
  EXPECT_EQ(View("j").state, JobState::kPreparing) << "a new incarnation may be of the right version";
  EXPECT_EQ(View("j").epoch, 2);
}

TEST_F(CoordinatorTest, PlanHashDiffers_WhenReady_ChangesNothing) {
  MakeReadyJob();
  MemberReport report = ReadyReport(Beat("a")[0]);
  report.plan_hash = std::string(32, '0');
  EXPECT_THAT(c_->Heartbeat("a", 1, {report}, now_), StatusIs(Code::kFailedPrecondition, HasSubstr("plan hash")));
  EXPECT_EQ(View("j").state, JobState::kReady);
}

TEST_F(CoordinatorTest, Join_Incarnations) {
  ASSERT_OK(c_->Join(SmallWorker("a", 5), now_));
  EXPECT_OK(c_->Join(SmallWorker("a", 5), now_)) << "can be repeated";
  EXPECT_THAT(c_->Join(SmallWorker("a", 4), now_),
              StatusIs(Code::kAborted, AllOf(HasSubstr("incarnation 4"), HasSubstr("5 has joined"))));
  EXPECT_THAT(c_->Join(SmallWorker("a", 6), now_),
              StatusIs(Code::kAlreadyExists, HasSubstr("alive as incarnation 5 (pid 75)")));
  WorkerIdentity twin = SmallWorker("a", 5);
  twin.pid = 99;
  EXPECT_THAT(c_->Join(twin, now_), StatusIs(Code::kAlreadyExists, HasSubstr("now 99")));
  now_ += absl::Seconds(3) + absl::Milliseconds(1);
  EXPECT_OK(c_->Join(SmallWorker("a", 6), now_)) << "the old one is silent for longer than the timeout";
  EXPECT_THAT(c_->Heartbeat("a", 5, {}, now_), StatusIs(Code::kAborted, HasSubstr("6 has joined since")));
}

// The wall clock was set back, or somebody else joined: the worker takes the number that the refusal says.
TEST_F(CoordinatorTest, RefusedIncarnation_TheRefusalSaysWhichOneIsTaken) {
  ASSERT_OK(c_->Join(SmallWorker("a", 5), now_));
  EXPECT_EQ(NextIncarnationOf(c_->Join(SmallWorker("a", 4), now_)), 6);
  EXPECT_EQ(NextIncarnationOf(c_->Heartbeat("a", 3, {}, now_).status()), 6);
  EXPECT_EQ(NextIncarnationOf(c_->Join(SmallWorker("a", 6), now_)), std::nullopt) << "it is the name that is taken";
  ASSERT_OK(c_->Leave("a", 5, now_));
  EXPECT_EQ(NextIncarnationOf(c_->Join(SmallWorker("a", 5), now_)), 6);
  EXPECT_EQ(NextIncarnationOf(c_->Heartbeat("a", 5, {}, now_).status()), 6);
  EXPECT_OK(c_->Join(SmallWorker("a", 6), now_));
}

TEST_F(CoordinatorTest, IncarnationFarAhead_IsRefused_AndNotStored) {
  const absl::Time wall = absl::FromUnixSeconds(1'700'000'000);
  const int64_t today = absl::ToUnixNanos(wall), tomorrow = absl::ToUnixNanos(wall + absl::Hours(24));
  const auto join = [&](const std::string& name, int64_t incarnation) {
    return c_->Join(SmallWorker(name, incarnation), now_, {}, {}, wall);
  };
  for (const int64_t nonsense : {tomorrow + 1, std::numeric_limits<int64_t>::max()}) {
    const absl::Status refused = join("a", nonsense);
    EXPECT_THAT(refused, StatusIs(Code::kAborted, AllOf(HasSubstr("too far ahead"), HasSubstr(absl::StrCat(today)))));
    EXPECT_EQ(NextIncarnationOf(refused), today);
  }
  ASSERT_OK(join("a", tomorrow));
  now_ += absl::Seconds(4);
  ASSERT_OK(join("a", tomorrow + 3)) << "incarnations between them never joined";
  now_ += absl::Seconds(4);
  EXPECT_EQ(NextIncarnationOf(join("a", tomorrow + absl::ToInt64Nanoseconds(absl::Hours(24)))), tomorrow + 4);
  EXPECT_EQ(NextIncarnationOf(join("a", today)), tomorrow + 4);
  EXPECT_OK(join("a", tomorrow + 4));
}

// As older versions took it. The name is free once that incarnation is silent.
TEST_F(CoordinatorTest, StateFileWithTheLargestIncarnation_TheNameIsNotBlocked) {
  StoreBatch batch;
  batch.put_workers.push_back({SmallWorker("a", std::numeric_limits<int64_t>::max()), WorkerState::kAlive});
  ASSERT_OK(shared_.store->Write(batch));
  Restart();
  EXPECT_THAT(c_->Join(SmallWorker("a", 5), now_), StatusIs(Code::kAborted, HasSubstr("is stale")));
  now_ += absl::Seconds(3.1);
  ASSERT_OK(c_->Join(SmallWorker("a", 5), now_));
  EXPECT_TRUE(Beat("a", {}, 5).empty());
}

TEST_F(CoordinatorTest, StepThatNeverWas_IsCorrectedByTrueReports) {
  MakeReadyJob();
  const auto report = [&](int64_t step) {
    const std::vector<Assignment> told = Beat("a");
    EXPECT_EQ(told.size(), 1u);
    Beat("a", {ReadyReport(told[0], step)});
    Beat("b");
  };
  report(3);
  report(int64_t{1} << 62);
  report(4);
  EXPECT_EQ(View("j").committed_step, int64_t{1} << 62) << "one report may have come late";
  for (int64_t step = 5; step < 12; ++step) {
    now_ += absl::Milliseconds(500);
    report(step);
  }
  EXPECT_EQ(View("j").committed_step, 11);
  report(10);  // late
  now_ += absl::Seconds(1);
  report(12);
  now_ += absl::Seconds(2.5);
  report(11);  // late again, and not for a whole time-out
  EXPECT_EQ(View("j").committed_step, 12);
}

TEST_F(CoordinatorTest, NewIncarnationThatFoundTheOldOneDead_TakesItsPlaceAtOnce) {
  MakeReadyJob();
  EXPECT_THAT(c_->Join(SmallWorker("b", 2), now_, {}, {3}),
              StatusIs(Code::kAlreadyExists, HasSubstr("alive as incarnation 1")))
      << "that was another incarnation";
  WorkerIdentity elsewhere = SmallWorker("b", 2);
  elsewhere.host_id = "another";
  EXPECT_THAT(c_->Join(elsewhere, now_, {}, {1}), StatusIs(Code::kAlreadyExists, HasSubstr("alive as incarnation 1")))
      << "it cannot know";
  EXPECT_EQ(View("j").error, "");
  ASSERT_OK(c_->Join(SmallWorker("b", 2), now_, {}, {1}));
  EXPECT_THAT(View("j").error, HasSubstr("worker b (rank 1, pid 71) ended"));
  EXPECT_TRUE(Beat("b", {}, 2).empty()) << "the job was the old incarnation's";
  EXPECT_OK(c_->Join(SmallWorker("b", 2), now_, {}, {1})) << "can be repeated";
  EXPECT_THAT(c_->Join(SmallWorker("b", 1), now_, {}, {1}), StatusIs(Code::kAborted, HasSubstr("2 has joined since")));
}

TEST_F(CoordinatorTest, NewIncarnationOfASilentWorker_FailsTheOldOnesJobs) {
  MakeReadyJob();
  now_ += absl::Seconds(3.1);
  ASSERT_OK(c_->Join(SmallWorker("b", 2), now_));
  EXPECT_THAT(View("j").error, HasSubstr("worker b (rank 1, pid 71) was silent"));
  EXPECT_TRUE(Beat("b", {}, 2).empty()) << "the job was the old incarnation's";
  EXPECT_FALSE(View("j").members[1].alive);
}

TEST_F(CoordinatorTest, Heartbeat_NotJoined_NotFound) {
  EXPECT_THAT(c_->Heartbeat("a", 1, {}, now_), StatusIs(Code::kNotFound, HasSubstr("worker a has not joined")));
  ASSERT_OK(c_->Join(SmallWorker("a", 5), now_));
  EXPECT_THAT(c_->Heartbeat("a", 6, {}, now_), StatusIs(Code::kNotFound, HasSubstr("incarnation 6")));
  EXPECT_THAT(c_->Leave("x", 1, now_), StatusIs(Code::kNotFound, HasSubstr("worker x")));
}

TEST_F(CoordinatorTest, Heartbeat_WrongRank_RefusedAndNothingChanges) {
  MakeReadyJob();
  MemberReport report = ReadyReport(Beat("b")[0], 9);
  report.rank = 0;
  EXPECT_THAT(c_->Heartbeat("b", 1, {report}, now_),
              StatusIs(Code::kInvalidArgument, HasSubstr("reports rank 0 of job j at epoch 1; it is rank 1")));
  EXPECT_EQ(View("j").committed_step, -1);
}

TEST_F(CoordinatorTest, Restart_DisturbsNobodyForOneTimeout) {
  MakeReadyJob();
  now_ += absl::Hours(1);
  Restart();
  EXPECT_EQ(View("j").state, JobState::kReady);
  EXPECT_TRUE(View("j").members[0].alive);
  Advance(absl::Seconds(3));
  EXPECT_EQ(View("j").state, JobState::kReady);
  EXPECT_EQ(Beat("a")[0].epoch, 1);
  Advance(absl::Seconds(1));
  EXPECT_EQ(View("j").state, JobState::kFailed);
  EXPECT_THAT(View("j").error, HasSubstr("worker b"));
  EXPECT_THAT(c_->Join(SmallWorker("a", 0), now_), StatusIs(Code::kAborted, HasSubstr("stale")));
}

TEST_F(CoordinatorTest, CoordinatorHeldUp_BlamesNoWorker) {
  MakeReadyJob();
  now_ += absl::Seconds(30);  // no tick: the process was stopped
  ASSERT_OK(c_->Tick(now_));
  EXPECT_EQ(View("j").state, JobState::kReady);
  Advance(absl::Seconds(4));
  EXPECT_EQ(View("j").state, JobState::kFailed);
}

TEST_F(CoordinatorTest, ClockSetBack_SilenceIsStillNoticed) {
  MakeReadyJob();
  now_ -= absl::Hours(1);
  Advance(absl::Seconds(5));
  EXPECT_EQ(View("j").state, JobState::kFailed);
}

TEST_F(CoordinatorTest, StoreFails_UnavailableAndNothingChanged) {
  MakeReadyJob();
  ASSERT_OK(c_->CreateJob(SmallJob("w", 3), now_));
  c_->TakeEvents();
  shared_.broken = true;
  EXPECT_THAT(c_->CreateJob(SmallJob("k", 1), now_), StatusIs(Code::kUnavailable, HasSubstr("disk full")));
  EXPECT_THAT(c_->DeleteJob("j", now_), StatusIs(Code::kUnavailable, HasSubstr("disk full")));
  EXPECT_THAT(c_->Join(SmallWorker("c"), now_), StatusIs(Code::kUnavailable, HasSubstr("disk full")));
  EXPECT_THAT(c_->Leave("a", 1, now_), StatusIs(Code::kUnavailable, HasSubstr("disk full")));
  EXPECT_EQ(c_->ListJobs(now_).size(), 2u);
  EXPECT_EQ(View("j").state, JobState::kReady);
  EXPECT_EQ(View("w").state, JobState::kWaiting);
  EXPECT_THAT(c_->Heartbeat("c", 1, {}, now_), StatusIs(Code::kNotFound, HasSubstr("not joined")));
  EXPECT_TRUE(c_->TakeEvents().empty());
  EXPECT_OK(c_->Heartbeat("a", 1, {}, now_)) << "changes nothing that is stored";
  shared_.broken = false;
  EXPECT_OK(c_->Join(SmallWorker("c"), now_));
  EXPECT_EQ(View("w").state, JobState::kPreparing);
}

TEST_F(CoordinatorTest, Limits_NameThemselves) {
  options_.max_jobs = 1;
  options_.max_workers = 2;
  Restart();
  ASSERT_OK(c_->CreateJob(SmallJob("j", 1), now_));
  EXPECT_THAT(c_->CreateJob(SmallJob("k", 1), now_), StatusIs(Code::kResourceExhausted, HasSubstr("at most 1")));
  ASSERT_OK(c_->Join(SmallWorker("a"), now_));
  ASSERT_OK(c_->Join(SmallWorker("b"), now_));
  EXPECT_THAT(c_->Join(SmallWorker("c"), now_), StatusIs(Code::kResourceExhausted, HasSubstr("at most 2")));
  Beat("a", {ReadyReport(Beat("a")[0])});
  ASSERT_OK(c_->Leave("a", 1, now_));
  EXPECT_THAT(c_->Join(SmallWorker("c"), now_), StatusIs(Code::kResourceExhausted, HasSubstr("at most 2")))
      << "job j still names a";
  ASSERT_OK(c_->Leave("b", 1, now_));
  EXPECT_OK(c_->Join(SmallWorker("c"), now_)) << "b is gone and in no job: it is forgotten";
}

// A worker that is as before is heard by that alone.
TEST_F(CoordinatorTest, HearAgain_CountsAsAHeartbeat_UntilSomethingChanges) {
  MakeReadyJob();
  const std::vector<MemberReport> reports = {ReadyReport(Beat("b")[0])};
  const auto heard = c_->MayRepeat("b", reports, Beat("b", reports));
  ASSERT_TRUE(heard.has_value());
  for (int i = 0; i < 20; ++i) {
    now_ += absl::Milliseconds(500);
    Beat("a", {ReadyReport(Beat("a")[0], i)});  // steps are no change
    ASSERT_TRUE(c_->HearAgain(*heard, now_));
    ASSERT_OK(c_->Tick(now_));
  }
  EXPECT_EQ(View("j").state, JobState::kReady);
  EXPECT_EQ(View("j").committed_step, 19);
  ASSERT_OK(c_->CreateJob(SmallJob("k", 2), now_));
  EXPECT_FALSE(c_->HearAgain(*heard, now_));
}

TEST_F(CoordinatorTest, HearAgain_OfWhoCountsAsGone_NeedsTheWhole) {
  EXPECT_FALSE(c_->HearAgain({}, now_));
  ASSERT_OK(c_->Join(SmallWorker("a"), now_));
  const Coordinator::Heard heard = c_->MayRepeat("a", {}, Beat("a")).value();
  EXPECT_TRUE(c_->HearAgain(heard, now_));
  now_ += absl::Seconds(4);
  EXPECT_FALSE(c_->HearAgain(heard, now_)) << "it was silent for longer than the time-out";
  ASSERT_OK(c_->Leave("a", 1, now_));
  EXPECT_FALSE(c_->HearAgain(heard, now_));
}

TEST_F(CoordinatorTest, HearAgain_OfAnEarlierIncarnation_OrAWorkerThatWasForgotten_NeedsTheWhole) {
  options_.max_workers = 2;
  Restart();
  for (const char* worker : {"a", "b"}) ASSERT_OK(c_->Join(SmallWorker(worker), now_));
  const Coordinator::Heard first = c_->MayRepeat("a", {}, Beat("a")).value();
  now_ += absl::Seconds(4);
  ASSERT_OK(c_->Join(SmallWorker("a", 2), now_));
  EXPECT_FALSE(c_->HearAgain(first, now_));
  ASSERT_OK(c_->Leave("b", 1, now_));
  const Coordinator::Heard second = c_->MayRepeat("a", {}, c_->Heartbeat("a", 2, {}, now_).value()).value();
  EXPECT_TRUE(c_->HearAgain(second, now_));
  ASSERT_OK(c_->Join(SmallWorker("c"), now_)) << "b is forgotten, and pointers to workers count as old";
  EXPECT_FALSE(c_->HearAgain(second, now_));
}

// It may have come by another way, and have said something else.
TEST_F(CoordinatorTest, HearAgain_AfterAnotherHeartbeat_NeedsTheWhole) {
  ASSERT_OK(c_->Join(SmallWorker("a"), now_));
  const Coordinator::Heard heard = c_->MayRepeat("a", {}, Beat("a")).value();
  Beat("a");
  EXPECT_FALSE(c_->HearAgain(heard, now_));
}

TEST_F(CoordinatorTest, AHeartbeatThatIsDecidedOnLater_MayNotRepeat) {
  MakeReadyJob();
  const std::vector<Assignment> told = Beat("a");
  MemberReport report = ReadyReport(told[0], 9);
  Beat("a", {report});
  EXPECT_TRUE(c_->MayRepeat("a", {report}, told).has_value());
  report.state = MemberReport::State::kPreparing;
  EXPECT_FALSE(c_->MayRepeat("a", {report}, told).has_value());
  report = ReadyReport(told[0], 4);  // fewer steps are believed after a time-out
  Beat("a", {report});
  EXPECT_FALSE(c_->MayRepeat("a", {report}, told).has_value());
}

}  // namespace
}  // namespace shardmesh
