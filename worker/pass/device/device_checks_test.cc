// The search for silent corruption on a device, its kernels walked on the CPU over the stand-in: memory that changes
// between two steps, arithmetic that errs once, and nothing else.
#include "worker/pass/device/device_checks.h"

#include <cmath>
#include <map>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/pass/device/testing/device_group.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class DeviceChecksTest : public ::testing::Test {
 protected:
  ~DeviceChecksTest() override {
    EXPECT_EQ(TheStandIn().Allocations(), 0);
    EXPECT_THAT(TheStandIn().Misuses(), ::testing::IsEmpty());
    TheStandIn().Reset();
  }
};

// Of formats with one part and with two, several chunks in a range and several ranges.
JobSpec CheckedJob(const std::string& mesh, int check_every) {
  JobSpec job = MixedJob(mesh, 2);
  job.check_every = check_every;
  job.parameters.push_back({"rows", {40, 300}, WeightFormat::kInt8Row});
  job.parameters.push_back({"split", {9'000}, WeightFormat::kBf16Plus8Sr, "", StateFormat::kDyn8});
  job.parameters.push_back({"long", {3, 20'001}, WeightFormat::kBf16Sr});
  job.parameters.push_back({"base", {61, 130}, WeightFormat::kBf16});
  job.parameters.back().frozen = true;
  return job;
}

Damage DamageOf(const DeviceGroup& group, int rank) {
  return Damage::Of(group.host.control()->members[rank].damage.load());
}

// What an undamaged job's second launches take: ranges of one chunk each, in the scratch.
struct Counter {
  explicit Counter(EmulatedKernels& kernels) {
    kernels.BehindSteps([this](const PassArgs& args) {
      for (int i = 0; i < args.num_ranges; ++i) {
        const auto& step = *reinterpret_cast<const PassStep*>(args.steps + args.ranges[i].step_at);
        (step.num_places == 0 ? drawn : stepped) += args.ranges[i].num_chunks;
      }
    });
  }
  std::atomic<int64_t> stepped{0}, drawn{0};
};

TEST_F(DeviceChecksTest, UndamagedJob_HasTheBitsOfProcessors_AndNothingIsFound) {
  for (const int check_every : {1, 3, 1000}) {
    JobSpec job = CheckedJob("ddp=2,fsdp=2", check_every);
    job.clip_norm = 0.01;
    TwoGroups both(job);
    ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
    Counter counter(both.gpu.kernels);
    for (int64_t step = 1; step <= 6; ++step) {
      ASSERT_NO_FATAL_FAILURE(both.RunStep(step));
      ASSERT_NO_FATAL_FAILURE(both.ExpectSame(std::to_string(check_every) + ", step " + std::to_string(step)));
    }
    for (int r = 0; r < both.gpu.plan.num_ranks(); ++r) EXPECT_EQ(DamageOf(both.gpu, r).what, Damage::kNone);
    const auto all = static_cast<double>(counter.stepped), drawn = static_cast<double>(counter.drawn);
    EXPECT_NEAR(drawn, all / check_every, check_every == 1 ? all / 50 : 4 * std::sqrt(all / check_every)) << all;
  }
}

// Where a device has a range, as the launch says.
struct Shard {
  explicit Shard(DeviceGroup& group) : cut(*ShardStorage::Cut(group.plan, 0, kDeviceCut)) {
    group.kernels.BehindSteps([this](const PassArgs& args) {
      for (int i = 0; i < args.num_ranges; ++i) {
        const auto& step = *reinterpret_cast<const PassStep*>(args.steps + args.ranges[i].step_at);
        if (step.num_places > 0) ranges[args.ranges[i].first_chunk] = args.ranges[i];
      }
    });
  }
  const ShardStorage cut;
  std::map<int32_t, PassRange> ranges;
};

// Every stream that there is, of a chunk of every range: with check_every of 1 the next step finds it, and says where.
TEST_F(DeviceChecksTest, FlippedBit_IsFoundAndNamed) {
  JobSpec job = CheckedJob("fsdp=1", 1);
  job.parameters = {{"rows", {40, 300}, WeightFormat::kInt8Row},
                    {"split", {9'000}, WeightFormat::kBf16Plus8Sr, "", StateFormat::kDyn8},
                    {"plain", {3, 6'001}, WeightFormat::kFp32}};
  TwoGroups both(job);
  ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
  Shard shard(both.gpu);
  ASSERT_NO_FATAL_FAILURE(both.RunStep(1));
  ASSERT_EQ(shard.cut.ranges().size(), shard.ranges.size());
  std::atomic<uint64_t>& word = both.gpu.host.control()->members[0].damage;
  int64_t step = 2;
  for (int range = 0; range < static_cast<int>(shard.ranges.size()); ++range) {
    const StorageRange& r = shard.cut.ranges()[range];
    for (int stream = 0; stream < kStreams; ++stream) {
      if (r.parts[stream].bytes == 0) continue;
      const auto chunk = step % r.num_chunks();
      const ChunkRun& run = shard.cut.runs(range)[shard.cut.first_run(range, chunk)];
      uint8_t* const at = std::next(shard.ranges.begin(), range)->second.streams[stream] +
                          r.parts[stream].BytesOf(r.Base(both.cpu.parity) + run.offset);
      uint8_t byte = 0;
      ASSERT_OK(both.gpu.host.device()->Copy(&byte, at, 1));
      byte ^= 4;
      ASSERT_OK(both.gpu.host.device()->Copy(at, &byte, 1));
      step += step + 1 == kSkippedStep ? 2 : 1;
      const Command command = both.CpuStep(step);
      const absl::Status status = both.gpu.Execute(command, both.cpu.seq).status();
      ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << status << " range " << range << " stream " << stream;
      const Damage damage = DamageOf(both.gpu, 0);
      EXPECT_EQ(damage.what, Damage::kMemory);
      EXPECT_EQ(damage.tensor, run.tensor);
      EXPECT_EQ(damage.element, run.first_element / 64 * 64);
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("changed between two steps"), HasSubstr(job.parameters[run.tensor].name),
                        HasSubstr(absl::StrCat("found in step ", step))));
      word.store(0);  // the next step begins with what this one left, and finds nothing else
    }
  }
  EXPECT_GT(step, 10);
}

// In the first result or in the second; in the lowest bit of one weight.
TEST_F(DeviceChecksTest, ArithmeticThatErrsOnce_IsFound) {
  for (const auto& [mesh, second] :
       {std::pair("fsdp=1", false), std::pair("fsdp=1", true), std::pair("ddp=2", false)}) {
    TwoGroups both(CheckedJob(mesh, 1));
    ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
    ASSERT_NO_FATAL_FAILURE(both.RunStep(1));
    std::atomic<bool> erred{false};
    both.gpu.kernels.BehindSteps([&erred, second = second](const PassArgs& args) {
      const PassRange& range = args.ranges[0];
      const auto& step = *reinterpret_cast<const PassStep*>(args.steps + range.step_at);
      if ((step.num_places == 0) != second || erred.exchange(true)) return;
      const PassChunkRun& run = args.runs[args.first_runs[range.first_chunk]];
      static_cast<uint8_t*>(fused_pass::StoredAt(step, range, 0, 1 - step.parity, run.offset).codes)[0] ^= 1;
    });
    const Command command = both.CpuStep(2);
    const absl::Status status = both.gpu.Execute(command, both.cpu.seq).status();
    ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    int found = 0;
    for (int r = 0; r < both.gpu.plan.num_ranks(); ++r) found += DamageOf(both.gpu, r).what == Damage::kArithmetic;
    EXPECT_EQ(found, 1);
    EXPECT_THAT(std::string(status.message()), HasSubstr("gave two results"));
  }
}

// What was stepped before cannot be checked when the step is executed again, and is not taken for damage.
TEST_F(DeviceChecksTest, StoppedAnywhere_AgainGivesTheSameBits_AndNothingIsFound) {
  TwoGroups both(CheckedJob("fsdp=2", 1));
  ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
  int64_t stops = 0;
  for (int64_t step = 1; step <= 3; ++step) {
    if (step == kSkippedStep) continue;
    const Command command = both.CpuStep(step);
    for (int64_t tiles = 3 + step; tiles < 600; tiles += 31) {
      both.gpu.kernels.StopAfter(tiles);
      if (both.gpu.Execute(command, both.cpu.seq).ok()) break;
      ++stops;
    }
    both.gpu.kernels.StopAfter(-1);
    ASSERT_OK(both.gpu.Execute(command, both.cpu.seq).status());
    ASSERT_NO_FATAL_FAILURE(both.ExpectSame("step " + std::to_string(step)));
  }
  EXPECT_GT(stops, 4);
}

// A step that never began is checked when it does; what the step before it left is guarded all the while.
TEST_F(DeviceChecksTest, AbortedStep_IsCheckedWhenItBegins) {
  TwoGroups both(CheckedJob("fsdp=1", 1));
  ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
  ASSERT_NO_FATAL_FAILURE(both.RunStep(1));
  const Command command = both.CpuStep(2);
  both.gpu.host.control()->abort.store(AbortWord(AbortReason::kGone, 1, 0));
  EXPECT_EQ(both.gpu.Execute(command, both.cpu.seq).status().code(), absl::StatusCode::kAborted);
  both.gpu.host.control()->abort.store(0);
  Counter counter(both.gpu.kernels);
  ASSERT_OK(both.gpu.Execute(command, both.cpu.seq).status());
  EXPECT_GT(counter.drawn, counter.stepped * 9 / 10);
  ASSERT_NO_FATAL_FAILURE(both.ExpectSame("after it"));
}

// Stopped in the middle, then aborted: the abort changed nothing, but what was before it did.
TEST_F(DeviceChecksTest, StepThatWasStoppedAndThenAborted_IsNotTakenForDamage) {
  TwoGroups both(CheckedJob("fsdp=1", 1));
  ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
  ASSERT_NO_FATAL_FAILURE(both.RunStep(1));
  const Command command = both.CpuStep(2);
  both.gpu.kernels.StopAfter(50);
  EXPECT_EQ(both.gpu.Execute(command, both.cpu.seq).status().code(), absl::StatusCode::kUnavailable);
  both.gpu.kernels.StopAfter(-1);
  both.gpu.host.control()->abort.store(AbortWord(AbortReason::kGone, 1, 0));
  EXPECT_EQ(both.gpu.Execute(command, both.cpu.seq).status().code(), absl::StatusCode::kAborted);
  both.gpu.host.control()->abort.store(0);
  ASSERT_OK(both.gpu.Execute(command, both.cpu.seq).status());
  ASSERT_NO_FATAL_FAILURE(both.ExpectSame("after both"));
}

// A bucket whose chunks are long (whole rows of int8_row) takes no more room than its own: the room is two n-th parts of
// each bucket, and here a chunk of the long ones.
TEST_F(DeviceChecksTest, ABucketOfLongChunks_TakesRoomForItselfAlone) {
  JobSpec job = MixedJob("fsdp=1", 1);
  job.parameters = {{"rows", {3, 40'001}, WeightFormat::kInt8Row}, {"many", {1'000'003}, WeightFormat::kBf16Sr}};
  const auto bytes = [&](int check_every) {
    job.check_every = check_every;
    return DeviceGroup(job).passes[0]->shard_bytes();
  };
  const int64_t plain = bytes(0), checked = bytes(64), all = bytes(1);
  EXPECT_GT(checked, plain);
  EXPECT_LT(checked - plain, int64_t{8} << 20);
  EXPECT_GT(all - plain, plain);
}

// Weights that are placed anew are no memory that changed.
TEST_F(DeviceChecksTest, WeightsThatArePlacedAgain_HaveNoGuards) {
  TwoGroups both(CheckedJob("fsdp=1", 1));
  for (const int64_t step : {1, 5}) {
    ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
    for (const int64_t now : {step, step + 1}) ASSERT_NO_FATAL_FAILURE(both.RunStep(now));
    ASSERT_NO_FATAL_FAILURE(both.ExpectSame("after step " + std::to_string(step + 1)));
  }
}

TEST_F(DeviceChecksTest, MostDrawn_IsRoomForAnyDraw_AndNeverMoreThanAll) {
  EXPECT_EQ(DeviceChecks::MostDrawn(0, 1), 0);
  EXPECT_EQ(DeviceChecks::MostDrawn(1000, 1), 1000);
  EXPECT_EQ(DeviceChecks::MostDrawn(5, 1000), 2);
  EXPECT_EQ(DeviceChecks::MostDrawn(1'000'000, 1000), 1000 + 127 + 1);
}

}  // namespace
}  // namespace shardmesh
