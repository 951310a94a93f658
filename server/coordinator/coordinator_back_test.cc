// Jobs that go back to a checkpoint by themselves when they lose a shard of which no copy is left.
#include <gmock/gmock.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/coordinator/testing/reform_fixture.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;
using Code = absl::StatusCode;

constexpr int64_t kUid = 5;
const CheckpointRecord kOlder{"/data/step-3", 3, 33}, kNewer{"/data/step-6", 6, 66};

class GoBackTest : public ReformTest {
 protected:
  // READY on a and b, at epoch 1 and step 7.
  void MakeReady(const std::string& mesh = "fsdp=2", OnLoss on_loss = OnLoss::kCheckpoint) {
    JobSpec spec = SmallMeshSpec("j", mesh);
    spec.on_loss = on_loss;
    const auto job = JobDefinition::Create(std::move(spec)).value();
    for (int rank = 0; rank < job->plan().num_ranks(); ++rank) {
      ASSERT_OK(c_->Join(SmallWorker(std::string(1, static_cast<char>('a' + rank))), now_));
    }
    ASSERT_OK(c_->CreateJob(job, now_, kUid));
    ReportReady(7);
    ASSERT_EQ(View("j").state, JobState::kReady);
    c_->TakeEvents();
  }
  void Record(const CheckpointRecord& checkpoint, int64_t epoch = 1) {
    ASSERT_OK(c_->RecordCheckpoint("j", kUid, epoch, checkpoint));
  }
  // b ends, and its next incarnation takes the place that is free.
  void LoseB() {
    LastIncarnation last;
    last.dead = 1;
    ASSERT_OK(c_->Join(SmallWorker("b", 2), now_, {}, last));
  }
  // Each member has read its shard.
  void Load(const std::vector<uint64_t>& digests) {
    for (size_t rank = 0; rank < digests.size(); ++rank) {
      MemberReport report = Preparing(rank);
      report.loaded_digest = digests[rank];
      BeatOf(rank, report);
    }
  }
  MemberReport Preparing(size_t rank) {
    const WorkerIdentity member = View("j").members[rank].worker;
    MemberReport report = ReadyReport(Told(member.name, member.incarnation));
    report.state = MemberReport::State::kPreparing;
    return report;
  }
  MemberReport Unreadable(size_t rank) {
    MemberReport report = Preparing(rank);
    report.state = MemberReport::State::kFailed;
    report.error = "no such folder";
    report.unreadable = true;
    return report;
  }
  std::vector<Assignment> BeatOf(size_t rank, const MemberReport& report) {
    const WorkerIdentity member = View("j").members[rank].worker;
    return Beat(member.name, {report}, member.incarnation);
  }
  bool IsToldToUse(size_t rank) { return BeatOf(rank, Preparing(rank))[0].use; }
  void ExpectGoesBackTo(const CheckpointRecord& checkpoint, int64_t epoch) {
    const JobView view = View("j");
    EXPECT_EQ(view.state, JobState::kPreparing) << view.error;
    EXPECT_EQ(view.epoch, epoch);
    EXPECT_EQ(view.committed_step, checkpoint.step);
    EXPECT_EQ(view.gone_back.checkpoint, checkpoint);
    EXPECT_EQ(view.gone_back.epoch, 0);
    for (size_t rank = 0; rank < view.members.size(); ++rank) {
      const WorkerIdentity& member = view.members[rank].worker;
      const Assignment told = Told(member.name, member.incarnation);
      EXPECT_EQ(told.back, checkpoint);
      EXPECT_FALSE(told.use);
      EXPECT_EQ(told.from.epoch, 0);
    }
  }
};

TEST_F(GoBackTest, Loss_MembersReadTheNewestCheckpoint_AndBeginWithItWhenAllHave) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  Record(kOlder);
  Record(kNewer);
  EXPECT_THAT(View("j").checkpoints, ElementsAre(kNewer, kOlder));
  ASSERT_NO_FATAL_FAILURE(LoseB());
  EXPECT_THAT(c_->TakeEvents(), Contains(HasSubstr("event=job_goes_back job=j epoch=1 step=6 lost_step=7 "
                                                   "folder=\"/data/step-6\" cause=\"worker b (rank 1")));
  ExpectGoesBackTo(kNewer, 2);
  EXPECT_EQ(View("j").gone_back.lost_step, 7);
  Load({20});
  EXPECT_FALSE(IsToldToUse(0)) << "the other member has not read its shard";
  Load({20, 46});
  EXPECT_TRUE(IsToldToUse(0));
  EXPECT_TRUE(IsToldToUse(1));
  ReportReady(6);
  const JobView view = View("j");
  EXPECT_EQ(view.state, JobState::kReady);
  EXPECT_EQ(view.committed_step, 6);
  EXPECT_EQ(view.gone_back.epoch, 2);
  EXPECT_EQ(view.gone_back.lost_step, 7);
  EXPECT_THAT(view.gone_back.cause, HasSubstr("worker b (rank 1"));
  EXPECT_FALSE(Told("a").back.has_value()) << "it is READY";
  EXPECT_THAT(view.checkpoints, ElementsAre(kNewer, kOlder));
}

TEST_F(GoBackTest, FilesThatChanged_TheOneBeforeIsTaken_ThenTheJobFails) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  Record(kOlder);
  Record(kNewer);
  ASSERT_NO_FATAL_FAILURE(LoseB());
  Load({20, 47});
  EXPECT_THAT(c_->TakeEvents(), Contains(AllOf(HasSubstr("event=checkpoint_passed_over job=j step=6"),
                                               HasSubstr("0000000000000043; 0000000000000042 was saved"))));
  ExpectGoesBackTo(kOlder, 3);
  for (const size_t rank : {0, 1}) {
    EXPECT_EQ(View("j").state, JobState::kPreparing) << "the others may read it";
    BeatOf(rank, Unreadable(rank));
  }
  ExpectFailed("worker b (rank 1, pid 71) ended", "it knows no older one", "newest known step is 3");
  EXPECT_THAT(View("j").error, HasSubstr("no such folder"));
}

TEST_F(GoBackTest, OneThatCannotReadIt_IsReplaced) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  Record(kNewer);
  ASSERT_NO_FATAL_FAILURE(LoseB());
  ASSERT_OK(c_->Join(SmallWorker("s"), now_));
  ASSERT_EQ(Members(), (Names{"a", "b"}));
  BeatOf(1, Unreadable(1));
  Load({20});
  ExpectGoesBackTo(kNewer, 3);
  EXPECT_EQ(Members(), (Names{"a", "s"}));
  EXPECT_THAT(c_->TakeEvents(), Contains(HasSubstr("cause=\"worker b: no such folder\"")));
  Load({20, 46});
  ReportReady(6);
  EXPECT_EQ(View("j").state, JobState::kReady);
  EXPECT_THAT(View("j").gone_back.cause, HasSubstr("worker b (rank 1, pid 71) ended"));
}

TEST_F(GoBackTest, OneThatSaysNothing_IsReplaced) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  Record(kNewer);
  ASSERT_NO_FATAL_FAILURE(LoseB());
  ASSERT_OK(c_->Join(SmallWorker("s"), now_));
  for (absl::Duration waited; waited < options_.read_timeout; waited += absl::Seconds(1)) {
    EXPECT_EQ(View("j").epoch, 2) << waited;
    Load({20});
    BeatOf(1, Preparing(1));
    Beat("s");
    Advance(absl::Seconds(1));
  }
  Advance(absl::Milliseconds(500));
  ExpectGoesBackTo(kNewer, 3);
  EXPECT_EQ(Members(), (Names{"a", "s"}));
}

// A peer says that b is gone, which may be heard of for a while.
TEST_F(GoBackTest, TheLostWorker_IsNotAssignedAgain) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  ASSERT_OK(c_->Join(SmallWorker("s"), now_));
  Record(kNewer);
  Beat("a", {Failed("a", 1)});
  ExpectGoesBackTo(kNewer, 2);
  EXPECT_EQ(Members(), (Names{"a", "s"}));
}

TEST_F(GoBackTest, AWorkerThatComesAgainAndAgain_DoesNotKeepItWaiting) {
  ASSERT_NO_FATAL_FAILURE(MakeReady("fsdp=3"));
  Record(kNewer);
  for (const char* worker : {"b", "c"}) ASSERT_OK(c_->Leave(worker, 1, now_));
  int64_t incarnation = 1;
  for (absl::Duration waited; waited < options_.heartbeat_timeout * 10; waited += absl::Seconds(1)) {
    EXPECT_EQ(View("j").state, JobState::kWaiting) << waited;
    LastIncarnation last;
    last.dead = incarnation;
    ASSERT_OK(c_->Join(SmallWorker("x", ++incarnation), now_, {}, last));
    Beat("a");
    Advance(absl::Seconds(1));
  }
  EXPECT_EQ(View("j").state, JobState::kPreparing);
}

TEST_F(GoBackTest, LostSteps_AreThoseSinceTheLastStep_OfTwoLosses) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  Record(kNewer);
  ASSERT_NO_FATAL_FAILURE(LoseB());
  Load({20, 46});
  ReportReady(6);
  ASSERT_EQ(View("j").state, JobState::kReady);
  LastIncarnation last;
  last.dead = 2;
  ASSERT_OK(c_->Join(SmallWorker("b", 3), now_, {}, last));
  EXPECT_EQ(View("j").gone_back.lost_step, 7);
  Load({20, 46});
  for (const int step : {6, 9}) ReportReady(step);
  last.dead = 3;
  ASSERT_OK(c_->Join(SmallWorker("b", 4), now_, {}, last));
  EXPECT_EQ(View("j").gone_back.lost_step, 9);
}

TEST_F(GoBackTest, WithReplicas_TheJobReforms_AndGoesBackWhenTheLastCopyIsLost) {
  ASSERT_NO_FATAL_FAILURE(MakeReady("ddp=2,fsdp=2"));
  Record(kNewer);
  Silence({"a", "c", "d"});
  ExpectReforms(2, {"a", "d"}, {0, 3}, "ddp=2,fsdp=1");
  Silence({"c"});
  EXPECT_EQ(View("j").gone_back.checkpoint, kNewer);
  Advance(absl::Seconds(1));
  Beat("c");
  Advance(absl::Seconds(2));
  Beat("c");
  EXPECT_EQ(View("j").definition->spec().mesh.ToString(), "ddp=1,fsdp=1") << View("j").waiting_for;
  ExpectGoesBackTo(kNewer, View("j").epoch);
}

TEST_F(GoBackTest, FewerWorkers_AreTakenAfterATimeout_InWhichNobodyCame) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  Record(kNewer);
  ASSERT_OK(c_->Leave("b", 1, now_));
  EXPECT_EQ(View("j").state, JobState::kWaiting);
  EXPECT_EQ(View("j").committed_step, 6);
  for (int i = 0; i < 5; ++i) {
    Advance(absl::Milliseconds(500));
    Beat("a");
    EXPECT_EQ(View("j").state, JobState::kWaiting) << i;
  }
  Advance(absl::Milliseconds(500));
  EXPECT_EQ(Members(), Names{"a"});
  EXPECT_EQ(View("j").definition->spec().mesh.ToString(), "fsdp=1");
  Load({66});
  ReportReady(6);
  EXPECT_EQ(View("j").state, JobState::kReady);
}

TEST_F(GoBackTest, AMemberIsLostOnTheWay_OthersReadIt) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  ASSERT_OK(c_->Join(SmallWorker("s"), now_));
  Record(kNewer);
  ASSERT_NO_FATAL_FAILURE(LoseB());
  Load({20, 46});
  const std::string lost = Members()[1];
  MemberReport failed = Preparing(0);
  failed.state = MemberReport::State::kFailed;
  failed.error = "its connection closed";
  failed.lost_rank = 1;
  BeatOf(0, failed);
  ExpectGoesBackTo(kNewer, 3);
  EXPECT_NE(Members()[1], lost);
  EXPECT_EQ(View("j").gone_back.lost_step, 7) << "that it had when it was READY";
  Load({20, 46});
  ReportReady(6);
  EXPECT_EQ(View("j").state, JobState::kReady);
  EXPECT_THAT(View("j").checkpoints, ElementsAre(kNewer));
}

TEST_F(GoBackTest, RestartOfTheCoordinator_OnTheWay) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  Record(kNewer);
  ASSERT_NO_FATAL_FAILURE(LoseB());
  Load({20, 46});
  MemberReport ready = Preparing(0);
  ready.state = MemberReport::State::kReady;
  ready.loaded_digest = 20;
  const std::string first = Members()[0];
  Restart();
  EXPECT_EQ(Members()[0], first);
  BeatOf(0, ready);
  EXPECT_FALSE(IsToldToUse(1)) << "nothing is known of it yet";
  MemberReport loaded = Preparing(1);
  loaded.loaded_digest = 46;
  EXPECT_TRUE(BeatOf(1, loaded)[0].use);
  loaded.state = MemberReport::State::kReady;
  BeatOf(1, loaded);
  EXPECT_EQ(View("j").state, JobState::kReady);
  EXPECT_EQ(View("j").gone_back.epoch, 2);
  Restart();
  EXPECT_EQ(View("j").gone_back.checkpoint, kNewer);
  EXPECT_THAT(View("j").checkpoints, ElementsAre(kNewer));
}

TEST_F(GoBackTest, StepsBeforeReady_AreTheCheckpoints) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  Record(kNewer);
  ASSERT_NO_FATAL_FAILURE(LoseB());
  for (int i = 0; i < 10; ++i) {
    Advance(absl::Milliseconds(500));
    for (const size_t rank : {0, 1}) BeatOf(rank, Preparing(rank));  // that it has committed nothing
  }
  EXPECT_EQ(View("j").committed_step, 6);
  EXPECT_THAT(View("j").published_steps, IsEmpty());
}

TEST_F(GoBackTest, WithoutACheckpoint_OrWithOnLossFail_ItFails) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  ASSERT_NO_FATAL_FAILURE(LoseB());
  ExpectFailed("worker b (rank 1, pid 71) ended", "its mesh has no replicas; it has no checkpoint to go back to");
}

TEST_F(GoBackTest, OnLossFail_RemembersNoCheckpoint) {
  ASSERT_NO_FATAL_FAILURE(MakeReady("fsdp=2", OnLoss::kFail));
  Record(kNewer);
  EXPECT_THAT(View("j").checkpoints, IsEmpty());
  ASSERT_NO_FATAL_FAILURE(LoseB());
  ExpectFailed("worker b (rank 1, pid 71) ended", "its mesh has no replicas");
}

TEST_F(GoBackTest, TooManyLosses_WithoutAStepBetween_FailTheJob) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  Record(kNewer);
  for (int incarnation = 2; incarnation <= options_.max_lost_members + 2; ++incarnation) {
    ASSERT_NE(View("j").state, JobState::kFailed) << incarnation;
    LastIncarnation last;
    last.dead = incarnation - 1;
    ASSERT_OK(c_->Join(SmallWorker("b", incarnation), now_, {}, last));
  }
  EXPECT_EQ(View("j").state, JobState::kFailed);
  EXPECT_THAT(View("j").error, HasSubstr("the job lost 8 members"));
}

TEST_F(GoBackTest, AnErrorThatIsNotALoss_FailsTheJob) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  Record(kNewer);
  MemberReport failed = ReadyReport(Told("a"));
  failed.state = MemberReport::State::kFailed;
  failed.error = "replicas differ";
  Beat("a", {failed});
  ExpectFailed("worker a (rank 0", "replicas differ");
}

TEST_F(GoBackTest, Checkpoints_AreTheLastThatWereTold) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  for (int step = 1; step <= 4; ++step) Record({absl::StrCat("/data/", step), step, 1});
  Record({"/data/3", 3, 2});
  EXPECT_THAT(View("j").checkpoints, ElementsAre(CheckpointRecord{"/data/3", 3, 2}, CheckpointRecord{"/data/4", 4, 1},
                                                 CheckpointRecord{"/data/2", 2, 1}));
  const int writes = shared_.writes;
  Record({"/data/3", 3, 2});
  EXPECT_EQ(shared_.writes, writes);
}

TEST_F(GoBackTest, CheckpointsThatAreNotTheJobs_AreRefused) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  EXPECT_THAT(c_->RecordCheckpoint("k", kUid, 1, kNewer), StatusIs(Code::kNotFound, HasSubstr("no job k")));
  EXPECT_THAT(c_->RecordCheckpoint("j", kUid + 1, 1, kNewer), StatusIs(Code::kNotFound, HasSubstr("has uid 5, not 6")));
  EXPECT_THAT(c_->RecordCheckpoint("j", kUid, 2, kNewer),
              StatusIs(Code::kInvalidArgument, "epoch is 2; job j is at 1"));
  Record(kOlder);
  ASSERT_NO_FATAL_FAILURE(LoseB());
  const std::string left =
      "job j has gone back to step 3 since epoch 1; the checkpoint of step 6 is of steps that it left";
  EXPECT_THAT(c_->RecordCheckpoint("j", kUid, 1, kNewer), StatusIs(Code::kAborted, left));
  Load({20, 13});
  ReportReady(3);
  ASSERT_EQ(View("j").state, JobState::kReady);
  EXPECT_THAT(c_->RecordCheckpoint("j", kUid, 1, kNewer), StatusIs(Code::kAborted, left));
  EXPECT_OK(c_->RecordCheckpoint("j", kUid, 2, kNewer));
}

TEST_F(GoBackTest, AStoreThatFails_ChangesNothing) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  shared_.broken = true;
  EXPECT_THAT(c_->RecordCheckpoint("j", kUid, 1, kNewer), StatusIs(Code::kUnavailable, "disk full"));
  EXPECT_THAT(View("j").checkpoints, IsEmpty());
}

}  // namespace
}  // namespace shardmesh
