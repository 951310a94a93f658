// What two hosts agree on whose control blocks are not equally far.
#include "worker/lead/hosts/hosts_ending.h"

#include <memory>

#include "core/base/matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/control/group_table.h"
#include "worker/memory/host_memory.h"
#include "worker/testing/small_job.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

Command StepOf(int64_t step, CommandKind kind = CommandKind::kStep) {
  Command command;
  command.kind = kind;
  command.step = step;
  command.apply = 1;
  return command;
}

class HostsEnding : public ::testing::Test {
 protected:
  struct Host {
    Host(const JobSpec& job, const Plan& plan, int host)
        : memory(NewProcessMemory()),
          shared(*HostMemory::Create(*memory, job.name, job, plan)),
          protocol(shared.control(), &shared.notifier(), &job, &plan, MemberNames(plan.num_ranks()),
                   HostRanks{host, 2, 1}) {}
    // Its newest command, and whether it is committed.
    void Is(uint64_t decided, const Command& command, bool committed) {
      control().commands[decided % 2] = command;
      control().decided.store(decided);
      control().committed.store(committed ? decided : decided - 1);
      control().committed_step_plus_one.store(command.step + (committed ? 1 : 0));
    }
    // Its members have stopped, as after a loss.
    void Stop() {
      protocol.members().Abort(AbortReason::kReformed, 0, Rank(0));
      control().ending.store(EndingWord(protocol.decided(), false));
    }
    ControlBlock& control() { return *shared.control(); }

    const std::unique_ptr<Memory> memory;
    HostMemory shared;
    StepProtocol protocol;
  };

  // As the host says it to whoever asks.
  absl::StatusOr<Ending> End(Host& host, Host& other) {
    return EndTogether(host.protocol, {other.protocol.local().host},
                       [&](int) { return ProgressOfStopped(other.protocol); });
  }

  const JobSpec job_ = SmallJob("ddp=2", 1);
  const Plan plan_ = *Plan::Create(job_);
  Host first_{job_, plan_, 0}, second_{job_, plan_, 1};
};

TEST_F(HostsEnding, WhoIsBehind_DecidesWhatTheOtherHas) {
  first_.Is(5, StepOf(5), /*committed=*/false);
  GroupTable(first_.shared.control(), plan_).rates(0)[0] = 0.25;
  second_.Is(4, StepOf(4), /*committed=*/true);
  first_.Stop(), second_.Stop();
  ASSERT_OK_AND_ASSIGN(const Ending first, End(first_, second_));
  ASSERT_OK_AND_ASSIGN(const Ending second, End(second_, first_));
  for (const Ending& ending : {first, second}) {
    EXPECT_EQ(ending.seq, 5);
    EXPECT_EQ(ending.step, 5);
    EXPECT_TRUE(ending.steps);
  }
  EXPECT_EQ(second_.protocol.command().step, 5);
  EXPECT_EQ(GroupTable(second_.shared.control(), plan_).rates(0)[0], 0.25);
  EXPECT_EQ(first_.control().ended.load(), second_.control().ended.load());
}

TEST_F(HostsEnding, WhoIsBehind_CommitsFirst) {
  first_.Is(5, StepOf(5), /*committed=*/false);
  second_.Is(4, StepOf(4), /*committed=*/false);
  second_.control().committed_step_plus_one.store(4);
  first_.Stop(), second_.Stop();
  ASSERT_OK_AND_ASSIGN(const Ending ending, End(second_, first_));
  EXPECT_EQ(ending.step, 5);
  EXPECT_EQ(second_.protocol.committed(), 4);
  EXPECT_EQ(second_.protocol.committed_step(), Step(4));
}

// What was decided on no other host is so on none that goes on, if its host is gone.
TEST_F(HostsEnding, WithoutTheOne_ThatWasAhead_ItWasNotDecided) {
  first_.Is(5, StepOf(5), /*committed=*/false);
  second_.Is(4, StepOf(4), /*committed=*/true);
  second_.Stop();
  const AskHost nobody = [](int) { return absl::InternalError("asked"); };
  ASSERT_OK_AND_ASSIGN(const Ending ending, EndTogether(second_.protocol, {}, nobody));
  EXPECT_EQ(ending.step, 4);
}

// Of three, the one that was ahead told one of the others before it died.
TEST_F(HostsEnding, WhatOneTookOver_ItTellsTheNext) {
  Host third(job_, plan_, 1);
  first_.Is(5, StepOf(5), /*committed=*/false);
  second_.Is(4, StepOf(4), /*committed=*/true);
  third.Is(4, StepOf(4), /*committed=*/true);
  first_.Stop(), second_.Stop(), third.Stop();
  ASSERT_OK(End(second_, first_));
  const auto from_second = [&](int) { return ProgressOfStopped(second_.protocol); };
  ASSERT_OK_AND_ASSIGN(const Ending ending, EndTogether(third.protocol, {0}, from_second));
  EXPECT_EQ(ending.step, 5);
  ASSERT_OK_AND_ASSIGN(const Ending again, EndTogether(third.protocol, {}, from_second));
  EXPECT_EQ(again.step, 5);
}

// Initial weights are there for all or for none.
TEST_F(HostsEnding, InitialWeights_AreThereIfOneHostHasCommittedThem) {
  first_.Is(1, StepOf(0, CommandKind::kInit), /*committed=*/false);
  second_.Is(1, StepOf(0, CommandKind::kInit), /*committed=*/true);
  first_.Stop(), second_.Stop();
  ASSERT_OK_AND_ASSIGN(const Ending ending, End(first_, second_));
  EXPECT_EQ(ending.step, 0);
  Host other(job_, plan_, 0);
  other.Is(1, StepOf(0, CommandKind::kInit), /*committed=*/false);
  other.Stop();
  const AskHost nobody = [](int) { return absl::InternalError("asked"); };
  ASSERT_OK_AND_ASSIGN(const Ending none, EndTogether(other.protocol, {}, nobody));
  EXPECT_EQ(none.step, kNoStep);
}

TEST_F(HostsEnding, AHostWhoseMembersRun_IsAskedAgain) {
  EXPECT_THAT(ProgressOfStopped(first_.protocol), StatusIs(Code::kUnavailable, HasSubstr("have not stopped")));
}

TEST_F(HostsEnding, WhatNoHostCanSay_IsRefusedByName) {
  first_.Is(9, StepOf(9), /*committed=*/false);
  second_.Is(4, StepOf(4), /*committed=*/true);
  first_.Stop(), second_.Stop();
  EXPECT_THAT(End(second_, first_), StatusIs(Code::kFailedPrecondition, HasSubstr("host 1 said of the epoch")));
  const auto garbage = [](int) { return std::string("x"); };
  EXPECT_THAT(EndTogether(second_.protocol, {0}, garbage), StatusIs(Code::kDataLoss, HasSubstr("host 0 said 1 bytes")));
  EXPECT_EQ(second_.control().ended.load(), 0u);
}

}  // namespace
}  // namespace shardmesh
