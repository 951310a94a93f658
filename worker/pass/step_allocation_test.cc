// A step allocates no memory: neither the passes, whatever the formats, nor the decision and the commit. Counted in the
// global operator new, which this program replaces.
#include <atomic>
#include <cstdlib>
#include <new>

#include "worker/pass/pass.h"
#include "worker/testing/decide_next.h"
#include "worker/testing/numerics_oracle.h"
#include "worker/testing/pass_group.h"
#include "worker/testing/step_fixture.h"

namespace {
std::atomic<int64_t> allocations{0};

void* Allocate(size_t bytes, size_t alignment) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  void* const memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) std::abort();
  return memory;
}
}  // namespace

void* operator new(size_t bytes) { return Allocate(bytes, alignof(std::max_align_t)); }
void* operator new(size_t bytes, std::align_val_t alignment) { return Allocate(bytes, static_cast<size_t>(alignment)); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes, alignof(std::max_align_t)); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace shardmesh {
namespace {

TEST(StepAllocationTest, TheCounterCounts) {
  const int64_t before = allocations.load();
  std::vector<char> retained(1000);
  EXPECT_GT(allocations.load(), before) << static_cast<int>(retained[7]);
}

// Every format of states, weights that need draws, replicas, threads, publications and the norm.
TEST(StepAllocationTest, Passes_AllocateNothing) {
  using G = GatherFormat;
  for (const auto& [states, gather] : {std::pair(StateFormat::kFp32, G::kStored),
                                       {StateFormat::kBf16Sr, G::kFp8Tensor},
                                       {StateFormat::kDyn8, G::kFp8Row},
                                       {StateFormat::kDyn4, G::kFp8Block},
                                       {StateFormat::kFp8, G::kMx8},
                                       {StateFormat::kFp8x32, G::kInt8Row}}) {
    JobSpec job = MixedJob("ddp=2,fsdp=2", 3);
    job.clip_norm = 1;
    for (ParameterSpec& parameter : job.parameters) parameter.states = states;
    job.parameters.push_back({"quantized", {5, 9600}, WeightFormat::kBf16Sr, "", states, gather});
    PassGroup group(job, /*threads=*/2);
    group.PlaceWeights();
    for (const int64_t step : {1, 2, 4}) {  // the third is skipped
      group.WriteGradients(step);
      Command command = group.StepCommand(step);
      Command norm = command;
      norm.kind = CommandKind::kNorm;
      const int64_t before = allocations.load();
      group.Execute(norm);
      command.clip = ClipFactor(job.clip_norm, GradientNorm(job, group.plan, SquareSums(group.host.control())));
      group.Execute(command);
      group.parity = 1 - group.parity;
      group.Gather(command);
      EXPECT_EQ(allocations.load(), before)
          << StateFormatName(states) << ", " << GatherFormatName(gather) << ", step " << step;
    }
  }
}

TEST(StepAllocationTest, Muon_AllocatesNothing) {
  JobSpec job = SmallJob("ddp=2,fsdp=2", 3);
  job.more_groups = {OptimizerHyper::Defaults(OptimizerKind::kMuon)};
  for (const int64_t rows : {30, 97, 250}) {
    const ParameterSpec matrix{"m" + std::to_string(rows), {rows, 64}, WeightFormat::kBf16Sr};
    job.parameters.push_back(matrix);
    job.parameters.back().group = 1;
  }
  PassGroup group(job, /*threads=*/2);
  group.PlaceWeights();
  for (const int64_t step : {1, 2}) {
    group.WriteGradients(step);
    const Command command = group.StepCommand(step);
    const int64_t before = allocations.load();
    group.Execute(command);
    EXPECT_EQ(allocations.load(), before) << "step " << step;
    group.parity = 1 - group.parity;
  }
}

// But for the memory of a thread's longest rows, which its first step takes.
TEST(StepAllocationTest, Int8Rows_AllocateInTheFirstStepAlone) {
  JobSpec job = SmallJob("fsdp=1", 2);
  job.parameters = {{"w", {300, 96}, WeightFormat::kInt8Row, "", StateFormat::kDyn8},
                    {"b", {9001}, WeightFormat::kInt8Row},
                    {"quantized", {50, 960}, WeightFormat::kInt8Row, "", StateFormat::kFp32, GatherFormat::kFp8Tensor}};
  PassGroup group(job, /*threads=*/1);
  group.PlaceWeights();
  for (const int64_t step : {1, 2, 4}) {
    group.WriteGradients(step);
    const Command command = group.StepCommand(step);
    const int64_t before = allocations.load();
    group.Execute(command);
    group.parity = 1 - group.parity;
    group.Gather(command);
    EXPECT_TRUE(step == 1 || allocations.load() == before) << "step " << step;
  }
}

// Nor do the reduction of a bucket, a step from the sums and a bucket's way into the window and out of it.
TEST(StepAllocationTest, Buckets_AllocateNothing) {
  JobSpec job = MixedJob("ddp=2,fsdp=2", 3);
  job.clip_norm = 1;
  job.residency = Residency::kBucket;
  job.parameters.push_back(
      {"quantized", {5, 9600}, WeightFormat::kBf16Sr, "", StateFormat::kDyn8, GatherFormat::kFp8Row});
  PassGroup group(job, /*threads=*/2);
  group.PlaceWeights();
  for (const int64_t step : {1, 2}) {
    group.WriteGradients(step);
    const Command command = group.StepCommand(step);
    const int64_t before = allocations.load();
    group.HoldAll();
    group.Reduce();
    group.Execute(command);
    group.parity = 1 - group.parity;
    group.Gather(command);
    for (int b = 0; b < static_cast<int>(group.plan.buckets().size()); ++b) group.Drop(b);
    EXPECT_EQ(allocations.load(), before) << "step " << step;
  }
}

using StepAllocationProtocolTest = StepFixture;

TEST_F(StepAllocationProtocolTest, DecisionAndCommit_AllocateNothing) {
  PlaceWeights();
  for (const int64_t step : {1, 2}) {
    for (int slot = 0; slot < 3; ++slot) GradientShards(slot, step);
    ASSERT_OK(Declare({Slot(0), Slot(1), Slot(2)}, step));
    const int64_t before = allocations.load();
    const bool decided = DecideNext(protocol, plan);
    for (int r = 0; r < plan.num_ranks(); ++r) protocol.commands().Done(Rank(r), protocol.decided());
    const bool done = protocol.commands().AllDone();
    Lead::CommitNewest(protocol);
    EXPECT_EQ(allocations.load(), before) << "step " << step;
    EXPECT_TRUE(decided && done);
    EXPECT_EQ(protocol.committed_step(), Step(step));
  }
}

JobSpec BucketJob() {
  JobSpec job = SmallJob("ddp=2,fsdp=2", 3);
  job.residency = Residency::kBucket;
  return job;
}

struct StepAllocationBucketTest : StepFixture {
  StepAllocationBucketTest() : StepFixture(BucketJob()) {}
};

TEST_F(StepAllocationBucketTest, DeclaringAcquiringAndDeciding_AllocateNothing) {
  PlaceWeights();
  const std::vector<Slot> slots = {Slot(0), Slot(1), Slot(2)};
  BucketDeclaration bucket{slots, Step(1), 0, {}, /*in_place=*/true};
  const int64_t before = allocations.load();
  bool good = protocol.buckets().Acquire(0).ok() && protocol.buckets().Declare(bucket).ok();
  for (const CommandKind kind : {CommandKind::kGatherBucket, CommandKind::kReduceBucket}) {
    good = good && DecideNext(protocol, plan) && protocol.command().kind == kind;
    for (int r = 0; r < plan.num_ranks(); ++r) protocol.commands().Done(Rank(r), protocol.decided());
    Lead::CommitNewest(protocol);
  }
  good = good && protocol.buckets().MayGoOn(slots, Step(1));
  protocol.buckets().Release(0);
  int dropped = 0;
  protocol.buckets().DropUnused([&](int) { ++dropped; });
  EXPECT_EQ(allocations.load(), before);
  EXPECT_TRUE(good);
  EXPECT_EQ(dropped, 1);
}

}  // namespace
}  // namespace shardmesh
