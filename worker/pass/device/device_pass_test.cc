// The pass on a device, its kernels walked on the CPU over the stand-in device: the bits of the pass on processors.
#include "worker/pass/device/device_pass.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/pass/device/testing/device_group.h"

namespace shardmesh {
namespace {

using testing::HasSubstr;

class DevicePassTest : public testing::Test {
 protected:
  ~DevicePassTest() override {
    EXPECT_EQ(TheStandIn().Allocations(), 0);
    EXPECT_THAT(TheStandIn().Misuses(), testing::IsEmpty());
    TheStandIn().Reset();
  }
};

void ExpectTrainsAlike(const JobSpec& job, int steps, const std::string& what) {
  TwoGroups both(job);
  ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
  ASSERT_NO_FATAL_FAILURE(both.ExpectSame(what + ", initial weights"));
  for (int64_t step = 1; step <= steps; ++step) {
    ASSERT_NO_FATAL_FAILURE(both.RunStep(step));
    ASSERT_NO_FATAL_FAILURE(both.ExpectSame(what + ", step " + std::to_string(step)));
  }
  int64_t written = 0, expected = 0;
  for (const auto& pass : both.gpu.passes) written += pass->gathered_bytes();
  for (const auto& pass : both.cpu.passes) expected += pass->gathered_bytes();
  EXPECT_EQ(written, expected) << what;
}

TEST_F(DevicePassTest, EveryMesh_TrainsToTheBitsOfProcessors) {
  for (const char* mesh : {"fsdp=1", "fsdp=2", "ddp=2", "fsdp=3", "ddp=2,fsdp=2"}) {
    ASSERT_NO_FATAL_FAILURE(ExpectTrainsAlike(MixedJob(mesh, 3), 4, mesh));
  }
}

TEST_F(DevicePassTest, EveryFormatAndOptimizer_TrainsToTheBitsOfProcessors) {
  for (const OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kSgd, OptimizerKind::kLion}) {
    for (const StateFormat states : {StateFormat::kFp32, StateFormat::kBf16Sr, StateFormat::kDyn8, StateFormat::kDyn4,
                                     StateFormat::kFp8, StateFormat::kFp8x32}) {
      JobSpec job = MixedJob("fsdp=2", 2);
      job.optimizer = OptimizerHyper::Defaults(kind);
      job.optimizer.momentum = kind == OptimizerKind::kSgd ? 0.9 : 0;
      const WeightFormat weights[] = {WeightFormat::kFp32,       WeightFormat::kBf16Sr,      WeightFormat::kBf16,
                                      WeightFormat::kBf16Plus16, WeightFormat::kBf16Plus8Sr, WeightFormat::kInt8Row};
      for (size_t i = 0; i < job.parameters.size(); ++i) {
        ParameterSpec& p = job.parameters[i];
        if (!p.tied_to.empty()) continue;
        p.states = states;
        p.format = weights[i % 6];
      }
      job.parameters[5] = {"a2", job.parameters[0].shape, job.parameters[0].format, "a"};
      job.parameters[5].states = states;
      ASSERT_NO_FATAL_FAILURE(ExpectTrainsAlike(job, 2, std::string(StateFormatName(states))));
    }
  }
}

TEST_F(DevicePassTest, ClippedFp32GradientsOfTwoGroups_TrainToTheBitsOfProcessors) {
  JobSpec job = MixedJob("ddp=2,fsdp=2", 1);
  job.gradient_format = Format::kFp32;
  job.clip_norm = 0.01;
  job.more_groups = {job.optimizer};
  job.more_groups[0].weight_decay = 0.1;
  for (size_t i = 0; i < job.parameters.size(); i += 3) job.parameters[i].group = 1;
  job.parameters[5].group = job.parameters[0].group;
  ExpectTrainsAlike(job, 4, "clipped");
}

TEST_F(DevicePassTest, FrozenParameters_ArePlacedAndStay) {
  JobSpec job = MixedJob("fsdp=2", 2);
  job.parameters[2].frozen = job.parameters[4].frozen = true;
  ExpectTrainsAlike(job, 2, "frozen");
}

TEST_F(DevicePassTest, AVersionOnDemand_IsTheWindow) {
  JobSpec job = MixedJob("ddp=2,fsdp=2", 2);
  job.publications = 2;
  job.parameters.push_back({"long", {700, 3'001}, WeightFormat::kFp32});  // pieces for each rank
  TwoGroups both(job);
  ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
  ASSERT_NO_FATAL_FAILURE(both.RunStep(1));
  Command command;
  command.kind = CommandKind::kPublish;
  command.parity = both.cpu.parity;
  command.publish = both.gpu.Publication(1) == both.gpu.Window() ? 0 : 1;  // one that the step did not write
  ASSERT_NE(both.gpu.Publication(command.publish), both.gpu.Window());
  both.cpu.Execute(command);
  ASSERT_OK(both.gpu.Execute(command, both.cpu.seq).status());
  ASSERT_NO_FATAL_FAILURE(both.ExpectSame("published"));
  EXPECT_EQ(both.gpu.Publication(command.publish), both.gpu.Window());
}

// What a checkpoint is written from, and what a job that is restored begins with.
TEST_F(DevicePassTest, ACopyOfTheShard_FillsAnotherOne) {
  JobSpec job = MixedJob("ddp=2,fsdp=2", 2);
  job.parameters[2].frozen = true;
  job.parameters.push_back({"rows", {40, 300}, WeightFormat::kInt8Row});
  job.parameters.push_back({"long", {700, 4'001}, WeightFormat::kBf16Sr});  // several copies of ranges
  job.bucket_elements = 1'000'000;
  TwoGroups both(job);
  ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
  for (const int64_t step : {1, 2, 4}) ASSERT_NO_FATAL_FAILURE(both.RunStep(step));
  const int ranks = both.gpu.plan.num_ranks();
  std::vector<SnapshotPort> ports(ranks);
  std::vector<std::shared_ptr<Snapshot>> snapshots;
  for (int r = 0; r < ranks; ++r) {
    const int shard = both.gpu.plan.PlaceOf(Rank(r)).shard;
    snapshots.push_back(*Snapshot::Create(both.gpu.plan, shard, both.gpu.passes[r]->cut()));
    both.gpu.passes[r]->TakeSnapshots(&ports[r]);
    ASSERT_OK(ports[r].Ask(snapshots[r]));
  }
  ASSERT_NO_FATAL_FAILURE(both.ExpectSame("with the digest"));
  DeviceGroup again(job);
  for (int r = 0; r < ranks; ++r) {
    const auto copied = ports[r].Await(absl::ZeroDuration());
    ASSERT_TRUE(copied.has_value());
    EXPECT_EQ(copied->parity, both.cpu.parity);
    ASSERT_OK(again.passes[r]->Fill(snapshots[r]->storage()));
  }
  Command command;
  command.kind = CommandKind::kRestore;
  command.parity = both.cpu.parity;
  command.publish = 0;
  ASSERT_OK(again.Execute(command, 1).status());
  EXPECT_EQ(again.Window(), both.cpu.Window());
  EXPECT_EQ(again.Publication(0), both.cpu.Window());
  command.kind = CommandKind::kDigest;
  ASSERT_OK_AND_ASSIGN(const uint64_t digest, again.Execute(command, 1));
  EXPECT_EQ(digest, both.cpu.Digest());
}

// Chunks in several ranges of a device's, so several blocks; killed anywhere and executed again.
TEST_F(DevicePassTest, KilledAnywhere_AgainGivesTheSameBits) {
  JobSpec job = MixedJob("fsdp=2", 2);
  job.parameters.push_back({"long", {3, 50'001}, WeightFormat::kBf16Sr});
  job.bucket_elements = 200'000;
  TwoGroups both(job);
  ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
  int64_t kills = 0;
  for (int64_t step = 1; step <= 4; ++step) {
    if (step == kSkippedStep) continue;
    const Command command = both.CpuStep(step);
    // Each time a little further: a tile or two into a chunk, or at its end.
    for (int64_t tiles = step; tiles > 0; tiles += 7) {
      both.gpu.kernels.StopAfter(tiles);
      const absl::Status status = both.gpu.Execute(command, both.cpu.seq).status();
      if (status.ok()) break;
      ASSERT_THAT(status, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("without a result")));
      ++kills;
    }
    both.gpu.kernels.StopAfter(-1);
    ASSERT_OK(both.gpu.Execute(command, both.cpu.seq).status());
    ASSERT_NO_FATAL_FAILURE(both.ExpectSame("step " + std::to_string(step)));
  }
  EXPECT_GT(kills, 20);
}

TEST_F(DevicePassTest, ReplicasShareTheWritingOfTheWindow) {
  TwoGroups both(MixedJob("ddp=2", 2));
  ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
  const std::vector<char> before = both.gpu.Window();
  const Command command = both.CpuStep(1);
  both.gpu.host.control()->decided.store(both.cpu.seq);
  ASSERT_OK(both.gpu.passes[1]->Run(command, both.cpu.seq, nullptr, nullptr).status());
  EXPECT_NE(both.gpu.Window(), before);
  EXPECT_NE(both.gpu.Window(), both.cpu.Window());
  ASSERT_OK(both.gpu.passes[0]->Run(command, both.cpu.seq, nullptr, nullptr).status());
  both.ExpectSame("both");
}

TEST_F(DevicePassTest, AbortedJob_ChangesNoByte) {
  TwoGroups both(MixedJob("fsdp=2", 2));
  ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
  const std::vector<char> window = both.gpu.Window();
  const Command command = both.CpuStep(1);
  both.gpu.host.control()->abort.store(AbortWord(AbortReason::kGone, 1, 0));
  EXPECT_EQ(both.gpu.Execute(command, both.cpu.seq).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(both.gpu.Window(), window);
  both.gpu.host.control()->abort.store(0);
  ASSERT_OK(both.gpu.Execute(command, both.cpu.seq).status());
  both.ExpectSame("after it");
}

// Launched before it is decided, as launches ahead are: an abort, or a decision, finds it in the gate.
TEST_F(DevicePassTest, GateThatNobodyOpens_IsLateAndChangesNoByte) {
  DevicePassOptions options;
  options.gate_timeout = absl::Milliseconds(20);
  TwoGroups both(MixedJob("fsdp=1", 2), options);
  ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
  const std::vector<char> window = both.gpu.Window();
  const Command command = both.CpuStep(1);
  const uint64_t undecided = both.cpu.seq;
  both.gpu.host.control()->decided.store(undecided - 1);
  EXPECT_THAT(both.gpu.passes[0]->Run(command, undecided, nullptr, nullptr).status(),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("was not decided within 20ms")));
  EXPECT_EQ(both.gpu.Window(), window);
  ASSERT_OK(both.gpu.Execute(command, undecided).status());
  both.ExpectSame("after it");
}

TEST_F(DevicePassTest, GateThatWaits_IsOpenedOrAborted) {
  for (const bool abort : {false, true}) {
    DevicePassOptions options;
    options.gate_timeout = absl::Seconds(60);
    TwoGroups both(MixedJob("fsdp=1", 2), options);
    ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
    const std::vector<char> window = both.gpu.Window();
    const Command command = both.CpuStep(1);
    ControlBlock& control = *both.gpu.host.control();
    control.decided.store(both.cpu.seq - 1);
    const int begun = both.gpu.kernels.gates_begun();
    std::atomic<bool> done{false};
    absl::Status status;
    std::thread waiter([&] {
      status = both.gpu.passes[0]->Run(command, both.cpu.seq, nullptr, nullptr).status();
      done.store(true);
    });
    while (both.gpu.kernels.gates_begun() == begun && !done.load()) std::this_thread::yield();
    EXPECT_FALSE(done.load());
    EXPECT_EQ(both.gpu.Window(), window);
    if (abort) {
      control.abort.store(AbortWord(AbortReason::kLeft, 0, 0));
    } else {
      control.decided.store(both.cpu.seq);
    }
    waiter.join();
    EXPECT_EQ(status.code(), abort ? absl::StatusCode::kAborted : absl::StatusCode::kOk);
    if (abort) {
      EXPECT_EQ(both.gpu.Window(), window);
    } else {
      both.ExpectSame("opened");
    }
  }
}

TEST_F(DevicePassTest, LostDevice_IsUnavailableAndNamed) {
  TwoGroups both(MixedJob("fsdp=2", 2));
  ASSERT_NO_FATAL_FAILURE(both.PlaceWeights());
  const Command command = both.CpuStep(1);
  TheStandIn().LoseDevice(kTestDevice);
  const absl::Status status = both.gpu.Execute(command, both.cpu.seq).status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("CUDA device 2")));
  EXPECT_THAT(std::string(status.message()), HasSubstr("unspecified launch failure"));
  TheStandIn().Reset();
}

TEST_F(DevicePassTest, NoRoom_IsResourceExhausted) {
  const JobSpec job = MixedJob("fsdp=1", 1);
  DeviceGroup group(job);
  TheStandIn().SetVirtualMemory(100);
  EXPECT_THAT(DevicePass::Create(job, group.plan, {0, 0}, group.host, group.device, {}, {}).status(),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("out of memory")));
}

TEST_F(DevicePassTest, WorkerDevice_WithoutKernelsOrDriver_SaysWhy) {
  EXPECT_THAT(WorkerDevice::Open(0, nullptr, kStandInPath).status(),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("build shardmesh-worker with --config=cuda")));
  const EmulatedKernels kernels;
  EXPECT_THAT(WorkerDevice::Open(0, &kernels, "nowhere/libcuda.so.1").status(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no CUDA driver here: nowhere/libcuda.so.1")));
  EXPECT_THAT(WorkerDevice::Open(77, &kernels, kStandInPath).status(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("CUDA device 77 cannot be opened")));
  TheStandIn().SetVirtualMemory(-1);
  EXPECT_THAT(WorkerDevice::Open(0, &kernels, kStandInPath).status(),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("no virtual memory management")));
}

}  // namespace
}  // namespace shardmesh
