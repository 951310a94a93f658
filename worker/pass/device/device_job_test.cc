// Jobs of workers on a stand-in device, in one process: what ends them, and what is refused.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/pass/device/testing/device_group.h"
#include "worker/testing/local_host.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

class DeviceJobTest : public ::testing::Test {
 protected:
  DeviceJobTest() { TheStandIn().GuardMemory(); }
  ~DeviceJobTest() override {
    EXPECT_EQ(TheStandIn().Allocations(), 0);
    TheStandIn().Reset();
  }
  std::function<std::optional<WorkerDevice>(int)> OnDevice() {
    return [this](int) { return *WorkerDevice::Open(kTestDevice, &kernels_, kStandInPath); };
  }

  EmulatedKernels kernels_;
};

TEST_F(DeviceJobTest, TwoWorkers_StepOnOneDevice) {
  LocalHost host(2, OnDevice());
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=2", 2)));
  ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
  EXPECT_EQ(host.workers[0]->DeviceText(), "cuda:2 (stand-in)");
  auto trainer = Trainer::Attach(host, 1, {0, 1});
  ASSERT_OK(trainer.status());
  EXPECT_EQ(trainer->welcome.device_segments_size(), 3);
  for (int64_t step = 1; step <= 3; ++step) ASSERT_OK(trainer->Step(Request({0, 1}, step)).status());
  EXPECT_EQ((*host.workers[1]->Find("small"))->protocol().committed_step(), Step(3));
  EXPECT_THAT(TheStandIn().Misuses(), ::testing::IsEmpty());
}

TEST_F(DeviceJobTest, DeviceLost_StepFailsAndNamesIt) {
  LocalHost host(2, OnDevice());
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=2", 1)));
  ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
  auto trainer = Trainer::Attach(host, 0, {0});
  ASSERT_OK(trainer.status());
  ASSERT_OK(trainer->Step(Request({0}, 1)).status());
  TheStandIn().LoseDevice(kTestDevice);
  const absl::Status status = trainer->Step(Request({0}, 2)).status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable,
                               HasSubstr("could not finish its part of the step on CUDA device 2")));
  EXPECT_THAT(std::string(status.message()), HasSubstr("the last committed step is 1"));
  for (int i = 0; i < 2; ++i) EXPECT_FALSE(host.HealthOf(i).ok());
}

// A worker that dies in mid-step leaves no other waiting: its kernels end nothing of theirs.
TEST_F(DeviceJobTest, KernelsThatEndWithoutAResult_FailTheJob) {
  LocalHost host(1, OnDevice());
  ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob("fsdp=1", 1)));
  ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
  auto trainer = Trainer::Attach(host, 0, {0});
  ASSERT_OK(trainer.status());
  kernels_.StopAfter(0);
  EXPECT_THAT(trainer->Step(Request({0}, 1)).status(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("on CUDA device 2")));
}

TEST_F(DeviceJobTest, JobThatDevicesCannotDo_IsRefused) {
  LocalHost host(1, OnDevice());
  JobSpec job = SmallJob("fsdp=1", 1);
  job.residency = Residency::kBucket;
  host.workers[0]->Reconcile({host.AssignmentOf(job, 0)});
  ASSERT_TRUE(Await([&] { return host.StatusOf(0).state() == v1::MEMBER_STATE_FAILED; }));
  EXPECT_THAT(host.StatusOf(0).error(), HasSubstr("bucket residency, which workers on a CUDA device do not support yet"));
}

TEST_F(DeviceJobTest, WorkersOfUnlikeDevices_AreRefusedAndSayHow) {
  for (const int on_device : {0, 1}) {
    const auto device = OnDevice();
    LocalHost host(2, [&](int i) { return i == on_device ? device(i) : std::nullopt; });
    const JobSpec job = SmallJob("fsdp=2", 1);
    for (int i = 1; i >= 0; --i) host.workers[i]->Reconcile({host.AssignmentOf(job, i)});
    ASSERT_TRUE(Await([&] { return host.StatusOf(1).state() == v1::MEMBER_STATE_FAILED; }));
    EXPECT_THAT(host.StatusOf(1).error(), HasSubstr(on_device == 0 ? "start this worker with --device cuda:N too"
                                                                   : "start all workers of a job with the same"));
  }
}

TEST_F(DeviceJobTest, DeviceTooSmall_IsRefusedInTheDriversWords) {
  LocalHost host(1, OnDevice());
  TheStandIn().SetVirtualMemory(100'000);
  host.workers[0]->Reconcile({host.AssignmentOf(SmallJob("fsdp=1", 1), 0)});
  ASSERT_TRUE(Await([&] { return host.StatusOf(0).state() == v1::MEMBER_STATE_FAILED; }));
  EXPECT_THAT(host.StatusOf(0).error(), HasSubstr("CUDA device 2 cannot give 65536 bytes: out of memory"));
}

}  // namespace
}  // namespace shardmesh
