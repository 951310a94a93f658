// The next incarnation of a member: what it finds on the control block, and goes on with.
#include "worker/control/residency.h"
#include "worker/step/step_protocol.h"
#include "worker/testing/decide_next.h"
#include "worker/testing/step_fixture.h"

namespace shardmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using Code = absl::StatusCode;

// The object of a member's last incarnation, and what it left.
struct TakeOver : StepFixture {
  static JobSpec TwoPublications() {
    JobSpec job = SmallJob("ddp=2,fsdp=2", 3);
    job.publications = 2;
    return job;
  }
  explicit TakeOver(const JobSpec& job = TwoPublications()) : StepFixture(job) {}
  StepProtocol Incarnation(int rank) {
    return StepProtocol(host.control(), &host.notifier(), &job, &plan, MemberNames(plan.num_ranks()), std::nullopt,
                        Rank(rank));
  }
  uint64_t Holder(int rank, uint64_t session) const { return static_cast<uint64_t>(rank + 1) << 32 | session; }
};

TEST_F(TakeOver, PinsPushesAndDeclarationsOfThatMemberAreTakenBack_OthersStay) {
  PlaceWeights();
  StepProtocol one = Incarnation(1), two = Incarnation(2);
  ASSERT_TRUE(one.publications().Pin(Step(0)).has_value());
  ASSERT_TRUE(two.publications().Pin(Step(0)).has_value());
  ASSERT_TRUE(one.slots().ClaimPush(Slot(0), 0, Rank(1)));
  ASSERT_TRUE(two.slots().ClaimPush(Slot(0), 1, Rank(2)));
  host.control()->slots[1].declaring[1].store(2);
  host.control()->slots[2].declaring[2].store(1);

  Incarnation(1).TakeOver();
  EXPECT_FALSE(IsBeingDeclared(host.control()->slots[1]));
  EXPECT_TRUE(IsBeingDeclared(host.control()->slots[2]));
  EXPECT_TRUE(one.slots().ClaimPush(Slot(0), 0, Rank(1)));
  EXPECT_FALSE(two.slots().ClaimPush(Slot(0), 1, Rank(2)));
  for (const PublicationWords& publication : host.control()->publications) EXPECT_EQ(publication.pins[1].load(), 0);
  // Rank 2 reads it yet: the next version but one goes nowhere.
  RunStep(1);
  RunStep(2);
  EXPECT_THAT(protocol.publications().Published(), ElementsAre(Step(0), Step(1)));
  Incarnation(2).TakeOver();
  RunStep(3);
  EXPECT_THAT(protocol.publications().Published(), ElementsAre(Step(1), Step(3)));
}

TEST_F(TakeOver, MessagesThatTheLeadWasTaking) {
  PlaceWeights();
  host.control()->taking_messages.store(5);
  Incarnation(1).TakeOver();
  EXPECT_EQ(host.control()->taking_messages.load(), 5u);
  Incarnation(0).TakeOver();
  EXPECT_EQ(host.control()->taking_messages.load(), 6u);
  Incarnation(0).TakeOver();
  EXPECT_EQ(host.control()->taking_messages.load(), 6u);
}

// Killed while it wrote a digest down: nobody reads it until the next incarnation has written all of it.
TEST_F(TakeOver, ADigestThatTheLeadWasWriting) {
  PlaceWeights();
  const uint64_t ticket = protocol.tickets().AskForDigest();
  ASSERT_TRUE(DecideNext(protocol, plan));
  AllExecute();
  host.control()->digest_writing.store(3);
  host.control()->digest_done.store(ticket);
  StepProtocol next = Incarnation(0);
  next.TakeOver();
  ASSERT_OK_AND_ASSIGN(const auto torn, next.tickets().DigestOf(ticket));
  EXPECT_FALSE(torn.has_value());
  Lead::CommitNewest(next);
  ASSERT_OK_AND_ASSIGN(const auto whole, next.tickets().DigestOf(ticket));
  EXPECT_TRUE(whole.has_value());
}

TEST_F(TakeOver, SessionsAreFoundWithTheirSlots_ThoseThatWereLeavingApart) {
  ASSERT_OK(protocol.slots().Take(Slot(0), Holder(1, 3)));
  ASSERT_OK(protocol.slots().Take(Slot(1), Holder(2, 3)));
  ASSERT_OK(protocol.slots().Take(Slot(2), Holder(1, 3)));
  EXPECT_THAT(Incarnation(1).slots().Sessions().staying, ElementsAre(Pair(Holder(1, 3), ElementsAre(0, 2))));
  protocol.slots().Leave(Slot(2), Holder(1, 3));
  EXPECT_TRUE(Incarnation(1).slots().Sessions().staying.empty());
  EXPECT_THAT(Incarnation(1).slots().Sessions().leaving, ElementsAre(Pair(Holder(1, 3), ElementsAre(0, 2))));
  EXPECT_THAT(Incarnation(2).slots().Sessions().staying, ElementsAre(Pair(Holder(2, 3), ElementsAre(1))));
  EXPECT_TRUE(Incarnation(0).slots().Sessions().staying.empty());
}

TEST_F(TakeOver, InitialWeightsAreLostWithTheProcess) {
  for (int r = 0; r < plan.num_ranks(); ++r) protocol.commands().InitialShardReady(Rank(r), 17);
  ASSERT_TRUE(DecideNext(protocol, plan));
  protocol.commands().Done(Rank(2), protocol.decided());
  Incarnation(2).TakeOver();  // it has placed its initial weights
  EXPECT_OK(protocol.members().Health());
  Incarnation(3).TakeOver();
  EXPECT_THAT(protocol.members().Health(), StatusIs(Code::kUnavailable, HasSubstr("worker-3 (rank 3")));
}

TEST_F(TakeOver, AcknowledgedInitialWeightsAreLost_BeforeTheyAreDecidedOn) {
  Incarnation(2).TakeOver();  // it had none
  EXPECT_OK(protocol.members().Health());
  protocol.commands().InitialShardReady(Rank(3), 17);
  Incarnation(3).TakeOver();
  EXPECT_THAT(protocol.members().Health(), StatusIs(Code::kUnavailable, HasSubstr("worker-3 (rank 3")));
}

TEST_F(TakeOver, ACommandThatEndsEveryIncarnationEndsTheJob) {
  PlaceWeights();
  for (int i = 0; i < 20; ++i) Incarnation(1).TakeOver();  // between commands
  for (int64_t step = 1; step <= 3; ++step) {
    for (int s = 0; s < 3; ++s) GradientShards(s, step);
    ASSERT_OK(Declare({Slot(0), Slot(1), Slot(2)}, step));
    ASSERT_TRUE(DecideNext(protocol, plan));
    for (uint32_t i = 0; i < kMaxIncarnationsInCommand; ++i) Incarnation(1).TakeOver();
    EXPECT_OK(protocol.members().Health());
    if (step == 3) break;
    AllExecute();
    Lead::CommitNewest(protocol);
  }
  Incarnation(1).TakeOver();
  EXPECT_THAT(protocol.members().Health(), StatusIs(Code::kUnavailable, HasSubstr("worker-1 (rank 1")));
}

// The lead was killed while it wrote the next command: what is decided is the one before, whole.
TEST_F(TakeOver, ACommandThatIsNotDecided_DoesNotCount) {
  PlaceWeights();
  RunStep(1);
  const uint64_t decided = protocol.decided();
  ControlBlock& control = *host.control();
  control.commands[(decided + 1) % 2].kind = CommandKind::kInit;
  control.commands[(decided + 1) % 2].step = 99;
  Incarnation(0).TakeOver();
  EXPECT_EQ(protocol.command().kind, CommandKind::kStep);
  EXPECT_EQ(protocol.command().step, 1);
  EXPECT_FALSE(MoreFollows(ReadCommitted(*protocol.control()), job, plan));
  EXPECT_FALSE(DecideNext(protocol, plan));
  RunStep(2);
  EXPECT_EQ(protocol.committed_step(), Step(2));
}

// The lead was killed in the commit: it is done again, whole.
TEST_F(TakeOver, ACommitIsRepeated) {
  PlaceWeights();
  for (int s = 0; s < 3; ++s) GradientShards(s, 1);
  ASSERT_OK(Declare({Slot(0), Slot(1), Slot(2)}, 1));
  ASSERT_TRUE(DecideNext(protocol, plan));
  AllExecute();
  const uint64_t committed = protocol.committed();
  Lead::CommitNewest(protocol);
  host.control()->committed.store(committed);  // the last thing that it writes
  StepProtocol next = Incarnation(0);
  next.TakeOver();
  EXPECT_TRUE(next.commands().AllDone());
  Lead::CommitNewest(next);
  EXPECT_EQ(next.committed(), next.decided());
  EXPECT_EQ(next.committed_step(), Step(1));
  EXPECT_EQ(host.control()->parity.load(), 1);
  RunStep(2);
  EXPECT_EQ(host.control()->parity.load(), 0);
}

// With bucket residency.
struct TakeOverBuckets : TakeOver {
  static JobSpec Buckets() {
    JobSpec job = SmallJob("ddp=2,fsdp=2", 3);
    job.residency = Residency::kBucket;
    job.parameters.clear();
    for (const char* name : {"a", "b", "c"}) job.parameters.push_back({name, {1024}, WeightFormat::kFp32});
    return job;
  }
  TakeOverBuckets() : TakeOver(Buckets()) { PlaceWeights(); }
  ResidencyTable table() const { return ResidencyTable(host.control(), plan); }
  void Gather(int bucket) {
    Finish();
    EXPECT_EQ(protocol.command().kind, CommandKind::kGatherBucket);
    EXPECT_EQ(protocol.command().bucket, bucket);
  }
  std::vector<int> Dropped(int rank) {
    std::vector<int> dropped;
    Incarnation(rank).buckets().DropUnused([&](int bucket) { dropped.push_back(bucket); });
    return dropped;
  }
};

TEST_F(TakeOverBuckets, UsesOfCallsEnd_ThoseOfSessionsStay) {
  StepProtocol one = Incarnation(1), two = Incarnation(2);
  ASSERT_OK(one.slots().Take(Slot(1), Holder(1, 7)));
  ASSERT_OK(one.buckets().Acquire(0));
  ASSERT_OK(one.buckets().Use(1, Slot(1), UseWord(5, 1)));
  ASSERT_OK(two.buckets().Acquire(2));
  for (const int bucket : {0, 1, 2}) Gather(bucket);
  one.buckets().SetWaiting({Slot(1)}, true);
  two.buckets().SetWaiting({Slot(2)}, true);

  Incarnation(1).TakeOver();
  EXPECT_FALSE(table().IsUsed(0));
  EXPECT_TRUE(table().IsUsed(2));
  EXPECT_EQ(Incarnation(1).buckets().UsesOf(1, Slot(1)), UseWord(5, 1));
  EXPECT_FALSE(table().Waits(1));
  EXPECT_TRUE(table().Waits(2));
  EXPECT_THAT(Dropped(0), ElementsAre(0));
  one.buckets().DropUses({1}, Holder(1, 8));  // another session, which has gone before
  EXPECT_THAT(Dropped(0), ElementsAre());
  one.slots().Leave(Slot(1), Holder(1, 7));
  one.buckets().DropUses({1}, Holder(1, 7));
  EXPECT_THAT(Dropped(0), ElementsAre(1));
  EXPECT_FALSE(protocol.buckets().Holds(1));
  EXPECT_TRUE(protocol.buckets().Holds(2));
}

// Killed while it took a bucket away: who acquired it meanwhile has what is there, or waits for it.
TEST_F(TakeOverBuckets, ABucketThatTheLeadWasDropping) {
  for (const int bucket : {0, 1, 2}) {
    ASSERT_OK(Incarnation(1).buckets().Acquire(bucket));
    Gather(bucket);
  }
  Incarnation(1).buckets().Release(0);
  Incarnation(1).buckets().Release(2);
  table().bucket(0).held.store(kBucketAsked);
  table().bucket(1).held.store(kBucketAsked);
  table().bucket(2).held.store(kBucketLeaving);
  ASSERT_OK(Incarnation(1).buckets().Acquire(2));  // its pages may be gone
  for (const int bucket : {0, 1, 2}) EXPECT_FALSE(protocol.buckets().Holds(bucket));
  Incarnation(0).TakeOver();
  EXPECT_THAT(Dropped(0), ElementsAre(0, 2));
  EXPECT_TRUE(protocol.buckets().Holds(1));
  Gather(2);
  EXPECT_TRUE(protocol.buckets().Holds(2));
}

}  // namespace
}  // namespace shardmesh
