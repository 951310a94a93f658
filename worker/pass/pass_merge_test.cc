// Slots that are summed as they come, in any order, and a step from the sum: what a step of all slots gives.
#include <random>

#include "absl/strings/str_cat.h"
#include "worker/step/pulled_slots.h"
#include "worker/testing/pass_group.h"

namespace shardmesh {
namespace {

constexpr int64_t kSteps = 4;

// Everything that a sum of some slots has, on all workers.
std::vector<float> SumOf(const PassGroup& group, int partial) {
  std::vector<float> values;
  for (int r = 0; r < group.plan.num_ranks(); ++r) {
    const int shard = group.plan.PlaceOf(Rank(r)).shard;
    for (int b = 0; b < static_cast<int>(group.plan.buckets().size()); ++b) {
      const Bucket& bucket = group.plan.buckets()[b];
      if (bucket.frozen) continue;
      const float* const sum = group.sums[r]->At(b, bucket.begin(shard), partial);
      values.insert(values.end(), sum, sum + bucket.size(shard));
    }
  }
  return values;
}

// One step of a job whose trainers take, write and finish slots in an order that is drawn.
struct PulledStep {
  PulledStep(PassGroup& group, int64_t step, std::mt19937& random)
      : group(group), table(group.host.control(), group.job, group.plan, step), step(step), random(random) {
    for (int seat = 0; seat < group.job.num_trainers; ++seat) group.host.control()->slots[seat].holder.store(1 + seat);
    table.Reopen(0);
  }

  void Run() {
    std::vector<int> has(group.job.num_trainers, -1);
    while (table.Root() < 0) {
      const int seat = static_cast<int>(random() % has.size());
      std::atomic<int32_t>& waits = group.host.control()->pull.seats[seat].waits;
      if (has[seat] >= 0) {
        EXPECT_EQ(table.Finish(seat, has[seat], 1, 0), PulledSlots::Result::kAccepted);
        has[seat] = -1;
      } else if (const auto grant = table.Take(seat, 0); grant.has_value()) {
        has[seat] = grant->slot;
        group.WriteSlot(grant->slot, step, const_cast<char*>(group.host.window_of(seat, grant->window)));
      }
      waits.store(has[seat] < 0);
      Merge();
    }
    Command command = group.StepCommand(step);
    command.partial = table.Root();
    group.Execute(command);
    GiveBack(command);
    if (!command.apply) return;
    group.parity = 1 - group.parity;
    group.Gather(command);
  }

  // Twice, as in the next incarnation of a worker that was killed behind it.
  void Merge() {
    while (const std::optional<SlotRange> next = table.NextMerge()) {
      Command command;
      command.kind = CommandKind::kMerge;
      command.step = step;
      command.parity = group.parity;
      command.first_slot = next->first;
      command.num_slots = next->count;
      command.partial = table.FreePartial();
      ASSERT_GE(command.partial, 0);
      group.Execute(command);
      const std::vector<float> sum = SumOf(group, command.partial);
      group.Execute(command);
      ASSERT_EQ(SumOf(group, command.partial), sum);
      GiveBack(command);
      table.Merged(*next, command.partial);
      ++merges;
    }
  }

  // Twice, too. Pages of results go with the sum that has them.
  void GiveBack(const Command& command) {
    const int64_t before = group.host.Resident().slots;
    const Frontier sums = table.Sums();
    ASSERT_OK(group.passes[0]->GiveBackGradients(command));
    ASSERT_OK(group.passes[0]->GiveBackGradients(command));
    int64_t results = 0;
    for (int s = 0; s < command.num_slots; ++s) results += sums.source[command.first_slot + s] < 0;
    const int64_t given = results * group.plan.gradient_window_bytes();
    if (command.kind != CommandKind::kMerge) return;
    EXPECT_EQ(group.host.Resident().slots, group.plan.bucketed() ? before - given : before);
  }

  PassGroup& group;
  PulledSlots table;
  const int64_t step;
  std::mt19937& random;
  int merges = 0;
};

struct Case {
  std::string mesh;
  int slots, trainers, threads;
  Format gradients;
};

class PassMerge : public ::testing::TestWithParam<Case> {};

TEST_P(PassMerge, AnyOrder_GivesTheBitsOfAllSlotsAtOnce) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 random(seed);
  JobSpec job = MixedJob(GetParam().mesh, GetParam().slots);
  job.gradient_format = GetParam().gradients;
  job.slot_mode = SlotMode::kPulled;
  job.num_trainers = GetParam().trainers;
  PassGroup group(job, GetParam().threads);
  int looks = 0;
  group.passes[0]->WhileMerging([&] { ++looks; });
  group.PlaceWeights();
  TrainingOracle oracle(job);
  for (int64_t step = 1; step <= kSteps; ++step) {
    PulledStep pulled(group, step, random);
    pulled.Run();
    EXPECT_GE(pulled.merges, 1);
    if (step != kSkippedStep) oracle.RunStep(step);
    ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(group, oracle, absl::StrCat("step ", step)));
  }
  EXPECT_TRUE(looks > 0 || GetParam().threads > 1);  // another thread may do it all
}

// And what was written of a result that never counts goes with the step.
TEST(PassMergeTest, WithBuckets_TheSameBits_AndNoPagesOfWhatIsSummed) {
  std::mt19937 random(17);
  JobSpec job = MixedJob("ddp=2,fsdp=2", 7);
  job.slot_mode = SlotMode::kPulled;
  job.num_trainers = 2;
  job.residency = Residency::kBucket;
  PassGroup group(job, 2);
  group.PlaceWeights();
  TrainingOracle oracle(job);
  for (int64_t step = 1; step <= kSteps; ++step) {
    PulledStep pulled(group, step, random);
    group.WriteSlot(0, step, const_cast<char*>(group.host.window_of(1, 1)));  // a late trainer
    pulled.Run();
    EXPECT_EQ(group.host.Resident().slots, 0);
    if (step != kSkippedStep) oracle.RunStep(step);
    group.HoldAll();
    ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(group, oracle, absl::StrCat("step ", step)));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, PassMerge,
    ::testing::Values(Case{"fsdp=1", 1, 1, 1, Format::kFp32}, Case{"fsdp=2", 2, 1, 1, Format::kBf16},
                      Case{"fsdp=2", 11, 3, 1, Format::kBf16}, Case{"ddp=2,fsdp=2", 7, 2, 2, Format::kFp32},
                      Case{"fsdp=3", 64, 5, 1, Format::kBf16}, Case{"fsdp=1", kMaxSlots, 4, 2, Format::kFp32}));

}  // namespace
}  // namespace shardmesh
