// A kernel that outlives its command, its pass and its job: what it may touch is there until it ends.
#include "core/base/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/pass/device/testing/device_group.h"

namespace shardmesh {
namespace {

TEST(DeviceLate, KernelBeyondAllTimeLimits_FindsItsMemory) {
  static auto* const kernels = new EmulatedKernels;  // outlives what is given to streams
  TestMachine machine;
  machine.kernels = kernels;
  DevicePassOptions options;
  options.timeout = options.end_timeout = absl::Milliseconds(100);
  JobSpec job = MixedJob("fsdp=2", 2);
  {
    TwoGroups both(job, options, machine);
    ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
    kernels->Hold();
    const Command command = both.CpuStep(1);
    EXPECT_THAT(both.gpu.Execute(command, both.cpu.seq).status(),
                StatusIs(absl::StatusCode::kDeadlineExceeded, testing::HasSubstr("device")));
  }
  const int before = kernels->steps_done();
  kernels->Release();
  const absl::Time deadline = MonotonicNow() + absl::Seconds(30);
  while (kernels->steps_done() == before && MonotonicNow() < deadline) std::this_thread::yield();
  EXPECT_GT(kernels->steps_done(), before);
  TheStandIn().JoinKernels();  // the job's end left their stream to them
  EXPECT_THAT(TheStandIn().Misuses(), testing::IsEmpty());
}

}  // namespace
}  // namespace shardmesh
