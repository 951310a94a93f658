// StepProtocol: buckets of jobs with bucket residency.
#include <thread>

#include "worker/control/residency.h"
#include "worker/step/step_protocol.h"
#include "worker/testing/decide_next.h"
#include "worker/testing/step_fixture.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kNow = absl::ZeroDuration(), kLong = absl::Seconds(20);

// Four buckets of gradients and a frozen one.
JobSpec BucketJob() {
  JobSpec job = SmallJob("ddp=2,fsdp=2", 3);
  job.residency = Residency::kBucket;
  job.parameters.clear();
  for (const char* name : {"a", "b", "c", "d"}) job.parameters.push_back({name, {1024}, WeightFormat::kFp32});
  job.parameters.push_back({"frozen", {64}, WeightFormat::kFp32});
  job.parameters.back().frozen = true;
  return job;
}

struct StepBucketsTest : StepFixture {
  StepBucketsTest() : StepFixture(BucketJob()) { PlaceWeights(); }

  absl::StatusOr<bool> Bucket(std::vector<Slot> slots, int bucket, int64_t step = 1,
                              std::vector<std::pair<Slot, int>> bad = {}) {
    return protocol.buckets().Declare({std::move(slots), Step(step), bucket, std::move(bad), /*in_place=*/true});
  }
  CommandKind Next() {
    if (!DecideNext(protocol, plan)) return CommandKind::kNone;
    AllExecute();
    const CommandKind kind = protocol.command().kind;
    Lead::CommitNewest(protocol);
    return kind;
  }

  // Whether the step comes after what is to be summed before it.
  bool ReachStep() {
    for (int i = 0; i <= 4; ++i) {
      if (Next() == CommandKind::kStep) return true;
    }
    return false;
  }

  const std::vector<Slot> all = {Slot(0), Slot(1), Slot(2)};
};

TEST_F(StepBucketsTest, BucketsInAnyOrder_AreSummedWhenAllSlotsHaveThem) {
  ASSERT_EQ(plan.buckets().size(), 5u);
  for (int b : {2, 0, 3, 1}) {
    ASSERT_OK(Bucket({Slot(1)}, b));
    ASSERT_OK(Bucket({Slot(0)}, b));
    EXPECT_EQ(Next(), CommandKind::kNone);
    ASSERT_OK(Bucket({Slot(2)}, b));
    ASSERT_EQ(Next(), CommandKind::kReduceBucket);
    EXPECT_EQ(protocol.command().bucket, b);
    EXPECT_EQ(Next(), CommandKind::kNone);
  }
  ASSERT_OK(Declare(all, 1));
  EXPECT_EQ(Next(), CommandKind::kStep);
  EXPECT_EQ(protocol.committed_step(), Step(1));
}

TEST_F(StepBucketsTest, StepIsDecided_WhenTheLastBucketIsSummed) {
  for (int b = 0; b < 4; ++b) ASSERT_OK(Bucket(all, b));
  ASSERT_OK(Declare(all, 1));
  for (int b = 0; b < 4; ++b) ASSERT_EQ(Next(), CommandKind::kReduceBucket);
  EXPECT_EQ(Next(), CommandKind::kStep);
}

TEST_F(StepBucketsTest, WrongDeclarations_AreRefusedAndLeaveNoMark) {
  EXPECT_THAT(Bucket(all, 5), StatusIs(Code::kInvalidArgument, HasSubstr("bucket 5 is none of job small's: 0 to 4")));
  EXPECT_THAT(Bucket(all, -1), StatusIs(Code::kInvalidArgument, HasSubstr("bucket -1")));
  EXPECT_THAT(Bucket(all, 4), StatusIs(Code::kInvalidArgument, HasSubstr("frozen")));
  EXPECT_THAT(Bucket(all, 0, 2), StatusIs(Code::kFailedPrecondition, HasSubstr("step 2 is ahead")));
  EXPECT_THAT(Bucket({}, 0), StatusIs(Code::kInvalidArgument, HasSubstr("no slot")));
  EXPECT_THAT(Bucket({Slot(3)}, 0), StatusIs(Code::kInvalidArgument, HasSubstr("slot 3")));
  EXPECT_THAT(Bucket({Slot(0)}, 0, 1, {{Slot(1), 0}}), StatusIs(Code::kInvalidArgument, HasSubstr("slot 1")));
  EXPECT_THAT(protocol.buckets().Declare({all, Step(1), 0, {}, false}),
              StatusIs(Code::kFailedPrecondition, HasSubstr("lacks gradient shards of bucket 0")));
  EXPECT_THAT(Declare(all, 1), StatusIs(Code::kFailedPrecondition, HasSubstr("lacks the gradients of bucket 0")));
  EXPECT_EQ(Next(), CommandKind::kNone);
}

TEST_F(StepBucketsTest, DeclaredTwice_TheFirstCounts) {
  EXPECT_FALSE(Bucket(all, 0).value());
  EXPECT_TRUE(Bucket(all, 0, 1, {{Slot(0), 0}}).value());  // too late: it is not this that is summed
  EXPECT_EQ(Next(), CommandKind::kReduceBucket);
  EXPECT_EQ(Next(), CommandKind::kNone);
  for (int b = 1; b < 4; ++b) ASSERT_OK(Bucket(all, b));
  ASSERT_OK(Declare(all, 1));
  ASSERT_TRUE(ReachStep());
  EXPECT_FALSE(protocol.outcomes().OutcomeOf(Step(1))->skipped);
  EXPECT_TRUE(Bucket(all, 0).value());  // of the step before
}

TEST_F(StepBucketsTest, NotFiniteInABucket_TheStepIsSkipped) {
  for (int b = 0; b < 4; ++b) {
    ASSERT_OK(Bucket(all, b, 1,
                     b == 2 ? std::vector<std::pair<Slot, int>>{{Slot(1), 2}} : std::vector<std::pair<Slot, int>>()));
  }
  ASSERT_OK(Declare(all, 1));
  ASSERT_TRUE(ReachStep());
  EXPECT_TRUE(protocol.outcomes().OutcomeOf(Step(1))->skipped);
  EXPECT_EQ(protocol.outcomes().OutcomeOf(Step(1))->bad_slot, Slot(1));
  EXPECT_EQ(protocol.outcomes().OutcomeOf(Step(1))->bad_tensor, 2);
}

TEST_F(StepBucketsTest, SlotFarAhead_WaitsAndSaysForWhom) {
  ASSERT_OK(Bucket({Slot(0)}, 0));
  EXPECT_OK(protocol.buckets().AwaitSums({Slot(0)}, Step(1), kNow));
  ASSERT_OK(Bucket({Slot(0)}, 1));
  EXPECT_THAT(protocol.buckets().AwaitSums({Slot(0)}, Step(1), kNow),
              StatusIs(Code::kDeadlineExceeded, HasSubstr("bucket 0 lacks slots 1,2")));
  ASSERT_OK(Bucket({Slot(1), Slot(2)}, 1));
  EXPECT_FALSE(protocol.buckets().MayGoOn({Slot(0)}, Step(1)));
  EXPECT_EQ(Next(), CommandKind::kReduceBucket);
  EXPECT_TRUE(protocol.buckets().MayGoOn({Slot(0)}, Step(1)));
}

// Trainers that declare in opposite orders would wait for each other.
TEST_F(StepBucketsTest, AllWait_OneMoreMayGoOn) {
  for (int b : {0, 1}) ASSERT_OK(Bucket({Slot(0)}, b));
  for (int b : {2, 3}) ASSERT_OK(Bucket({Slot(1), Slot(2)}, b));
  protocol.buckets().SetWaiting({Slot(0)}, true);
  EXPECT_FALSE(protocol.buckets().MayGoOn({Slot(0)}, Step(1)));
  std::thread other([&] {
    const std::vector<Slot> slots = {Slot(1), Slot(2)};
    protocol.buckets().SetWaiting(slots, true);
    EXPECT_OK(protocol.buckets().AwaitSums(slots, Step(1), kLong));
    protocol.buckets().SetWaiting(slots, false);
  });
  other.join();
  EXPECT_FALSE(protocol.buckets().MayGoOn({Slot(0)}, Step(1)));
}

TEST_F(StepBucketsTest, AcquiredBucket_IsFilledAndStaysUntilTheLastRelease) {
  EXPECT_THAT(protocol.buckets().Acquire(5), StatusIs(Code::kInvalidArgument, HasSubstr("bucket 5")));
  EXPECT_FALSE(protocol.buckets().Holds(4));
  ASSERT_OK(protocol.buckets().Acquire(4));
  ASSERT_OK(protocol.buckets().Acquire(4));
  EXPECT_THAT(protocol.buckets().Await(4, kNow), StatusIs(Code::kDeadlineExceeded, HasSubstr("bucket 4")));
  EXPECT_EQ(Next(), CommandKind::kGatherBucket);
  EXPECT_EQ(protocol.command().bucket, 4);
  EXPECT_OK(protocol.buckets().Await(4, kNow));
  EXPECT_EQ(Next(), CommandKind::kNone);
  std::vector<int> dropped;
  const auto drop = [&](int b) { dropped.push_back(b); };
  protocol.buckets().Release(4);
  protocol.buckets().DropUnused(drop);
  EXPECT_TRUE(dropped.empty());
  protocol.buckets().Release(4);
  EXPECT_TRUE(protocol.buckets().Holds(4));  // until the lead takes it
  protocol.buckets().DropUnused(drop);
  EXPECT_EQ(dropped, std::vector<int>{4});
  EXPECT_FALSE(protocol.buckets().Holds(4));
}

// Who takes a slot over: what is summed stays, what only that slot could complete is taken back, what others could
// complete meanwhile is waited for.
TEST_F(StepBucketsTest, SlotTakenOver_BucketsAreOpenSummedOrAwaited) {
  ASSERT_OK(Bucket(all, 0));
  ASSERT_EQ(Next(), CommandKind::kReduceBucket);
  ASSERT_OK(Bucket({Slot(0)}, 1));
  EXPECT_EQ(protocol.slots().Open({Slot(0)}), Step(1));  // slots 1 and 2 may bring bucket 1
  EXPECT_TRUE(protocol.buckets().HasShard(Slot(0), 1, 0, Step(1)));
  EXPECT_EQ(protocol.slots().Open(all), std::nullopt);  // nobody else may
  EXPECT_FALSE(protocol.buckets().HasShard(Slot(0), 1, 0, Step(1)));
  EXPECT_TRUE(protocol.buckets().HasShard(Slot(0), 0, 0, Step(1)));
  for (int b = 1; b < 4; ++b) ASSERT_OK(Bucket(all, b));
  ASSERT_OK(Declare(all, 1));
  EXPECT_EQ(protocol.slots().Open({Slot(0)}), Step(1));  // all is there: the step comes
  ASSERT_TRUE(ReachStep());
  EXPECT_EQ(protocol.slots().Open({Slot(0)}), std::nullopt);
}

TEST(StepBucketsFullTest, JobWithFullResidency_HasNone) {
  TestHost host(SmallJob("fsdp=1", 1));
  EXPECT_THAT(host.protocol.buckets().Acquire(0), StatusIs(Code::kFailedPrecondition, HasSubstr("full residency")));
  EXPECT_THAT(host.protocol.buckets().Declare({{Slot(0)}, Step(1), 0, {}, true}),
              StatusIs(Code::kFailedPrecondition, HasSubstr("full residency")));
}

// With pulled slots: uses are of seats, of which there may be more than slots.
struct PulledBucketsTest : StepFixture {
  static JobSpec Job() {
    JobSpec job = BucketJob();
    job.slot_mode = SlotMode::kPulled;
    job.num_trainers = 5;
    return job;
  }
  PulledBucketsTest() : StepFixture(Job()) {
    PlaceWeights();
    for (int seat = 0; seat < 5; ++seat) protocol.control()->slots[seat].holder.store(100 + seat);
    protocol.pulling().Reopen(0);
  }
  CommandKind Next() {
    if (!DecideNext(protocol, plan)) return CommandKind::kNone;
    AllExecute();
    Lead::CommitNewest(protocol);
    return protocol.command().kind;
  }
};

TEST_F(PulledBucketsTest, WeightsAreUsedByBucket_AndGradientsSummedBySlot) {
  ASSERT_OK(protocol.buckets().Use(2, Slot(4), UseWord(1, 1)));
  for (int slot = 0; slot < 3; ++slot) {
    ASSERT_OK_AND_ASSIGN(const auto grant, protocol.pulling().TakeNext(slot, 0));
    ASSERT_EQ(grant->slot, slot);
    FinishedSlot finished;
    finished.slot = Slot(slot);
    finished.step = Step(1);
    ASSERT_OK(protocol.pulling().Finish(slot, finished));
  }
  EXPECT_EQ(Next(), CommandKind::kGatherBucket);
  EXPECT_EQ(protocol.command().bucket, 2);
  EXPECT_TRUE(protocol.buckets().Holds(2));
  EXPECT_EQ(Next(), CommandKind::kMerge);
  EXPECT_EQ(protocol.command().num_slots, 3);
  EXPECT_EQ(Next(), CommandKind::kStep);
  EXPECT_EQ(protocol.command().step, 1);
  EXPECT_EQ(Next(), CommandKind::kNone);
}

TEST_F(PulledBucketsTest, NothingIsDeclaredByBucket) {
  EXPECT_THAT(protocol.buckets().Declare({{Slot(0)}, Step(1), 0, {}, /*in_place=*/true}),
              StatusIs(Code::kFailedPrecondition, HasSubstr("has pulled slots")));
  EXPECT_EQ(protocol.slots().Open({Slot(4)}), std::nullopt);
  EXPECT_EQ(Next(), CommandKind::kNone);
}

TEST_F(PulledBucketsTest, ATrainerThatIsGone_UsesNothing) {
  ASSERT_OK(protocol.buckets().Use(2, Slot(4), UseWord(1, 1)));
  ASSERT_OK(protocol.buckets().Use(2, Slot(3), UseWord(1, 2)));
  EXPECT_EQ(Next(), CommandKind::kGatherBucket);
  std::vector<int> dropped;
  const auto drop = [&](int bucket) { dropped.push_back(bucket); };
  protocol.buckets().DropUses({4}, 104);
  protocol.buckets().DropUnused(drop);
  EXPECT_TRUE(dropped.empty());
  protocol.buckets().DropUses({3}, 103);
  protocol.buckets().DropUnused(drop);
  EXPECT_EQ(dropped, std::vector<int>{2});
}

}  // namespace
}  // namespace shardmesh
