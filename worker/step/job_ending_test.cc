// What the control block of an epoch that ended says of its shards.
#include "worker/step/job_ending.h"

#include <memory>
#include <thread>
#include <vector>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kLong = absl::Seconds(20), kShort = absl::Milliseconds(30);
bool Never() { return false; }

// Decided as the third, in the place for it.
std::unique_ptr<ControlBlock> ControlWith(CommandKind kind, int64_t step, int apply = 1) {
  auto control = std::make_unique<ControlBlock>();
  Command& command = control->commands[1];
  command.kind = kind;
  command.step = step;
  command.apply = apply;
  command.parity = 1;
  control->decided.store(3);
  control->committed.store(2);
  return control;
}

TEST(JobEndingTest, EveryCommand_TheStepThatShardsAreAt) {
  struct Case {
    CommandKind kind;
    int apply;
    bool committed;
    int64_t step;  // of a command of step 7
    int parity;
    bool steps;
  };
  const Case cases[] = {
      {CommandKind::kInit, 0, false, kNoStep, 1, false},   {CommandKind::kInit, 0, true, 7, 1, false},
      {CommandKind::kStep, 1, false, 7, 0, true},          {CommandKind::kStep, 1, true, 7, 0, true},
      {CommandKind::kStep, 0, false, 7, 1, false},         {CommandKind::kQuantize, 1, false, 7, 1, false},
      {CommandKind::kNorm, 1, false, 6, 1, false},         {CommandKind::kReduceBucket, 0, false, 6, 1, false},
      {CommandKind::kMerge, 0, true, 6, 1, false},         {CommandKind::kDigest, 0, false, 7, 1, false},
      {CommandKind::kGatherBucket, 0, false, 7, 1, false}, {CommandKind::kRestore, 0, false, 7, 1, false}};
  for (const Case& c : cases) {
    const auto control = ControlWith(c.kind, 7, c.apply);
    const Ending ending = EndingOf(*control, EndingWord(3, c.committed));
    EXPECT_EQ(ending.seq, 3u);
    EXPECT_EQ(ending.step, c.step) << int(c.kind);
    EXPECT_EQ(ending.parity, c.parity) << int(c.kind);
    EXPECT_EQ(ending.steps, c.steps) << int(c.kind);
  }
  EXPECT_EQ(EndingOf(ControlBlock{}, EndingWord(0, false)).step, kNoStep);
}

TEST(JobEndingTest, WaitsForAllMembers_AndNamesOneThatDoesNotStop) {
  const auto control = ControlWith(CommandKind::kStep, 7);
  const std::vector<Rank> members = {Rank(0), Rank(2)};
  TellStopped(*control, Rank(0));
  EXPECT_THAT(AwaitEnding(*control, members, Never, kShort), StatusIs(Code::kDeadlineExceeded, HasSubstr("rank 2")));
  EXPECT_THAT(AwaitEnding(
                  *control, members, [] { return true; }, kLong),
              StatusIs(Code::kCancelled, HasSubstr("anew")));
  EXPECT_EQ(control->ending.load(), 0u);
  std::thread other([&] { TellStopped(*control, Rank(2)); });
  ASSERT_OK_AND_ASSIGN(const Ending ending, AwaitEnding(*control, members, Never, kLong));
  other.join();
  EXPECT_EQ(ending.step, 7);
}

TEST(JobEndingTest, OneThatWasStopped_AndDecidesLater_ChangesNothing) {
  const auto control = ControlWith(CommandKind::kStep, 7);
  TellStopped(*control, Rank(1));
  ASSERT_OK_AND_ASSIGN(const Ending first, AwaitEnding(*control, {Rank(1)}, Never, kLong));
  control->commands[0].kind = CommandKind::kStep;
  control->commands[0].step = 8;
  control->decided.store(4);
  TellStopped(*control, Rank(2));
  ASSERT_OK_AND_ASSIGN(const Ending second, AwaitEnding(*control, {Rank(1), Rank(2)}, Never, kLong));
  EXPECT_EQ(first.step, 7);
  EXPECT_EQ(second.step, 7);
  EXPECT_EQ(second.seq, first.seq);
}

TEST(JobEndingTest, Outcomes_AreToldAtTheNextEpoch_ThatOfTheLastStepToo) {
  const auto control = ControlWith(CommandKind::kStep, 7, /*apply=*/0);
  control->commands[1].nonfinite = int64_t{2} << 32 | 5;
  control->norm_step.store(7);
  control->norm.store(1.5);
  control->outcomes[6].step.store(6);
  control->outcomes[6].norm.store(0.25);
  control->outcomes[7].step.store(kNoStep);  // its commit was under way
  ControlBlock next = {};
  BeginRestored(BequestOf(*control, EndingOf(*control, EndingWord(3, false))), next);
  EXPECT_EQ(next.restored_step_plus_one.load(), 8);
  EXPECT_EQ(next.outcomes[6].step.load(), 6);
  EXPECT_EQ(next.outcomes[6].norm.load(), 0.25);
  EXPECT_EQ(next.outcomes[7].step.load(), 7);
  EXPECT_EQ(next.outcomes[7].norm.load(), 1.5);
  EXPECT_EQ(next.outcomes[7].skipped.load(), (int64_t{2} << 32 | 5) + 1);
}

TEST(JobEndingTest, WithoutWeights_NothingIsRestored) {
  ControlBlock control = {}, next = {};
  BeginRestored(BequestOf(control, EndingOf(control, EndingWord(0, false))), next);
  EXPECT_EQ(next.restored_step_plus_one.load(), 0);
}

TEST(JobEndingTest, ABequest_CrossesAsBytes_AndOtherBytesAreRefused) {
  const auto control = ControlWith(CommandKind::kStep, 7);
  control->outcomes[6].step.store(6);
  control->outcomes[6].norm.store(0.25);
  const std::string bytes = PackBequest(BequestOf(*control, EndingOf(*control, EndingWord(3, false))));
  ASSERT_OK_AND_ASSIGN(const Bequest bequest, UnpackBequest(bytes));
  EXPECT_EQ(bequest.step, 7);
  EXPECT_EQ(bequest.outcomes[6].norm, 0.25);
  EXPECT_EQ(bequest.outcomes[7].step, 7);
  EXPECT_THAT(UnpackBequest(bytes.substr(1)), StatusIs(Code::kDataLoss, HasSubstr("bytes; expected")));
  Bequest wrong = bequest;
  wrong.step = -2;
  EXPECT_THAT(UnpackBequest(PackBequest(wrong)), StatusIs(Code::kDataLoss, HasSubstr("-2")));
}

TEST(JobEndingTest, SeveralHosts_EndAsTheWordSays) {
  const auto control = ControlWith(CommandKind::kStep, 7);
  EXPECT_THAT(AwaitEnded(*control, Never, kShort), StatusIs(Code::kDeadlineExceeded, HasSubstr("did not agree")));
  EXPECT_THAT(AwaitEnded(
                  *control, [] { return true; }, kLong),
              StatusIs(Code::kCancelled, HasSubstr("anew")));
  control->ended.store(EndingWord(3, false));
  ASSERT_OK_AND_ASSIGN(const Ending ending, AwaitEnded(*control, Never, kLong));
  EXPECT_EQ(ending.step, 7);
}

// What was loaded went with the processes that had it, until all had placed it.
TEST(JobEndingTest, AJobThatWasToBeginWithWhatItLoaded_HasNothingUntilItHas) {
  const auto control = ControlWith(CommandKind::kRestore, 7, 0);
  control->commands[3 % 2].initial_id = 99;
  EXPECT_EQ(EndingOf(*control, EndingWord(3, false)).step, kNoStep);
  EXPECT_EQ(EndingOf(*control, EndingWord(3, true)).step, 7);
}

}  // namespace
}  // namespace shardmesh
