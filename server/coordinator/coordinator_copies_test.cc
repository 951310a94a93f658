// Jobs with copies=2 that lose a host: which copies they go back to, and when to none.
#include <gmock/gmock.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/coordinator/testing/reform_fixture.h"

namespace shardmesh {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

constexpr int64_t kUid = 5;

class CopiesTest : public ReformTest {
 protected:
  // READY on a and b of one host, c and d of another, at epoch 1 and step 7.
  void MakeReady(OnLoss on_loss = OnLoss::kFail) {
    JobSpec spec = SmallMeshSpec("j", "fsdp=4");
    spec.on_loss = on_loss;
    spec.copies = 2;
    traits_.spans_hosts = true;
    for (const char* name : {"a", "b", "c", "d"}) {
      ASSERT_OK(c_->Join(SmallWorker(name, 1, name[0] < 'c' ? "h0" : "h1"), now_, traits_));
    }
    ASSERT_OK(c_->CreateJob(JobDefinition::Create(std::move(spec)).value(), now_, kUid));
    ReportReady(7);
    ASSERT_EQ(View("j").state, JobState::kReady);
    secret_ = Told("a").secret;
    c_->TakeEvents();
  }
  KeptCopies KeptBy(const std::string& name, int64_t step, uint64_t digest = 77) {
    return {"j", 1, name[0] - 'a', 2, "fsdp=4", step, digest, secret_};
  }
  void Keep(const std::string& name, const KeptCopies& kept) { c_->TakeCopies(name, 1, {}, {kept}); }
  void KeepAll(int64_t step) {
    for (const char* name : {"a", "b", "c", "d"}) Keep(name, KeptBy(name, step));
  }
  void LoseHost() { Silence({"a", "b"}); }
  // b says in another job that a is gone. Half a time-out later, in which nobody is heard, it says in j that d is gone,
  // so that c is taken to be, too. Only a has shards 0 and 2 then.
  void LoseHostWhileADoubted() {
    ASSERT_OK(c_->CreateJob(SmallJob("k", 2), now_));
    const JobView k = View("k");
    ASSERT_EQ(k.members.size(), 2u);
    ASSERT_EQ(k.members[0].worker.name, "a");
    ASSERT_EQ(k.members[1].worker.name, "b");
    MemberReport report = Failed("b", 0);
    report.job = "k";
    report.epoch = k.epoch;
    report.plan_hash = k.definition->plan().hash();
    Beat("b", {report});
    Advance(options_.heartbeat_timeout / 2);
    Beat("b", {Failed("b", 3)});
  }
  Names Holders() {
    Names names;
    for (const auto& [worker, rank] : Told("b").copies.holders) names.push_back(worker.name);
    return names;
  }

  std::string secret_;
};

TEST_F(CopiesTest, AHostIsLost_TheJobGoesBackToTheNewestCopies_OnTheOther) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  KeepAll(5);
  KeepAll(6);
  EXPECT_EQ(View("j").copied.step, 6);
  LoseHost();
  const JobView view = View("j");
  EXPECT_EQ(view.state, JobState::kPreparing) << view.error;
  EXPECT_EQ(view.definition->spec().mesh.ToString(), "fsdp=2");
  EXPECT_EQ(view.gone_back.checkpoint, (CheckpointRecord{"", 6, 77, 1}));
  EXPECT_EQ(view.gone_back.lost_step, 7);
  EXPECT_THAT(c_->TakeEvents(),
              Contains(HasSubstr("event=job_goes_back job=j epoch=1 step=6 lost_step=7 copied_at=1")));
  const Assignment told = Told("a");
  EXPECT_EQ(told.back, view.gone_back.checkpoint);
  EXPECT_EQ(told.copies.mesh, "fsdp=4");
  EXPECT_EQ(told.copies.hosts, 2);
  ASSERT_EQ(told.copies.holders.size(), 2u);
  EXPECT_EQ(told.copies.holders[1].first.name, "b");
  EXPECT_EQ(told.copies.holders[1].second, 1);
}

// It would not have said so if b did not have its copies, too.
TEST_F(CopiesTest, AStepThatOneMemberNames_IsThere) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  KeepAll(5);
  Keep("a", KeptBy("a", 6));
  EXPECT_EQ(View("j").copied.step, 6);
  LoseHost();
  EXPECT_EQ(View("j").gone_back.checkpoint.step, 6);
  EXPECT_EQ(Told("a").copies.holders.size(), 2u);
}

TEST_F(CopiesTest, WithoutEachShard_NothingIsTaken) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  Keep("a", KeptBy("a", 6));  // and shard 2, which it keeps for c
  Keep("c", KeptBy("c", 6));
  Keep("d", KeptBy("d", 6));
  EXPECT_FALSE(View("j").copied.is_set()) << "shard 1 is on d's host alone";
  LoseHost();
  ExpectFailed("worker c (rank 2", "there is no step of which each shard is on a host that is left", "7");
}

TEST_F(CopiesTest, OfAnotherJob_OrWithoutItsSecret_NothingCounts) {
  ASSERT_NO_FATAL_FAILURE(MakeReady());
  for (const char* name : {"a", "b", "c", "d"}) {
    KeptCopies kept = KeptBy(name, 6);
    kept.secret = "another";
    Keep(name, kept);
  }
  EXPECT_FALSE(View("j").copied.is_set());
  for (const char* name : {"a", "b", "c", "d"}) {
    KeptCopies kept = KeptBy(name, 6);
    kept.mesh = name[0] == 'a' ? "fsdp=1000000000" : "nonsense";
    Keep(name, kept);
  }
  EXPECT_FALSE(View("j").copied.is_set());
}

TEST_F(CopiesTest, ANewerCheckpointIsTaken_IfTheJobMay) {
  ASSERT_NO_FATAL_FAILURE(MakeReady(OnLoss::kCheckpoint));
  KeepAll(6);
  ASSERT_OK(c_->RecordCheckpoint("j", kUid, 1, {"/data/step-7", 7, 1}));
  LoseHost();
  EXPECT_EQ(View("j").gone_back.checkpoint, (CheckpointRecord{"/data/step-7", 7, 1}));
}

TEST_F(CopiesTest, AnOlderCheckpointIsNotTaken_WhileThereAreCopies) {
  ASSERT_NO_FATAL_FAILURE(MakeReady(OnLoss::kCheckpoint));
  KeepAll(6);
  ASSERT_OK(c_->RecordCheckpoint("j", kUid, 1, {"/data/step-5", 5, 1}));
  LoseHost();
  EXPECT_EQ(View("j").gone_back.checkpoint.copied_at, 1);
}

// It is passed over for a newer one that a member names later, and then for the checkpoint.
TEST_F(CopiesTest, CopiesThatCannotBeRead_OthersAreTaken_ThenTheCheckpoint) {
  ASSERT_NO_FATAL_FAILURE(MakeReady(OnLoss::kCheckpoint));
  ASSERT_OK(c_->RecordCheckpoint("j", kUid, 1, {"/data/step-3", 3, 1}));
  KeepAll(5);
  LoseHost();
  ASSERT_EQ(View("j").gone_back.checkpoint.step, 5);
  for (const char* name : {"a", "b"}) Keep(name, KeptBy(name, 6));
  const auto cannot = [&] {
    for (const char* name : {"a", "b"}) {
      MemberReport report = ReadyReport(Told(name));
      report.state = MemberReport::State::kFailed;
      report.unreadable = true;
      report.error = "it is not there any more";
      Beat(name, {report});
    }
  };
  cannot();
  EXPECT_EQ(View("j").state, JobState::kPreparing);
  EXPECT_EQ(View("j").gone_back.checkpoint.step, 6);
  cannot();
  EXPECT_EQ(View("j").gone_back.checkpoint.folder, "/data/step-3");
}

// Its members would wait for what nobody has any more.
TEST_F(CopiesTest, AHolderIsLostOnTheWayBack_TheCheckpointIsTaken_AtOnce) {
  ASSERT_NO_FATAL_FAILURE(MakeReady(OnLoss::kCheckpoint));
  ASSERT_OK(c_->RecordCheckpoint("j", kUid, 1, {"/data/step-3", 3, 1}));
  KeepAll(5);
  LoseHost();
  ASSERT_EQ(View("j").gone_back.checkpoint.step, 5);
  ASSERT_OK(c_->Leave("b", 1, now_));
  ASSERT_OK(c_->Tick(now_));
  EXPECT_EQ(View("j").gone_back.checkpoint.folder, "/data/step-3");
}

// It may be there, and counts until it is silent for the time-out.
TEST_F(CopiesTest, AHolderThatAnotherJobSaysIsGone_IsAwaited) {
  ASSERT_NO_FATAL_FAILURE(MakeReady(OnLoss::kCheckpoint));
  ASSERT_OK(c_->RecordCheckpoint("j", kUid, 1, {"/data/step-3", 3, 1}));
  KeepAll(5);
  LoseHost();
  ASSERT_OK(c_->CreateJob(SmallJob("k", 2), now_));
  const JobView k = View("k");
  ASSERT_EQ(k.members.size(), 2u);
  MemberReport report;
  report.job = "k";
  report.epoch = k.epoch;
  report.rank = k.members[0].worker.name == "a" ? 0 : 1;
  report.lost_rank = 1 - report.rank;
  report.state = MemberReport::State::kFailed;
  report.error = "b is gone";
  Beat("a", {report});
  ASSERT_OK(c_->Tick(now_));
  EXPECT_EQ(View("j").gone_back.checkpoint.step, 5);
}

// Its link to b may be cut alone: then it has what b and the lost host have not.
TEST_F(CopiesTest, AHolderThatAPeerSaysIsGone_CountsWhileItIsHeard_AndIsAskedLast) {
  ASSERT_NO_FATAL_FAILURE(MakeReady(OnLoss::kCheckpoint));
  ASSERT_OK(c_->RecordCheckpoint("j", kUid, 1, {"/data/step-3", 3, 1}));
  KeepAll(5);
  ASSERT_NO_FATAL_FAILURE(LoseHostWhileADoubted());
  EXPECT_EQ(View("j").gone_back.checkpoint, (CheckpointRecord{"", 5, 77, 1}));
  EXPECT_FALSE(View("j").copied.is_set()) << "whether each shard is on two hosts is not certain";
  EXPECT_EQ(Holders(), (Names{"b", "a", "c", "d"}));
  EXPECT_TRUE(Told("b").copies.whole);
  Beat("a");
  EXPECT_EQ(Holders(), (Names{"a", "b", "c", "d"}));
  LoseHost();
  EXPECT_EQ(View("j").gone_back.checkpoint.step, 5);
  EXPECT_EQ(Holders(), (Names{"a", "b"}));
}

TEST_F(CopiesTest, AHolderThatAPeerSaysIsGone_AndThatIsSilent_TheCheckpointIsTaken) {
  ASSERT_NO_FATAL_FAILURE(MakeReady(OnLoss::kCheckpoint));
  ASSERT_OK(c_->RecordCheckpoint("j", kUid, 1, {"/data/step-3", 3, 1}));
  KeepAll(5);
  ASSERT_NO_FATAL_FAILURE(LoseHostWhileADoubted());
  ASSERT_EQ(View("j").gone_back.checkpoint.step, 5);
  Silence({"b"});
  EXPECT_EQ(View("j").gone_back.checkpoint.folder, "/data/step-3");
}

// Of steps that the job has left since it went back further.
TEST_F(CopiesTest, OfAnEpochThatTheJobLeft_NothingCounts) {
  ASSERT_NO_FATAL_FAILURE(MakeReady(OnLoss::kCheckpoint));
  ASSERT_OK(c_->RecordCheckpoint("j", kUid, 1, {"/data/step-7", 7, 1}));
  KeepAll(6);
  LoseHost();
  LoseHost();  // it waits before its mesh shrinks
  for (const char* name : {"a", "b"}) {
    MemberReport report = ReadyReport(Told(name));
    report.state = MemberReport::State::kPreparing;
    report.loaded_digest = name[0] == 'a' ? 1 : 0;
    Beat(name, {report});
  }
  ReportReady(7);
  ASSERT_EQ(View("j").state, JobState::kReady);
  EXPECT_FALSE(View("j").copied.is_set());
}

}  // namespace
}  // namespace shardmesh
