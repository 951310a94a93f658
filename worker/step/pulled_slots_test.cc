#include "worker/step/pulled_slots.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "worker/testing/small_job.h"

namespace shardmesh {
namespace {

using Grant = PulledSlots::Grant;
using Result = PulledSlots::Result;

constexpr int64_t kTimeoutNanos = 5'000'000;

JobSpec PulledJob(int slots, int trainers) {
  JobSpec job = SmallJob("fsdp=2", slots);
  job.slot_mode = SlotMode::kPulled;
  job.num_trainers = trainers;
  job.slot_timeout_ms = 5;
  return job;
}

// The words of one step, with a trainer in each seat.
struct Words : TestHost {
  Words(int slots, int trainers) : TestHost(PulledJob(slots, trainers)) {
    for (int seat = 0; seat < trainers; ++seat) Sit(seat, 100 + seat);
  }
  void Sit(int seat, uint64_t session) {
    host.control()->slots[seat].holder.store(session);
    table.Reopen(now);
  }
  int Take(int seat) {
    const std::optional<Grant> grant = table.Take(seat, now);
    return grant ? grant->slot : -1;
  }
  // "0+4" for a merge of slots 0 to 3; "" for none. It is made.
  std::string Merge() {
    const std::optional<SlotRange> next = table.NextMerge();
    if (!next) return "";
    table.Merged(*next, table.FreePartial());
    return absl::StrCat(next->first, "+", next->count);
  }
  std::string MergeAll() {
    std::string all;
    for (std::string merged; !(merged = Merge()).empty();) absl::StrAppend(&all, all.empty() ? "" : " ", merged);
    return all;
  }
  void Wait(int seat, bool waits = true) { host.control()->pull.seats[seat].waits.store(waits ? 1 : 0); }

  int64_t now = 1'000;
  PulledSlots table{host.control(), job, plan, 1};
};

TEST(PulledSlotsTest, SlotsAreTakenInTheirOrder_AndMergedAlongTheTree) {
  Words words(5, 2);
  EXPECT_EQ(words.Take(0), 0);
  EXPECT_EQ(words.Take(1), 1);
  EXPECT_EQ(words.Take(1), 1);  // repeated: the one that it has
  EXPECT_EQ(words.table.Finish(1, 1, 11, 0), Result::kAccepted);
  EXPECT_EQ(words.MergeAll(), "");
  EXPECT_EQ(words.Take(1), 2);
  EXPECT_EQ(words.table.Finish(0, 0, 10, 0), Result::kAccepted);
  EXPECT_EQ(words.MergeAll(), "0+2");
  EXPECT_EQ(words.Take(0), 3);
  EXPECT_EQ(words.table.Finish(1, 2, 12, 0), Result::kAccepted);
  EXPECT_EQ(words.table.Finish(0, 3, 13, 0), Result::kAccepted);
  EXPECT_EQ(words.MergeAll(), "0+4");
  EXPECT_EQ(words.Take(0), 4);
  EXPECT_EQ(words.Take(1), -1);
  EXPECT_EQ(words.table.Root(), -1);
  EXPECT_EQ(words.table.Finish(0, 4, 14, 0), Result::kAccepted);
  EXPECT_EQ(words.MergeAll(), "0+5");
  EXPECT_GE(words.table.Root(), 0);
  EXPECT_EQ(words.table.Live(), 1);
  const PulledSlots next(words.host.control(), words.job, words.plan, 2);  // of the next step nothing is there
  EXPECT_EQ(next.Root(), -1);
  EXPECT_EQ(next.Live(), 0);
  EXPECT_EQ(next.WaitsFor(), "open slots: 0,1,2,3,4");
}

TEST(PulledSlotsTest, OneSlot_BecomesASum) {
  Words words(1, 1);
  EXPECT_EQ(words.Take(0), 0);
  EXPECT_EQ(words.table.Finish(0, 0, 1, 0), Result::kAccepted);
  EXPECT_EQ(words.table.Root(), -1);
  EXPECT_EQ(words.MergeAll(), "0+1");
  EXPECT_EQ(words.table.Root(), 0);
}

TEST(PulledSlotsTest, ATrainerThatWaitsForAWindow_HasItsResultSummed) {
  Words words(8, 2);
  EXPECT_EQ(words.Take(0), 0);
  EXPECT_EQ(words.Take(1), 1);
  for (const int slot : {2, 4}) {  // both windows of seat 1 hold what has no neighbour yet
    EXPECT_EQ(words.table.Finish(1, slot == 2 ? 1 : 2, 7, 0), Result::kAccepted);
    EXPECT_EQ(words.Take(1), slot == 2 ? 2 : -1);
  }
  EXPECT_EQ(words.Merge(), "");
  words.Wait(1);
  EXPECT_EQ(words.Merge(), "1+1");
  EXPECT_EQ(words.Take(1), 3);
}

TEST(PulledSlotsTest, LateAndDeadTrainers_GiveTheirSlotsBack) {
  Words words(3, 3);
  EXPECT_EQ(words.Take(0), 0);
  words.now += kTimeoutNanos - 1;
  EXPECT_EQ(words.table.Reopen(words.now), 0);
  EXPECT_EQ(words.Take(1), 1);
  words.now += 1;
  EXPECT_EQ(words.table.Reopen(words.now), 1);  // that of seat 0 alone
  EXPECT_EQ(words.Take(2), 0);
  words.Sit(1, 555);  // its trainer is another one
  EXPECT_EQ(words.Take(1), 1);
  EXPECT_EQ(words.table.Finish(2, 0, 5, 0), Result::kAccepted);
  EXPECT_TRUE(words.table.Has(0, 0));
  EXPECT_EQ(words.table.Finish(0, 0, 5, 0), Result::kSame);
  EXPECT_FALSE(words.table.Has(0, 0));
  EXPECT_FALSE(words.table.Has(0, 2));
  EXPECT_EQ(words.Take(0), 2);
}

TEST(PulledSlotsTest, ATrainerThatAsksInsteadOfFinishing_IsNotSentBackToAFinishedSlot) {
  Words words(3, 2);
  EXPECT_EQ(words.Take(0), 0);
  words.now += kTimeoutNanos;
  words.table.Reopen(words.now);
  EXPECT_EQ(words.Take(1), 0);
  EXPECT_EQ(words.Take(0), 0);  // nobody has finished it
  EXPECT_EQ(words.table.Finish(1, 0, 5, 0), Result::kAccepted);
  EXPECT_EQ(words.Take(0), 1);
  EXPECT_EQ(words.table.Live(), 2);
}

// Two of three hang. The third gets as far as the bound lets it; when the two are late it goes on, and ends the step.
TEST(PulledSlotsTest, TrainersThatHang_DoNotHoldTheOthersBeyondTheirTime) {
  Words words(kMaxSlots, 3);
  EXPECT_EQ(words.Take(0), 0);
  EXPECT_EQ(words.Take(1), 1);
  const auto work = [&] {
    for (int slot = words.Take(2); slot >= 0; slot = words.Take(2)) {
      EXPECT_EQ(words.table.Finish(2, slot, 1, 0), Result::kAccepted);
      words.Wait(2);
      words.MergeAll();
    }
  };
  work();
  EXPECT_NE(words.table.WaitsFor().find("open slots: "), std::string::npos);
  EXPECT_EQ(words.table.Live(), words.plan.slots().live_gradients());
  words.now += kTimeoutNanos;
  EXPECT_EQ(words.table.Reopen(words.now), 2);
  work();
  EXPECT_GE(words.table.Root(), 0) << words.table.WaitsFor();
}

TEST(PulledSlotsTest, ASecondResult_IsCompared) {
  Words words(2, 2);
  for (const uint64_t second : {5, 6}) {
    PulledSlots table(words.host.control(), words.job, words.plan, static_cast<int64_t>(second));
    EXPECT_EQ(table.Take(0, words.now)->slot, 0);
    table.Reopen(words.now + kTimeoutNanos);
    EXPECT_EQ(table.Take(1, words.now)->slot, 0);
    EXPECT_EQ(table.Finish(1, 0, 5, 0), Result::kAccepted);
    EXPECT_EQ(table.Finish(0, 0, second, 0), second == 5 ? Result::kSame : Result::kDiffers);
    EXPECT_EQ(words.host.control()->pull.differing.load(), second == 5 ? 0 : 1);
    EXPECT_EQ(table.Finish(1, 0, 5, 0), Result::kAccepted);  // repeated
  }
}

TEST(PulledSlotsTest, WhoseResultCounted_IsKnownBehindTheStep) {
  Words words(2, 2);
  EXPECT_EQ(words.Take(0), 0);
  EXPECT_EQ(words.table.Finish(0, 0, 5, 0), Result::kAccepted);
  EXPECT_TRUE(words.table.Counted(0, 0, 5));
  EXPECT_FALSE(words.table.Counted(0, 0, 6));
  EXPECT_FALSE(words.table.Counted(1, 0, 5));
  const PulledSlots next(words.host.control(), words.job, words.plan, 2);
  EXPECT_FALSE(next.Counted(0, 0, 5));
}

// The lead's last incarnation ended when a trainer had a slot that did not count as taken: no other trainer gets it,
// unless the first one is late.
TEST(PulledSlotsTest, AHalfTakenSlot_IsItsTrainers) {
  Words words(2, 2);
  EXPECT_EQ(words.Take(0), 0);
  const int64_t open = OfStep(1, static_cast<int>(SlotState::kOpen));
  words.host.control()->pull.slots[0].state.store(open);
  words.table.EndTakes(words.now);
  EXPECT_EQ(words.Take(1), 1);
  EXPECT_EQ(words.Take(0), 0);
  words.host.control()->pull.slots[0].state.store(open);
  words.now += kTimeoutNanos;
  words.table.EndTakes(words.now);
  EXPECT_EQ(words.table.Reopen(words.now), 1);  // slot 1
  EXPECT_EQ(words.table.Finish(1, 1, 5, 0), Result::kAccepted);
  EXPECT_EQ(words.Take(1), 0);
}

// What the lead's next incarnation does again.
TEST(PulledSlotsTest, FinishAndMerged_CanBeRepeatedFromWhereverTheyEnded) {
  Words words(2, 2);
  PulledWords& control = words.host.control()->pull;
  EXPECT_EQ(words.Take(0), 0);
  const int64_t writing = control.seats[0].windows[0].load();
  EXPECT_EQ(words.table.Finish(0, 0, 5, 0), Result::kAccepted);
  control.seats[0].windows[0].store(writing);  // the last store was not made
  words.Sit(0, 999);                        // and the trainer is gone: its result counts
  const std::optional<Grant> next = words.table.Take(0, words.now);
  ASSERT_TRUE(next.has_value());
  EXPECT_EQ(next->slot, 1);
  EXPECT_EQ(next->window, 1);  // the result lies in the other one
  EXPECT_EQ(words.table.Finish(0, 1, 6, 0), Result::kAccepted);
  const int partial = words.table.FreePartial();
  ASSERT_TRUE(words.table.NextMerge().has_value());
  words.table.Merged({0, 2}, partial);
  words.table.Merged({0, 2}, partial);
  EXPECT_EQ(words.table.Root(), partial);
  EXPECT_EQ(words.table.Live(), 1);
}

// Whatever the trainers do, the sum is complete at the end, the bound on what is alive holds, and there is room for
// every sum.
TEST(PulledSlotsTest, RandomTrainers_StayWithinTheBound) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 random(seed);
  const auto draw = [&](int from, int to) { return std::uniform_int_distribution<int>(from, to)(random); };
  for (int round = 0; round < 200; ++round) {
    const int slots = draw(1, kMaxSlots), trainers = draw(1, 9);
    Words words(slots, trainers);
    std::vector<int> has(trainers, -1);
    uint64_t session = 1'000;
    while (words.table.Root() < 0) {
      const int seat = draw(0, trainers - 1);
      if (draw(0, 60) == 0) {
        words.Sit(seat, ++session);
        has[seat] = -1;
      } else if (has[seat] < 0) {
        has[seat] = words.Take(seat);
        words.Wait(seat, has[seat] < 0);
      } else {
        words.table.Finish(seat, has[seat], 1, 0);
        has[seat] = -1;
      }
      words.now += draw(0, 2) == 0 ? kTimeoutNanos / 20 : 0;
      words.table.Reopen(words.now);
      ASSERT_LE(words.table.Live(), words.plan.slots().live_gradients() + 1);
      while (words.table.NextMerge().has_value()) {
        ASSERT_GE(words.table.FreePartial(), 0);
        words.Merge();
      }
    }
  }
}

}  // namespace
}  // namespace shardmesh
