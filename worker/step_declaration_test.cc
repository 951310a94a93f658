// StepProtocol: what trainers may say.
#include "worker/step_protocol.h"
#include "worker/testing/step_fixture.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

using StepDeclarationTest = StepFixture;

TEST_F(StepDeclarationTest, RepeatedStep_IsAlreadyApplied_AndChangesNothing) {
  PlaceWeights();
  RunStep(1);
  ASSERT_OK_AND_ASSIGN(auto again, Declare({Slot(1)}, 1, 99));
  ASSERT_TRUE(again.has_value());
  EXPECT_TRUE(again->already_applied);
  EXPECT_FALSE(protocol.Decide());
  RunStep(2);
  ASSERT_OK(protocol.PieceReady(Slot(0), 0, Step(1)));  // late: no effect on what is ready
  EXPECT_TRUE(protocol.HasPiece(Slot(0), 0, Step(2)));
}

TEST_F(StepDeclarationTest, WrongSteps_SayWhichIsNext) {
  EXPECT_THAT(Declare({Slot(0)}, 1), StatusIs(Code::kFailedPrecondition, HasSubstr("no initial weights")));
  PlaceWeights();
  EXPECT_THAT(Declare({Slot(0)}, 2),
              StatusIs(Code::kFailedPrecondition, AllOf(HasSubstr("step 2 is ahead"), HasSubstr("the next is 1"))));
  EXPECT_THAT(protocol.PieceReady(Slot(0), 0, Step(7)), StatusIs(Code::kFailedPrecondition, HasSubstr("step 7")));
  EXPECT_THAT(Declare({Slot(0)}, 0), StatusIs(Code::kInvalidArgument, HasSubstr("numbered from 1")));
  EXPECT_THAT(Declare({Slot(0)}, INT64_MIN), StatusIs(Code::kInvalidArgument, HasSubstr("numbered from 1")));
  EXPECT_THAT(Declare({}, 1), StatusIs(Code::kInvalidArgument, HasSubstr("name at least one")));
}

TEST_F(StepDeclarationTest, WrongSlots_AreRefused_AndNothingIsDeclared) {
  PlaceWeights();
  for (int slot : {-1, 3, INT32_MAX}) {
    EXPECT_THAT(Declare({Slot(0), Slot(slot)}, 1), StatusIs(Code::kInvalidArgument, HasSubstr("0 to 2")));
    EXPECT_THAT(protocol.PieceReady(Slot(slot), 0, Step(1)), StatusIs(Code::kInvalidArgument, HasSubstr("0 to 2")));
    EXPECT_THAT(protocol.TakeSlot(Slot(slot), 1), StatusIs(Code::kInvalidArgument, HasSubstr("0 to 2")));
    protocol.GiveSlot(Slot(slot), 1);
  }
  EXPECT_EQ(protocol.page()->slots[0].declared.load(), 0);
  EXPECT_EQ(protocol.page()->lr_claim.load(), 0u);
}

TEST_F(StepDeclarationTest, LearningRate_IsTheSameFromEverySlot) {
  PlaceWeights();
  ASSERT_OK(Declare({Slot(1)}, 1, 0.5));
  EXPECT_THAT(Declare({Slot(0)}, 1, 0.25),
              StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("0.25"), HasSubstr("slot 1 said 0.5"))));
  EXPECT_THAT(Declare({Slot(1)}, 1, 0.25), StatusIs(Code::kInvalidArgument, HasSubstr("0.5 before, and now 0.25")));
  EXPECT_THAT(Declare({Slot(0)}, 1, -1), StatusIs(Code::kInvalidArgument, HasSubstr("lr is -1")));
  EXPECT_EQ(protocol.page()->slots[0].declared.load(), 0);
  ASSERT_OK(Declare({Slot(1)}, 1, 0.5));  // repeated
  ASSERT_OK(Declare({Slot(0), Slot(2)}, 1, 0.5));
  for (int s = 0; s < 3; ++s) Pieces(s, 1);
  Finish();
  for (int s = 0; s < 3; ++s) Pieces(s, 2);
  ASSERT_OK(Declare({Slot(0), Slot(1), Slot(2)}, 2, 0.25));  // another step, another rate
  ASSERT_TRUE(protocol.Decide());
  OptimizerHyper hyper = job.optimizer;
  hyper.lr = 0.25;
  EXPECT_EQ(protocol.command().scalars.neg_step_size, ComputeStepScalars(hyper, 2)->neg_step_size);
}

TEST_F(StepDeclarationTest, InPlace_MarksEveryPiece_RingsOnce_AndLeavesNoMarkWhenRefused) {
  PlaceWeights();
  Declaration declaration{{Slot(0), Slot(1), Slot(2)}, Step(1), -1, {}, true};
  EXPECT_THAT(protocol.Declare(declaration), StatusIs(Code::kInvalidArgument, HasSubstr("lr is -1")));
  EXPECT_FALSE(protocol.HasPiece(Slot(0), 0, Step(1)));
  const uint32_t rung = protocol.page()->doorbell.load();
  declaration.learning_rate = 0.5;
  ASSERT_OK(protocol.Declare(declaration));
  EXPECT_EQ(protocol.page()->doorbell.load(), rung + 1);
  EXPECT_TRUE(protocol.Decide());
}

TEST_F(StepDeclarationTest, NonFinite_OfAnotherSlotOrTensor_IsRefused) {
  PlaceWeights();
  EXPECT_THAT(Declare({Slot(0)}, 1, 0.5, {{Slot(1), 0}}), StatusIs(Code::kInvalidArgument, HasSubstr("slot 1")));
  EXPECT_THAT(Declare({Slot(0)}, 1, 0.5, {{Slot(0), 2}}), StatusIs(Code::kInvalidArgument, HasSubstr("tensor 2")));
  EXPECT_THAT(Declare({Slot(0)}, 1, 0.5, {{Slot(0), -1}}), StatusIs(Code::kInvalidArgument, HasSubstr("tensor -1")));
  EXPECT_EQ(protocol.page()->lr_claim.load(), 0u);
  EXPECT_EQ(protocol.page()->slots[0].declared.load(), 0);
  RunStep(1);
  EXPECT_FALSE(protocol.OutcomeOf(Step(1))->skipped);
}

TEST(StepDeclarationPolicyTest, NonFinite_UnderPolicyFail_IsRefusedAndMayBeWrittenAgain) {
  JobSpec job = SmallJob("fsdp=1", 1);
  job.non_finite = NonFinitePolicy::kFail;
  TestHost host(job);
  host.protocol.InitialPieceReady(Rank(0), 1);
  ASSERT_TRUE(host.protocol.Decide());
  host.protocol.Done(Rank(0), 1);
  host.protocol.Commit();
  EXPECT_THAT(host.protocol.Declare({{Slot(0)}, Step(1), 0.5, {{Slot(0), 1}}}),
              StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("\"layer.b\""), HasSubstr("write it again"))));
  ASSERT_OK(host.protocol.Declare({{Slot(0)}, Step(1), 0.5, {}}));
  ASSERT_OK(host.protocol.PieceReady(Slot(0), 0, Step(1)));
  ASSERT_TRUE(host.protocol.Decide());
  EXPECT_EQ(host.protocol.command().apply, 1);
}

}  // namespace
}  // namespace shardmesh
