// StepProtocol: what trainers may say.
#include <atomic>
#include <cmath>
#include <iostream>
#include <thread>

#include "worker/step/step_protocol.h"
#include "worker/testing/decide_next.h"
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
  EXPECT_FALSE(DecideNext(protocol, plan));
  RunStep(2);
  ASSERT_OK(protocol.declarations().GradientShardReady(Slot(0), 0, Step(1)));  // late: no effect on what is ready
  EXPECT_TRUE(protocol.declarations().HasGradientShard(Slot(0), 0, Step(2)));
}

TEST_F(StepDeclarationTest, WrongSteps_SayWhichIsNext) {
  EXPECT_THAT(Declare({Slot(0)}, 1), StatusIs(Code::kFailedPrecondition, HasSubstr("no initial weights")));
  PlaceWeights();
  EXPECT_THAT(Declare({Slot(0)}, 2),
              StatusIs(Code::kFailedPrecondition, AllOf(HasSubstr("step 2 is ahead"), HasSubstr("the next is 1"))));
  EXPECT_THAT(protocol.declarations().GradientShardReady(Slot(0), 0, Step(7)),
              StatusIs(Code::kFailedPrecondition, HasSubstr("step 7")));
  EXPECT_THAT(Declare({Slot(0)}, 0), StatusIs(Code::kInvalidArgument, HasSubstr("numbered from 1")));
  EXPECT_THAT(Declare({Slot(0)}, INT64_MIN), StatusIs(Code::kInvalidArgument, HasSubstr("numbered from 1")));
  EXPECT_THAT(Declare({}, 1), StatusIs(Code::kInvalidArgument, HasSubstr("name at least one")));
}

// Another host may have told the trainer of the commit of step 1 already.
TEST_F(StepDeclarationTest, OneStepAhead_OnSeveralHosts_IsTriedAgain) {
  PlaceWeights();
  StepProtocol first(host.control(), &host.notifier(), &job, &plan, MemberNames(plan.num_ranks()), HostRanks{0, 2, 2});
  EXPECT_THAT(first.declarations().Declare({{Slot(0)}, Step(2), {0.5}, {}}),
              StatusIs(Code::kUnavailable, AllOf(HasSubstr("step 2 is ahead"), HasSubstr("try again"))));
  EXPECT_THAT(first.declarations().Declare({{Slot(0)}, Step(3), {0.5}, {}}),
              StatusIs(Code::kFailedPrecondition, HasSubstr("step 3 is ahead")));
}

JobSpec PulledJob() {
  JobSpec job = SmallJob("fsdp=2", 3);
  job.slot_mode = SlotMode::kPulled;
  job.num_trainers = 2;
  return job;
}

struct PulledDeclarationTest : StepFixture {
  PulledDeclarationTest() : StepFixture(PulledJob()) {}
};

TEST_F(PulledDeclarationTest, SlotsByTheirNumber_AreRefused_AndTheMessageSaysHowTheyAreTaken) {
  PlaceWeights();
  const auto refused =
      StatusIs(Code::kFailedPrecondition, HasSubstr("Job::ConnectPulling: Shard.Seat and Shard.Trainer"));
  EXPECT_THAT(protocol.declarations().CheckStep(Slot(0), Step(1)).status(), refused);
  EXPECT_THAT(protocol.declarations().GradientShardReady(Slot(0), 0, Step(1)), refused);
}

TEST_F(StepDeclarationTest, WrongSlots_AreRefused_AndNothingIsDeclared) {
  PlaceWeights();
  for (int slot : {-1, 3, INT32_MAX}) {
    EXPECT_THAT(Declare({Slot(0), Slot(slot)}, 1), StatusIs(Code::kInvalidArgument, HasSubstr("0 to 2")));
    EXPECT_THAT(protocol.declarations().GradientShardReady(Slot(slot), 0, Step(1)),
                StatusIs(Code::kInvalidArgument, HasSubstr("0 to 2")));
    EXPECT_THAT(protocol.slots().Take(Slot(slot), 1), StatusIs(Code::kInvalidArgument, HasSubstr("0 to 2")));
    protocol.slots().Give(Slot(slot), 1);
  }
  EXPECT_EQ(protocol.control()->slots[0].declared.load(), 0);
  EXPECT_EQ(protocol.control()->settings_claim.load(), 0u);
}

TEST_F(StepDeclarationTest, LearningRate_IsTheSameFromEverySlot) {
  PlaceWeights();
  ASSERT_OK(Declare({Slot(1)}, 1, 0.5));
  EXPECT_THAT(Declare({Slot(0)}, 1, 0.25),
              StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("0.25"), HasSubstr("slot 1 said 0.5"))));
  EXPECT_THAT(Declare({Slot(1)}, 1, 0.25), StatusIs(Code::kInvalidArgument, HasSubstr("0.5 before, and now 0.25")));
  EXPECT_THAT(Declare({Slot(0)}, 1, -1), StatusIs(Code::kInvalidArgument, HasSubstr("lr is -1")));
  EXPECT_EQ(protocol.control()->slots[0].declared.load(), 0);
  ASSERT_OK(Declare({Slot(1)}, 1, 0.5));  // repeated
  ASSERT_OK(Declare({Slot(0), Slot(2)}, 1, 0.5));
  for (int s = 0; s < 3; ++s) GradientShards(s, 1);
  Finish();
  for (int s = 0; s < 3; ++s) GradientShards(s, 2);
  ASSERT_OK(Declare({Slot(0), Slot(1), Slot(2)}, 2, 0.25));  // another step, another rate
  ASSERT_TRUE(DecideNext(protocol, plan));
  OptimizerHyper hyper = job.optimizer;
  hyper.lr = 0.25;
  const StepScalars& scalars = GroupTable(host.control(), plan).scalars(protocol.command().groups)[0];
  EXPECT_EQ(scalars.neg_step_size, ComputeStepScalars(hyper, 2)->neg_step_size);
}

// The lead takes another host's rates while a slot is declared with others: whoever comes first, the slot does not stay
// declared.
TEST_F(StepDeclarationTest, OtherRatesElsewhere_AreSeenWheneverTheyCome) {
  PlaceWeights();
  ControlBlock& control = *protocol.control();
  const std::vector<double> there = {0.5};
  std::atomic<int> turn{0};
  constexpr int kTurns = 20000;
  std::thread lead([&] {
    for (int i = 1; i <= kTurns; ++i) {
      while (turn.load() != 2 * i - 1) std::this_thread::yield();
      protocol.declarations().TakeSettings(Step(1), there, 1.0);
      turn.store(2 * i);
    }
  });
  int refused = 0;
  for (int i = 1; i <= kTurns; ++i) {
    control.settings_claim.store(0);
    turn.store(2 * i - 1);
    const auto declared = Declare({Slot(0)}, 1, 0.25);
    while (turn.load() != 2 * i) std::this_thread::yield();
    EXPECT_EQ(control.slots[0].declared.load(), 0) << "turn " << i << ": " << declared.status();
    if (!declared.ok()) ++refused;
    control.slots[0].declared.store(0);
  }
  lead.join();
  std::cout << refused << " of " << kTurns << " were refused at once, the others taken back\n";
}

// Of the newest command.
void ExpectScalarsOf(TestHost& on, int64_t step, const std::vector<double>& rates) {
  const GroupTable groups(on.host.control(), on.plan);
  const int place = on.protocol.command().groups;
  for (int g = 0; g < on.job.num_groups(); ++g) {
    OptimizerHyper hyper = on.job.group(g);
    hyper.lr = rates[g];
    EXPECT_EQ(groups.scalars(place)[g].neg_step_size, ComputeStepScalars(hyper, step)->neg_step_size) << g;
    EXPECT_EQ(groups.scalars(place)[g].decay, ComputeStepScalars(hyper, step)->decay) << g;
    EXPECT_EQ(groups.rates(place)[g], rates[g]) << g;
  }
}

// SmallJob in three groups, which decay weights differently.
struct GroupsTest : StepFixture {
  static JobSpec Job() {
    JobSpec job = SmallJob("ddp=2,fsdp=2", 3);
    job.more_groups.assign(2, job.optimizer);
    job.more_groups[0].weight_decay = 0.5;
    job.more_groups[1].lr = 0.0625;
    job.parameters[1].group = 2;
    return job;
  }
  GroupsTest() : StepFixture(Job()) { PlaceWeights(); }

  void ExpectScalars(int64_t step, std::vector<double> rates) { ExpectScalarsOf(*this, step, rates); }
};

TEST_F(GroupsTest, OneRate_IsOfAllGroups_AndNone_IsTheJobs) {
  int64_t step = 0;
  for (const auto& [said, meant] : std::vector<std::pair<std::vector<double>, std::vector<double>>>{
           {{0.25}, {0.25, 0.25, 0.25}}, {{}, {0.125, 0.125, 0.0625}}, {{0.5, 0, 1}, {0.5, 0, 1}}}) {
    ++step;
    for (int s = 0; s < 3; ++s) GradientShards(s, step);
    ASSERT_OK(DeclareRates({Slot(0)}, step, said));
    ASSERT_OK(DeclareRates({Slot(1), Slot(2)}, step, meant));  // the same, said in full
    Finish();
    ExpectScalars(step, meant);
  }
}

TEST_F(GroupsTest, TheFirstDeclarationsRates_BindTheStep) {
  ASSERT_OK(DeclareRates({Slot(1)}, 1, {0.5, 0.25, 0.125}));
  EXPECT_THAT(DeclareRates({Slot(0)}, 1, {0.5, 0.25, 0.5}),
              StatusIs(Code::kInvalidArgument,
                       AllOf(HasSubstr("slot 0 says learning rate 0.5 for group 2"), HasSubstr("slot 1 said 0.125"))));
  EXPECT_THAT(DeclareRates({Slot(1)}, 1, {0.5, 0.75, 0.125}),
              StatusIs(Code::kInvalidArgument, HasSubstr("learning rate 0.25 for group 1 before, and now 0.75")));
  EXPECT_EQ(protocol.control()->slots[0].declared.load(), 0);
  ASSERT_OK(DeclareRates({Slot(0), Slot(2)}, 1, {0.5, 0.25, 0.125}));
  for (int s = 0; s < 3; ++s) GradientShards(s, 1);
  ASSERT_TRUE(DecideNext(protocol, plan));
  ExpectScalars(1, {0.5, 0.25, 0.125});
}

// Of the most groups that a job can have: also the last one's rate binds the step, and the words of two steps in turn
// lie apart from each other and from those of the slots.
TEST(ManyGroupsTest, EveryGroupsRate_BindsTheStep) {
  JobSpec job = SmallJob("fsdp=2", 3);
  job.more_groups.assign(kMaxGroups - 1, job.optimizer);
  job.parameters[1].group = kMaxGroups - 1;
  struct ManyGroups : StepFixture {
    explicit ManyGroups(const JobSpec& spec) : StepFixture(spec) {}
    void TestBody() override {}
  } fixture(job);
  fixture.PlaceWeights();
  for (int64_t step = 1; step <= 3; ++step) {
    std::vector<double> rates(kMaxGroups);
    for (int g = 0; g < kMaxGroups; ++g) rates[g] = 1.0 / static_cast<double>(step * (g + 1));
    for (int s = 0; s < 3; ++s) fixture.GradientShards(s, step);
    ASSERT_OK(fixture.DeclareRates({Slot(2), Slot(0)}, step, rates));
    std::vector<double> other = rates;
    other.back() *= 2;
    EXPECT_THAT(fixture.DeclareRates({Slot(1)}, step, other),
                StatusIs(Code::kInvalidArgument, HasSubstr("for group 4095 for step")));
    ASSERT_OK(fixture.DeclareRates({Slot(1)}, step, rates));
    fixture.Finish();
    ExpectScalarsOf(fixture, step, rates);
  }
}

TEST_F(StepDeclarationTest, TheLossScale_BindsTheStep_AndDividesTheSum) {
  PlaceWeights();
  const auto declare = [&](int slot, double loss_scale) {
    Declaration declaration;
    declaration.slots = {Slot(slot)};
    declaration.step = Step(1);
    declaration.loss_scale = loss_scale;
    return protocol.declarations().Declare(declaration);
  };
  for (const double wrong : {0.0, -1.0, 0x1p65, 0x1p-65, std::nan(""), HUGE_VAL}) {
    EXPECT_THAT(declare(0, wrong), StatusIs(Code::kInvalidArgument, HasSubstr("give one between 2^-64 and 2^64")));
  }
  EXPECT_EQ(protocol.control()->settings_claim.load(), 0u);
  ASSERT_OK(declare(1, 1024));
  EXPECT_THAT(declare(0, 512),
              StatusIs(Code::kInvalidArgument, HasSubstr("slot 0 says loss scale 512 for step 1, slot 1 said 1024")));
  EXPECT_THAT(declare(1, 1), StatusIs(Code::kInvalidArgument, HasSubstr("loss scale 1024 before, and now 1")));
  for (int s = 0; s < 3; ++s) {
    ASSERT_OK(declare(s, 1024));
    GradientShards(s, 1);
  }
  ASSERT_TRUE(DecideNext(protocol, plan));
  EXPECT_EQ(protocol.command().divide_scale, static_cast<float>(1.0 / 3072));
  AllExecute();
  Lead::CommitNewest(protocol);
  RunStep(2);
  EXPECT_EQ(protocol.command().divide_scale, static_cast<float>(1.0 / 3));
}

TEST_F(GroupsTest, WrongRates_NameGroupAndValue_AndNothingIsDeclared) {
  EXPECT_THAT(DeclareRates({Slot(0)}, 1, {0.5, 0.5}),
              StatusIs(Code::kInvalidArgument, HasSubstr("2 learning rates for the 3 parameter groups of job small")));
  EXPECT_THAT(DeclareRates({Slot(0)}, 1, {1, 1, 1, 1}), StatusIs(Code::kInvalidArgument, HasSubstr("4 learning")));
  EXPECT_THAT(DeclareRates({Slot(0)}, 1, {1, 1, std::nan("")}),
              StatusIs(Code::kInvalidArgument, HasSubstr("group 2: adamw: AdamW: lr is nan")));
  EXPECT_THAT(DeclareRates({Slot(0)}, 1, {1, -0.5, 1}),
              StatusIs(Code::kInvalidArgument, HasSubstr("group 1: adamw: AdamW: lr is -0.5")));
  EXPECT_THAT(DeclareRates({Slot(0)}, 1, {1, 4, 1}),
              StatusIs(Code::kInvalidArgument, HasSubstr("group 1: adamw: AdamW: lr * weight_decay")));
  EXPECT_EQ(protocol.control()->settings_claim.load(), 0u);
  EXPECT_EQ(protocol.control()->slots[0].declared.load(), 0);
}

TEST_F(StepDeclarationTest, InPlace_MarksEveryPiece_RingsOnce_AndLeavesNoMarkWhenRefused) {
  PlaceWeights();
  Declaration declaration{{Slot(0), Slot(1), Slot(2)}, Step(1), {-1.0}, {}, true};
  EXPECT_THAT(protocol.declarations().Declare(declaration), StatusIs(Code::kInvalidArgument, HasSubstr("lr is -1")));
  EXPECT_FALSE(protocol.declarations().HasGradientShard(Slot(0), 0, Step(1)));
  const uint32_t notified = host.notifier().load();
  declaration.learning_rates = {0.5};
  ASSERT_OK(protocol.declarations().Declare(declaration));
  EXPECT_EQ(host.notifier().load(), notified + 1);
  EXPECT_TRUE(DecideNext(protocol, plan));
}

TEST_F(StepDeclarationTest, NonFinite_OfAnotherSlotOrTensor_IsRefused) {
  PlaceWeights();
  EXPECT_THAT(Declare({Slot(0)}, 1, 0.5, {{Slot(1), 0}}), StatusIs(Code::kInvalidArgument, HasSubstr("slot 1")));
  EXPECT_THAT(Declare({Slot(0)}, 1, 0.5, {{Slot(0), 2}}), StatusIs(Code::kInvalidArgument, HasSubstr("tensor 2")));
  EXPECT_THAT(Declare({Slot(0)}, 1, 0.5, {{Slot(0), -1}}), StatusIs(Code::kInvalidArgument, HasSubstr("tensor -1")));
  EXPECT_EQ(protocol.control()->settings_claim.load(), 0u);
  EXPECT_EQ(protocol.control()->slots[0].declared.load(), 0);
  RunStep(1);
  EXPECT_FALSE(protocol.outcomes().OutcomeOf(Step(1))->skipped);
}

TEST_F(GroupsTest, NonFinite_OfAFrozenTensor_IsRefused) {
  JobSpec frozen = job;
  frozen.parameters[1].frozen = true;
  TestHost other(frozen);
  for (int r = 0; r < 4; ++r) other.protocol.commands().InitialShardReady(Rank(r), 17);
  ASSERT_TRUE(DecideNext(other.protocol, other.plan));
  for (int r = 0; r < 4; ++r) other.protocol.commands().Done(Rank(r), other.protocol.decided());
  Lead::CommitNewest(other.protocol);
  EXPECT_THAT(other.protocol.declarations().Declare({{Slot(0)}, Step(1), {0.5}, {{Slot(0), 1}}}),
              StatusIs(Code::kInvalidArgument, HasSubstr("tensor 1 (\"layer.b\") is frozen")));
  EXPECT_EQ(other.protocol.control()->slots[0].declared.load(), 0);
  EXPECT_OK(other.protocol.declarations().Declare({{Slot(0)}, Step(1), {0.5}, {{Slot(0), 0}}}));
}

TEST(StepDeclarationPolicyTest, NonFinite_UnderPolicyFail_IsRefusedAndMayBeWrittenAgain) {
  JobSpec job = SmallJob("fsdp=1", 1);
  job.non_finite = NonFinitePolicy::kFail;
  TestHost host(job);
  host.protocol.commands().InitialShardReady(Rank(0), 1);
  ASSERT_TRUE(DecideNext(host.protocol, host.plan));
  host.protocol.commands().Done(Rank(0), 1);
  Lead::CommitNewest(host.protocol);
  EXPECT_THAT(host.protocol.declarations().Declare({{Slot(0)}, Step(1), {0.5}, {{Slot(0), 1}}}),
              StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("\"layer.b\""), HasSubstr("write it again"))));
  ASSERT_OK(host.protocol.declarations().Declare({{Slot(0)}, Step(1), {0.5}, {}}));
  ASSERT_OK(host.protocol.declarations().GradientShardReady(Slot(0), 0, Step(1)));
  ASSERT_TRUE(DecideNext(host.protocol, host.plan));
  EXPECT_EQ(host.protocol.command().apply, 1);
}

}  // namespace
}  // namespace shardmesh
