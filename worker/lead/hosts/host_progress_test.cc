#include "worker/lead/hosts/host_progress.h"

#include <functional>

#include "core/base/matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/testing/small_job.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

JobSpec PulledJob() {
  JobSpec job = SmallJob("fsdp=2", 3);
  job.slot_mode = SlotMode::kPulled;
  job.num_trainers = 2;
  job.residency = Residency::kBucket;
  return job;
}

HostProgress Says(uint64_t decided, uint64_t committed, const JobSpec& job, const Plan& plan) {
  HostProgress progress;
  progress.decided = decided;
  progress.committed = committed;
  progress.command.kind = CommandKind::kStep;
  progress.command.step = static_cast<int64_t>(decided);
  progress.learning_rates.assign(job.num_groups(), 0.25);
  progress.takers.assign(plan.bucketed() ? plan.buckets().size() : 0, 3);
  return progress;
}

TEST(HostProgress, GoesOverAsBytes) {
  const JobSpec job = PulledJob();
  const Plan plan = *Plan::Create(job);
  HostProgress says = Says(7, 6, job, plan);
  says.sources_step = 4;
  says.sources[2][1] = 1;
  says.seats.rounds = 8;
  says.seats.slots[2].digest = 99;
  std::vector<char> bytes(HostProgressBytes(job, plan));
  PackHostProgress(says, plan, bytes.data());
  const HostProgress heard = UnpackHostProgress(bytes.data(), job, plan);
  EXPECT_EQ(heard.decided, 7);
  EXPECT_EQ(heard.command.step, 7);
  EXPECT_EQ(heard.sources[2][1], 1);
  EXPECT_EQ(heard.learning_rates, says.learning_rates);
  EXPECT_EQ(heard.takers, says.takers);
  EXPECT_EQ(heard.seats.slots[2].digest, 99);
  EXPECT_EQ(heard.seats.rounds, 8);
}

TEST(HostProgress, WhoIsBehind_IsOneDecisionAndOneCommitBehind) {
  const JobSpec job = PulledJob();
  const Plan plan = *Plan::Create(job);
  int host = -1;
  const auto check = [&](uint64_t decided, uint64_t committed) {
    const std::vector<HostProgress> all = {Says(5, 4, job, plan), Says(decided, committed, job, plan)};
    return CheckProgress(all, job, plan, host);
  };
  for (const auto& [decided, committed] : {std::pair(5, 4), {5, 5}, {6, 5}, {4, 4}}) {
    EXPECT_OK(check(decided, committed)) << decided << " " << committed;
  }
  EXPECT_THAT(check(7, 6), StatusIs(Code::kInvalidArgument, HasSubstr("command 7 is decided on one host")));
  EXPECT_EQ(host, 1);
  EXPECT_THAT(check(6, 4), StatusIs(Code::kInvalidArgument, HasSubstr("command 6 is decided and 4 committed")));
  EXPECT_THAT(check(4, 5), StatusIs(Code::kInvalidArgument, HasSubstr("command 4 is decided and 5 committed")));
}

TEST(HostProgress, WhatNoHostCanSay_IsRefused) {
  const JobSpec job = PulledJob();
  const Plan plan = *Plan::Create(job);
  const struct {
    std::function<void(HostProgress&)> say;
    const char* words;
  } wrong[] = {{[](HostProgress& says) { says.committed_step = -2; }, "committed step -2"},
               {[](HostProgress& says) { says.command.kind = static_cast<CommandKind>(11); }, "command of kind 11"},
               {[](HostProgress& says) { says.command.kind = CommandKind::kDigest; }, "another command 5"},
               {[](HostProgress& says) { says.command.step = -2; }, "command of step -2"},
               {[](HostProgress& says) { says.command.publish = 9; }, "publication 9"},
               {[](HostProgress& says) { says.command.bucket = 1 << 20; }, "command of bucket"},
               {[](HostProgress& says) { says.command.partial = 1 << 10; }, "command of partial sum"},
               {[](HostProgress& says) { says.command.num_slots = 4; }, "command of 4 slots from 0 on"},
               {[](HostProgress& says) { says.command.first_slot = -1; }, "slots from -1 on"},
               {[](HostProgress& says) { says.command.parity = 2; }, "of parity 2"},
               {[](HostProgress& says) { says.command.groups = -1; }, "groups -1"},
               {[](HostProgress& says) { says.sources[1][1] = 2; }, "lies on host 2"},
               {[](HostProgress& says) { says.seats.slots[0].window = 4; }, "slot 0 has the word 4"},
               {[](HostProgress& says) { says.seats.slots[0].state = OfStep(5, 4); }, "slot 0"},
               {[](HostProgress& says) { says.seats.slots[0].tokens = -1; }, "slot 0 has the word -1"},
               {[](HostProgress& says) { says.seats.seats[1].windows[0] = OfStep(5, 3 << 8); }, "seat 1"},
               {[](HostProgress& says) { says.seats.seats[1].windows[0] = OfStep(5, 1 << 8 | 3); }, "seat 1"},
               {[](HostProgress& says) { says.seats.seats[1].host_of_window[1] = 2; }, "seat 1 has the word 2"},
               {[](HostProgress& says) { says.seats.partials[0] = OfStep(5, 2 << 8 | 2); }, "sum 0"}};
  for (const auto& [say, words] : wrong) {
    std::vector<HostProgress> all = {Says(5, 4, job, plan), Says(5, 4, job, plan)};
    int host = -1;
    EXPECT_OK(CheckProgress(all, job, plan, host));
    say(all[1]);
    EXPECT_THAT(CheckProgress(all, job, plan, host), StatusIs(Code::kInvalidArgument, HasSubstr(words)));
    EXPECT_EQ(host, 1);
  }
}

TEST(HostProgress, TheNewestWholeTableOfSeatsCounts) {
  const JobSpec job = PulledJob();
  const Plan plan = *Plan::Create(job);
  const auto newest = [&](std::vector<uint64_t> rounds, int mine, uint64_t committed_of_last = 4) {
    std::vector<HostProgress> all;
    for (const uint64_t of_host : rounds) {
      all.push_back(Says(5, 4, job, plan));
      all.back().seats.rounds = of_host;
    }
    all.back().committed = committed_of_last;
    const SeatTable* const seats = NewestSeats(all, mine);
    for (size_t h = 0; h < all.size(); ++h) {
      if (seats == &all[h].seats) return static_cast<int>(h);
    }
    return -1;
  };
  EXPECT_EQ(newest({8, 8}, 0), -1);
  EXPECT_EQ(newest({8, 10}, 0), 1);
  EXPECT_EQ(newest({8, 10}, 1), -1);
  EXPECT_EQ(newest({8, 9}, 0), -1);  // a lead was killed while it changed it
  EXPECT_EQ(newest({8, 9}, 1), 0);
  EXPECT_EQ(newest({9, 9}, 0), -1);
  EXPECT_EQ(newest({8, 8}, 0, 5), 1);  // and has merged what the command summed
}

}  // namespace
}  // namespace shardmesh
