// The pass on a CUDA device, with its own kernels and the driver itself: the bits of the pass on processors; skipped
// where there is no device, or in a build without CUDA.
#include <iostream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/pass/device/testing/device_group.h"

namespace shardmesh {
namespace {

TestMachine Machine() { return {BuiltPassKernels(), 0, ""}; }

#define SKIP_WITHOUT_DEVICE()                                                      \
  if (const auto device = WorkerDevice::Open(0, BuiltPassKernels()); !device.ok()) \
  GTEST_SKIP() << "SKIPPED: " << device.status()

void ExpectTrainsAlike(const JobSpec& job, int steps, const std::string& what) {
  TwoGroups both(job, {}, Machine());
  ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
  ASSERT_NO_FATAL_FAILURE(both.ExpectSame(what + ", initial weights"));
  for (int64_t step = 1; step <= steps; ++step) {
    ASSERT_NO_FATAL_FAILURE(both.RunStep(step));
    ASSERT_NO_FATAL_FAILURE(both.ExpectSame(what + ", step " + std::to_string(step)));
  }
}

TEST(DevicePassGpuTest, OneTwoAndFourWorkersOfADevice_TrainToTheBitsOfProcessors) {
  SKIP_WITHOUT_DEVICE();
  for (const char* mesh : {"fsdp=1", "fsdp=2", "ddp=2,fsdp=2", "fsdp=4"}) {
    JobSpec job = MixedJob(mesh, 3);
    job.clip_norm = 0.01;
    ASSERT_NO_FATAL_FAILURE(ExpectTrainsAlike(job, 4, mesh));
  }
}

TEST(DevicePassGpuTest, FormatsOfWarpsAndOfBlocks_TrainToTheBitsOfProcessors) {
  SKIP_WITHOUT_DEVICE();
  for (const OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kLion}) {
    for (const StateFormat states : {StateFormat::kBf16Sr, StateFormat::kDyn8, StateFormat::kFp8x32}) {
      JobSpec job = MixedJob("fsdp=2", 2);
      job.optimizer = OptimizerHyper::Defaults(kind);
      const WeightFormat weights[] = {WeightFormat::kBf16Sr, WeightFormat::kBf16Plus8Sr, WeightFormat::kInt8Row};
      for (size_t i = 0; i < job.parameters.size(); ++i) {
        if (!job.parameters[i].tied_to.empty()) continue;
        job.parameters[i].states = states;
        job.parameters[i].format = weights[i % 3];
      }
      job.parameters[5].states = states;
      job.parameters[5].format = job.parameters[0].format;
      ASSERT_NO_FATAL_FAILURE(ExpectTrainsAlike(job, 3, std::string(StateFormatName(states))));
    }
  }
}

TEST(DevicePassGpuTest, ManyRanges_TrainToTheBitsOfProcessors) {
  SKIP_WITHOUT_DEVICE();
  JobSpec job = SmallJob("fsdp=1", 1);
  job.gradient_format = Format::kBf16;
  job.bucket_elements = 4 << 20;
  job.parameters.push_back({"long", {3000, 1001}, WeightFormat::kBf16Sr});
  ExpectTrainsAlike(job, 2, "many ranges");
}

TEST(DevicePassGpuTest, ChecksAndSecondLooks_ChangeNoBitAndFindNothing) {
  SKIP_WITHOUT_DEVICE();
  JobSpec job = MixedJob("ddp=2,fsdp=2", 2);
  job.check_every = 1;
  job.parameters.push_back({"rows", {40, 300}, WeightFormat::kInt8Row});
  TwoGroups both(job, {}, Machine());
  both.gpu.host.control()->looks_again.store(1);
  ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
  for (const int64_t step : {1, 2, 4}) {
    ASSERT_NO_FATAL_FAILURE(both.RunStep(step));
    ASSERT_NO_FATAL_FAILURE(both.ExpectSame("step " + std::to_string(step)));
  }
}

TEST(DevicePassGpuTest, GateAbortedByTheHost_ChangesNoByte) {
  SKIP_WITHOUT_DEVICE();
  DevicePassOptions options;
  options.gate_timeout = absl::Seconds(30);
  TwoGroups both(MixedJob("fsdp=1", 2), options, Machine());
  ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
  const std::vector<char> window = both.gpu.Window();
  const Command command = both.CpuStep(1);
  ControlBlock& control = *both.gpu.host.control();
  control.decided.store(both.cpu.seq - 1);
  absl::Status status;
  std::thread waiter([&] { status = both.gpu.passes[0]->Run(command, both.cpu.seq, nullptr, nullptr).status(); });
  EXPECT_EQ(both.gpu.Window(), window) << "copies go on beside a gate that waits";
  control.abort.store(AbortWord(AbortReason::kLeft, 0, 0));
  waiter.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_EQ(both.gpu.Window(), window);
  control.abort.store(0);
  ASSERT_OK(both.gpu.Execute(command, both.cpu.seq).status());
  both.ExpectSame("after it");
}

TEST(DevicePassGpuTest, GateThatNobodyOpens_IsLateAndChangesNoByte) {
  SKIP_WITHOUT_DEVICE();
  DevicePassOptions options;
  options.gate_timeout = absl::Milliseconds(50);
  TwoGroups both(MixedJob("fsdp=1", 2), options, Machine());
  ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
  const std::vector<char> window = both.gpu.Window();
  const Command command = both.CpuStep(1);
  both.gpu.host.control()->decided.store(both.cpu.seq - 1);
  EXPECT_EQ(both.gpu.passes[0]->Run(command, both.cpu.seq, nullptr, nullptr).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(both.gpu.Window(), window);
}

TEST(DevicePassGpuTest, MemoryOfTheDevice_IsSharedThroughADescriptor) {
  SKIP_WITHOUT_DEVICE();
  std::shared_ptr<DeviceRuntime> one = *DeviceRuntime::Open(0), two = *DeviceRuntime::Open(0);
  constexpr int64_t kBytes = (int64_t{16} << 20) + 100'000;  // of two or more granules
  auto mine = DeviceSegment::Create(one, kBytes);
  ASSERT_OK(mine.status());
  auto theirs = DeviceSegment::Map(two, UniqueFd(dup(mine->fd())), kBytes, DeviceSegment::Access::kReadOnly);
  ASSERT_OK(theirs.status());
  char text[6] = "hello", back[6] = {};
  {
    DeviceRuntime::Scope scope(*one);
    ASSERT_OK(one->Copy(mine->data() + kBytes - 6, text, 6));
    ASSERT_OK(one->AwaitIdle(absl::Seconds(5)));
  }
  DeviceRuntime::Scope scope(*two);
  ASSERT_OK(two->Copy(back, theirs->data() + kBytes - 6, 6));
  ASSERT_OK(two->AwaitIdle(absl::Seconds(5)));
  EXPECT_STREQ(back, "hello");
  for (const int64_t bytes : {int64_t{100'000}, int64_t{64} << 20}) {
    const auto other = DeviceSegment::Map(two, UniqueFd(dup(mine->fd())), bytes, DeviceSegment::Access::kReadOnly);
    EXPECT_EQ(other.status().code(), absl::StatusCode::kInvalidArgument) << bytes << ": " << other.status();
  }
}

}  // namespace
}  // namespace shardmesh
