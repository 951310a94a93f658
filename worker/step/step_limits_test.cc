// The words of the step protocol next to where they end: the last steps that a job can have, and numbers of commands
// whose words wrap.
#include <cstdint>
#include <limits>

#include "worker/step/step_protocol.h"
#include "worker/testing/decide_next.h"
#include "worker/testing/step_fixture.h"

namespace shardmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

struct StepLimitsTest : StepFixture {
  // As after so many steps, by so many commands.
  void ContinueFrom(int64_t step, uint64_t seq) {
    PlaceWeights();
    ControlBlock& control = *protocol.control();
    control.commands[0] = control.commands[1] = protocol.command();
    control.committed_step_plus_one.store(step + 1);
    for (auto* word : {&control.decided, &control.committed}) word->store(seq);
    for (int r = 0; r < plan.num_ranks(); ++r) control.members[r].done.store(seq);
  }
  StepOutcome Outcome(int64_t step) { return protocol.outcomes().OutcomeOf(Step(step)).value_or(StepOutcome{}); }
};

TEST_F(StepLimitsTest, TheLastSteps_AreAsAllOthers) {
  ContinueFrom(kMaxStep - 4, 3 * kMaxStep);
  RunStep(kMaxStep - 3);
  RunStep(kMaxStep - 2, {{Slot(2), 1}});
  RunStep(kMaxStep - 1);
  EXPECT_FALSE(Outcome(kMaxStep - 3).skipped);
  EXPECT_TRUE(Outcome(kMaxStep - 2).skipped);
  EXPECT_EQ(Outcome(kMaxStep - 2).bad_slot, Slot(2));
  EXPECT_EQ(Outcome(kMaxStep - 2).bad_tensor, 1);
  EXPECT_FALSE(Outcome(kMaxStep - 1).skipped) << "a gradient of another step";

  ASSERT_OK(Declare({Slot(0)}, kMaxStep, 0.5));
  EXPECT_THAT(Declare({Slot(1)}, kMaxStep, 0.25),
              StatusIs(Code::kInvalidArgument, HasSubstr("slot 0 said 0.5; all slots of a step must agree")));
  RunStep(kMaxStep, {{Slot(0), 0}});
  EXPECT_EQ(protocol.committed_step(), Step(kMaxStep));
  EXPECT_TRUE(Outcome(kMaxStep).skipped);
  EXPECT_EQ(Outcome(kMaxStep).bad_slot, Slot(0));
  EXPECT_THAT(protocol.publications().Published(), ElementsAre(Step(kMaxStep - 3), Step(kMaxStep - 1)));
  EXPECT_TRUE(protocol.publications().Pin(Step(kMaxStep - 1)).has_value());
}

TEST_F(StepLimitsTest, AStepBeyondTheLast_IsRefused_AndWhatIsThereStays) {
  ContinueFrom(kMaxStep - 1, 3 * kMaxStep);
  RunStep(kMaxStep);
  for (const int64_t step : {kMaxStep + 1, kMaxStep + 2, std::numeric_limits<int64_t>::max()}) {
    const auto refused = StatusIs(Code::kResourceExhausted,
                                  HasSubstr("the last one that a job can have, 549755813887; pull its weights, and"));
    EXPECT_THAT(Declare({Slot(0)}, step), refused);
    EXPECT_THAT(protocol.declarations().GradientShardReady(Slot(0), 0, Step(step)), refused);
    EXPECT_THAT(protocol.declarations().CheckStep(Slot(0), Step(step)), refused);
    EXPECT_FALSE(protocol.publications().Pin(Step(step)).has_value());
    EXPECT_FALSE(protocol.outcomes().OutcomeOf(Step(step)).has_value());
  }
  EXPECT_FALSE(DecideNext(protocol, plan));
  EXPECT_OK(protocol.members().Health());
  ASSERT_OK_AND_ASSIGN(const auto again, Declare({Slot(0)}, kMaxStep));
  EXPECT_TRUE(again->already_applied);
  EXPECT_THAT(protocol.publications().Published(), ElementsAre(Step(0), Step(kMaxStep)));
}

TEST_F(StepLimitsTest, TheLastStep_TakenBack_IsDeclaredAnew) {
  ContinueFrom(kMaxStep - 1, 3 * kMaxStep);
  ASSERT_OK(Declare({Slot(0)}, kMaxStep, 0.5));
  const double rate = 0.25;
  protocol.declarations().TakeSettings(Step(kMaxStep), {&rate, 1}, 1);
  EXPECT_THAT(protocol.declarations().CheckStands({Slot(0)}, Step(kMaxStep)),
              StatusIs(Code::kInvalidArgument, HasSubstr("there 0.25")));
  EXPECT_OK(protocol.declarations().CheckStands({Slot(0)}, Step(kMaxStep - 1)));
  ASSERT_OK(Declare({Slot(0)}, kMaxStep, 0.25));
  EXPECT_OK(protocol.declarations().CheckStands({Slot(0)}, Step(kMaxStep)));
}

TEST_F(StepLimitsTest, GradientsOfTheLastStep_AreCountedByBucket) {
  protocol.commands().GradientsHere(Step(kMaxStep - 1), kMaxParameters);
  protocol.commands().GradientsHere(Step(kMaxStep), 1);
  EXPECT_TRUE(protocol.commands().AwaitGradients(Step(kMaxStep - 1), 0)) << "that is over";
  EXPECT_TRUE(protocol.commands().AwaitGradients(Step(kMaxStep), 0));
  protocol.members().Abort(AbortReason::kLate, 0, Rank(0));
  EXPECT_FALSE(protocol.commands().AwaitGradients(Step(kMaxStep), 1)) << "it did not wait";
}

// A word of a command's number holds 44 bits of it.
TEST_F(StepLimitsTest, NumbersOfCommands_NextToTheWrapOfTheirWords) {
  constexpr uint64_t kWrap = uint64_t{1} << 44;
  ContinueFrom(7, kWrap - 3);
  for (int r = 0; r < plan.num_ranks(); ++r) protocol.commands().BucketsDone(Rank(r), kWrap - 3, 2);
  for (uint64_t seq = kWrap - 2; seq < kWrap + 3; ++seq) {
    EXPECT_FALSE(protocol.commands().AllBucketsDone(seq, 1)) << seq << ": that was the command before";
    for (int r = 0; r < plan.num_ranks(); ++r) {
      EXPECT_FALSE(protocol.commands().AllBucketsDone(seq, 1)) << seq;
      protocol.commands().BucketsDone(Rank(r), seq, 1);
    }
    EXPECT_TRUE(protocol.commands().AllBucketsDone(seq, 1)) << seq;
    EXPECT_FALSE(protocol.commands().AllBucketsDone(seq, 2)) << seq;
    for (int r = 0; r < plan.num_ranks(); ++r) protocol.commands().BucketsDone(Rank(r), seq, 2);
    EXPECT_TRUE(protocol.commands().AllBucketsDone(seq, 2)) << seq;
    for (int r = 0; r < plan.num_ranks(); ++r) protocol.commands().Done(Rank(r), seq);
  }
}

}  // namespace
}  // namespace shardmesh
