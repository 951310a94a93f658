#include "worker/step/step_protocol.h"

#include <thread>

#include "worker/control/damage.h"
#include "worker/testing/decide_next.h"
#include "worker/testing/step_fixture.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

using StepProtocolTest = StepFixture;

TEST_F(StepProtocolTest, Slot_HasOneWriter) {
  const uint64_t first = uint64_t{1} << 32 | 7, second = uint64_t{3} << 32 | 9;
  ASSERT_OK(protocol.slots().Take(Slot(1), first));
  EXPECT_EQ(protocol.slots().HolderOf(Slot(1)), first);
  EXPECT_THAT(protocol.slots().Take(Slot(1), second),
              StatusIs(Code::kFailedPrecondition, HasSubstr("session 7 attached to rank 0")));
  protocol.slots().Give(Slot(1), second);
  EXPECT_EQ(protocol.slots().HolderOf(Slot(1)), first);
  protocol.slots().Give(Slot(1), first);
  EXPECT_OK(protocol.slots().Take(Slot(1), second));
}

TEST_F(StepProtocolTest, WaitsFor_NamesMissingSlotsAndTheirTrainers) {
  PlaceWeights();
  EXPECT_EQ(protocol.outcomes().WaitsFor(Step(1)), "missing slots: 0,1,2");
  ASSERT_OK(protocol.slots().Take(Slot(1), uint64_t{1} << 32 | 7));
  protocol.control()->slots[1].holder_pid.store(4242);
  GradientShards(0, 1);
  GradientShards(1, 1);
  ASSERT_OK(Declare({Slot(0), Slot(2)}, 1));  // slot 1 lacks the declaration, slot 2 the gradient shards
  EXPECT_THAT(
      protocol.outcomes().AwaitCommit(Step(1), absl::Milliseconds(1)),
      StatusIs(Code::kDeadlineExceeded, "step 1 was not committed within 1ms; missing slots: 1 (trainer pid 4242),2"));
  GradientShards(2, 1);
  Declaration attached{{Slot(1)}, Step(1), {0.5}, {}};
  attached.in_place = true;
  ASSERT_OK(protocol.declarations().Declare(attached));
  EXPECT_EQ(protocol.outcomes().WaitsFor(Step(1)), "no slot is missing, the workers are at it");
}

TEST_F(StepProtocolTest, Abort_FirstCauseStays_AndAnswersAll) {
  PlaceWeights();
  RunStep(1);
  ASSERT_OK(Declare({Slot(0)}, 2));
  protocol.members().SignOfLife(Rank(2), 1, 4711);
  protocol.members().Abort(AbortReason::kGone, 2, Rank(0));
  protocol.members().Abort(AbortReason::kLate, 1, Rank(3));
  const auto dead =
      StatusIs(Code::kUnavailable, AllOf(HasSubstr("worker-2 (rank 2, pid 4711)"), HasSubstr("is gone"),
                                         HasSubstr("seen by rank 0"), HasSubstr("last committed step is 1")));
  EXPECT_THAT(protocol.members().Health(), dead);
  EXPECT_THAT(Declare({Slot(1)}, 2), dead);
  EXPECT_THAT(protocol.declarations().GradientShardReady(Slot(1), 0, Step(2)), dead);
  EXPECT_THAT(protocol.outcomes().AwaitCommit(Step(2), absl::Seconds(60)), dead);
  EXPECT_THAT(protocol.tickets().DigestOf(protocol.tickets().AskForDigest()), dead);
  EXPECT_FALSE(DecideNext(protocol, plan));
  ASSERT_OK_AND_ASSIGN(auto again, Declare({Slot(1)}, 1));  // what was committed is still told
  EXPECT_TRUE(again->already_applied);
}

TEST_F(StepProtocolTest, EveryReason_HasItsWords) {
  const std::pair<AbortReason, const char*> reasons[] = {{AbortReason::kSilent, "no sign of life"},
                                                         {AbortReason::kLate, "did not finish"},
                                                         {AbortReason::kLeft, "told to stop"},
                                                         {AbortReason::kInternal, "internal error"},
                                                         {AbortReason::kUnreachable, "not reached by other hosts"},
                                                         {AbortReason::kDevice, "on CUDA device 5"}};
  for (const auto& [reason, words] : reasons) {
    protocol.control()->abort.store(0);
    protocol.members().Abort(reason, 1, Rank(0), 5);
    EXPECT_THAT(protocol.members().Health(), StatusIs(Code::kUnavailable, HasSubstr(words)));
  }
  protocol.control()->abort.store(0);
  protocol.members().AbortFor(AbortReason::kNotMet, 0, "no way\nto host b");
  EXPECT_THAT(protocol.members().Health(),
              StatusIs(Code::kUnavailable, HasSubstr("other hosts: no way?to host b, seen by")));
}

TEST_F(StepProtocolTest, AbortOfAnotherHost_MayNameAnyRank) {
  protocol.control()->abort.store(AbortWord(AbortReason::kGone, 60000, 50000));
  EXPECT_THAT(protocol.members().Health(),
              StatusIs(Code::kUnavailable,
                       AllOf(HasSubstr("rank 60000, which is none of 4"), HasSubstr("seen by rank 50000"))));
  protocol.control()->abort.store(AbortWord(AbortReason::kDamaged, 1, 1));
  EXPECT_THAT(protocol.members().Health(), StatusIs(Code::kDataLoss, HasSubstr("silent corruption (see its log)")));
  protocol.control()->members[1].damage.store(Damage{Damage::kMemory, 0, 128}.Word());
  EXPECT_THAT(protocol.members().Health(),
              StatusIs(Code::kDataLoss, HasSubstr("in or behind element 128 of parameter \"")));
  protocol.control()->abort.store(AbortWord(AbortReason(99), 1, 0));
  EXPECT_THAT(protocol.members().Health(), StatusIs(Code::kUnavailable, HasSubstr("worker-1 (rank 1, pid 0) of job")));
  protocol.control()->abort.store(AbortWord(AbortReason::kNotMet, 1, 0));
  std::fill(std::begin(protocol.control()->cause), std::end(protocol.control()->cause), 'x');
  EXPECT_THAT(protocol.members().Health(), StatusIs(Code::kUnavailable, HasSubstr("xx, seen by rank 0")));
}

TEST_F(StepProtocolTest, Abort_EndsAWaitUnderWay) {
  PlaceWeights();
  std::thread waiter([&] {
    EXPECT_THAT(protocol.outcomes().AwaitCommit(Step(1), absl::Seconds(60)),
                StatusIs(Code::kUnavailable, HasSubstr("rank 3")));
  });
  protocol.members().Abort(AbortReason::kSilent, 3, Rank(0));
  waiter.join();
}

TEST_F(StepProtocolTest, Commit_EndsAWaitUnderWay) {
  PlaceWeights();
  std::thread waiter([&] { EXPECT_OK(protocol.outcomes().AwaitCommit(Step(1), absl::Seconds(60))); });
  RunStep(1);
  waiter.join();
}

TEST_F(StepProtocolTest, CheckPeers_NamesWhoIsSilent) {
  const absl::Duration timeout = absl::Seconds(3);
  const int64_t second = 1'000'000'000;
  for (int r = 0; r < 3; ++r) protocol.members().SignOfLife(Rank(r), 10 * second, 100 + r);  // rank 3 has not come yet
  protocol.members().CheckPeers(Rank(0), 13 * second, timeout);
  EXPECT_OK(protocol.members().Health());
  protocol.members().SignOfLife(Rank(2), 12 * second, 102);
  protocol.members().CheckPeers(Rank(1), 13 * second, timeout);
  EXPECT_OK(protocol.members().Health());
  protocol.members().SignOfLife(Rank(1), 13 * second, 101);
  protocol.members().CheckPeers(Rank(0), 15 * second + 1, timeout);  // rank 0 does not look at itself
  EXPECT_THAT(protocol.members().Health(), StatusIs(Code::kUnavailable, AllOf(HasSubstr("worker-2 (rank 2, pid 102)"),
                                                                              HasSubstr("no sign of life"))));
}

TEST_F(StepProtocolTest, OutcomeRing_KeepsTheNewest) {
  PlaceWeights();
  RunStep(1, {{Slot(0), 0}});
  for (int64_t step = 2; step <= kOutcomeRing; ++step) RunStep(step);
  EXPECT_TRUE(protocol.outcomes().OutcomeOf(Step(1))->skipped);
  RunStep(kOutcomeRing + 1);
  EXPECT_TRUE(protocol.outcomes().OutcomeOf(Step(1))->already_applied);  // known to be over; why is forgotten
  EXPECT_FALSE(protocol.outcomes().OutcomeOf(Step(1))->skipped);
  RunStep(kOutcomeRing + 2, {{Slot(1), 1}});
  EXPECT_FALSE(protocol.outcomes().OutcomeOf(Step(2))->skipped);
  EXPECT_TRUE(protocol.outcomes().OutcomeOf(Step(kOutcomeRing + 2))->skipped);
  EXPECT_FALSE(protocol.outcomes().OutcomeOf(Step(kOutcomeRing + 3)).has_value());
}

TEST_F(StepProtocolTest, OpenSlots_TakesBackWhatTheLastHolderDeclared_WhereNobodyElseCanCompleteTheStep) {
  PlaceWeights();
  ASSERT_OK(Declare({Slot(0)}, 1, 0.5, {{Slot(0), 1}}));
  GradientShards(0, 1);
  GradientShards(1, 1);
  EXPECT_EQ(protocol.slots().Open({Slot(0)}), Step(1));  // slots 1 and 2 may come any time
  EXPECT_EQ(protocol.slots().Open({Slot(2)}), std::nullopt);
  EXPECT_EQ(protocol.control()->slots[0].declared.load(), 1);
  EXPECT_EQ(protocol.slots().Open({Slot(0), Slot(2)}), std::nullopt);
  EXPECT_EQ(protocol.control()->slots[0].declared.load(), 0);
  EXPECT_FALSE(protocol.declarations().HasGradientShard(Slot(0), 0, Step(1)));
  EXPECT_TRUE(protocol.declarations().HasGradientShard(Slot(1), 0, Step(1)));
  ASSERT_OK(Declare({Slot(1), Slot(2)}, 1));
  GradientShards(2, 1);
  EXPECT_FALSE(DecideNext(protocol, plan));  // slot 0 has to be written again
  ASSERT_OK(Declare({Slot(0)}, 1));
  GradientShards(0, 1);
  Finish();
  EXPECT_FALSE(protocol.outcomes().OutcomeOf(Step(1))->skipped);  // what was not finite was taken back, too
  EXPECT_EQ(protocol.slots().Open({Slot(0), Slot(1), Slot(2)}), std::nullopt);
  EXPECT_EQ(protocol.control()->slots[0].declared.load(), 1);
}

// Who pushed them may not declare them any more: the window is the new holder's.
TEST_F(StepProtocolTest, OpenSlots_TakesPiecesBackThatNobodyDeclared) {
  PlaceWeights();
  constexpr uint64_t kHolder = uint64_t{1} << 32 | 7;
  GradientShards(0, 1);
  ASSERT_OK(protocol.slots().Take(Slot(0), kHolder));
  EXPECT_EQ(protocol.slots().Open({Slot(0)}), std::nullopt);
  EXPECT_THAT(Declare({Slot(0)}, 1), StatusIs(Code::kFailedPrecondition, HasSubstr("session 7 attached to rank 0")));
  protocol.slots().Give(Slot(0), kHolder);
  EXPECT_FALSE(protocol.declarations().HasGradientShard(Slot(0), 0, Step(1)));
}

}  // namespace
}  // namespace shardmesh
