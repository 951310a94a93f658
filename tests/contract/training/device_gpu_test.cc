// What device_invariance_test.cc says of the stand-in, of a real device: workers with their own kernels and the driver,
// trainers that copy gradients into memory of the device. Processes that are killed while they use it. Skipped where
// there is no device, or in a build without CUDA.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iostream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/await.h"
#include "tests/testing/training/training.h"
#include "tests/testing/training/variant.h"
#include "worker/pass/device/device_pass.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::Variant;
using ::testing::HasSubstr;

constexpr int64_t kSteps = 6;
constexpr absl::Duration kPatience = absl::Seconds(30);

#define SKIP_WITHOUT_DEVICE() \
  if (const auto device = WorkerDevice::Open(0); !device.ok()) GTEST_SKIP() << "SKIPPED: " << device.status()

ClusterOptions OnDevice(int workers) {
  ClusterOptions options;
  options.workers = workers;
  options.worker_flags = {"--device", "cuda:0"};
  return options;
}

ClientOptions WithViews() {
  ClientOptions options;
  options.device_windows = true;
  return options;
}

// What processors learn of the job.
absl::StatusOr<Learnt> Expected(int slots) {
  ASSIGN_OR_RETURN(const auto processors, Cluster::Start({.workers = 1}));
  ASSIGN_OR_RETURN(Client client, processors->Connect());
  Variant variant = {"fsdp=1", {{{}, true}}};
  for (int slot = 0; slot < slots; ++slot) variant.trainers[0].slots.push_back(slot);
  return testing::TrainVariant(client, testing::OddJob("reference", "fsdp=1", slots), variant, kSteps);
}

TEST(DeviceGpu, OneTwoAndFourWorkersOfADevice_LearnWhatProcessorsDo) {
  SKIP_WITHOUT_DEVICE();
  ASSERT_OK_AND_ASSIGN(const Learnt expected, Expected(3));
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start(OnDevice(4)));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect(WithViews()));
  int index = 0;
  for (const Variant& variant :
       {Variant{"fsdp=1", {{{0, 1, 2}, true}}}, Variant{"fsdp=2", {{{2, 0}, true}, {{1}, true}}},
        Variant{"fsdp=1", {{{0, 1, 2}, false}}}, Variant{"fsdp=4", {{{1}, true}, {{0, 2}, false}}},
        Variant{"ddp=2,fsdp=2", {{{0, 1, 2}, true}}}}) {
    const JobSpec job = testing::OddJob(absl::StrCat("job-", index++), variant.mesh, 3);
    const absl::StatusOr<Learnt> learnt = testing::TrainVariant(client, job, variant, kSteps);
    ASSERT_OK(learnt) << testing::Describe(variant);
    EXPECT_EQ(*learnt, expected) << testing::Describe(variant);
  }
}

// The job fails by name of the worker; the other worker, whose context the killed one shared the device with, goes on.
TEST(DeviceGpu, KilledWorker_IsNamedAndTheOtherGoesOn) {
  SKIP_WITHOUT_DEVICE();
  ASSERT_OK_AND_ASSIGN(const Learnt expected, Expected(1));
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start(OnDevice(2)));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect(WithViews()));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(testing::OddJob("dies", "fsdp=2", 1)));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0)}));
  ASSERT_OK(session->AwaitWeights(kPatience));
  ASSERT_OK(testing::TrainTo(*session, 3));
  cluster->worker("w1").Kill9();
  const absl::Status status = testing::TrainTo(*session, kSteps, kPatience);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("w1"));
  std::cout << "said of a killed worker: " << status << "\n";
  const Variant alone = {"fsdp=1", {{{0}, true}}};
  const absl::StatusOr<Learnt> learnt =
      testing::TrainVariant(client, testing::OddJob("after", "fsdp=1", 1), alone, kSteps);
  ASSERT_OK(learnt);
  EXPECT_EQ(*learnt, expected);
}

// Its slot is taken by another, and the job learns what it would have learnt.
TEST(DeviceGpu, KilledTrainer_IsReplaced) {
  SKIP_WITHOUT_DEVICE();
  ASSERT_OK_AND_ASSIGN(const Learnt expected, Expected(2));
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start(OnDevice(2)));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect(WithViews()));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(testing::OddJob("slots", "fsdp=2", 2)));
  ASSERT_OK(testing::Initialize(*job));
  const auto start = [&](const std::string& log) {
    return testing::Process::Start({{"tests/testing/test_trainer", cluster->coordinator_address(), "slots",
                                     absl::StrCat(kSteps), "attach-device", "1"},
                                    log,
                                    0,
                                    {"SHARDMESH_TEST_REST_MS=200"}});
  };
  absl::Status mine;
  std::thread trainer([&] {
    const auto train = [&]() -> absl::Status {
      ASSIGN_OR_RETURN(const auto session, job->Attach({Slot(0)}));
      RETURN_IF_ERROR(session->AwaitWeights(kPatience));
      return testing::TrainTo(*session, kSteps, kPatience);
    };
    mine = train();
  });
  const std::string log = cluster->folder().File("killed.log");
  auto killed = start(log);
  EXPECT_OK(killed.status());
  EXPECT_TRUE(testing::Await([&] { return absl::StrContains(testing::ReadFile(log), "step 2\n"); }, kPatience))
      << testing::ReadFile(log);
  (*killed)->Kill9();
  const std::string next_log = cluster->folder().File("next.log");
  auto next = start(next_log);
  EXPECT_OK(next.status());
  trainer.join();
  EXPECT_OK(mine);
  ASSERT_OK_AND_ASSIGN(const int end, (*next)->Wait(kPatience));
  EXPECT_EQ(end, 0) << testing::ReadFile(next_log);
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, kSteps));
  EXPECT_EQ(learnt, expected);
}

}  // namespace
}  // namespace shardmesh
