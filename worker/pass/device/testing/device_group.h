// DeviceGroup: all workers of a job on one device, each with its DevicePass, taking the commands of a PassGroup, and
// the same gradients. By default the device is the stand-in. Tests only.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/base/matchers.h"
#include "worker/pass/device/device_pass.h"
#include "worker/pass/device/testing/emulated_kernels.h"
#include "worker/testing/pass_group.h"

namespace shardmesh {

inline constexpr int kTestDevice = 2;

// A device, as WorkerDevice::Open takes it. No kernels: the group's emulated ones.
struct TestMachine {
  const PassKernels* kernels = nullptr;
  int number = kTestDevice;
  std::string library = kStandInPath;
};

struct DeviceGroup {
  explicit DeviceGroup(const JobSpec& spec, DevicePassOptions options = {}, const TestMachine& machine = {})
      : job(spec),
        plan(*Plan::Create(job)),
        memory(NewProcessMemory()),
        device(*WorkerDevice::Open(machine.number, machine.kernels != nullptr ? machine.kernels : &kernels,
                                   machine.library)),
        host(*HostMemory::Create(*memory, job.name, job, plan, device.copies)) {
    if (machine.kernels == nullptr) TheStandIn().GuardMemory();
    for (int r = 0; r < plan.num_ranks(); ++r) {
      const ShardPlace place = plan.PlaceOf(Rank(r));
      passes.push_back(
          *DevicePass::Create(job, plan, place, host, device, {place.replica, plan.num_replicas()}, options));
    }
  }

  // What the lead decides; everybody executes it. The sum of the digests of one replica.
  absl::StatusOr<uint64_t> Execute(const Command& command, uint64_t seq,
                                   const std::function<std::vector<float>(int shard)>& initial = {}) {
    host.control()->decided.store(seq);
    std::vector<absl::StatusOr<uint64_t>> digests(passes.size(), uint64_t{0});
    const auto run = [&](int r) {
      const std::vector<float> weights = initial ? initial(plan.PlaceOf(Rank(r)).shard) : std::vector<float>();
      digests[r] = passes[r]->Run(command, seq, weights.data(), nullptr);
    };
    std::vector<std::thread> threads;  // as several workers, whose kernels are on the device at the same time
    for (int r = 1; r < plan.num_ranks(); ++r) threads.emplace_back(run, r);
    run(0);
    for (std::thread& thread : threads) thread.join();
    uint64_t sum = 0;
    for (int r = 0; r < plan.num_ranks(); ++r) {
      RETURN_IF_ERROR(digests[r].status());
      if (plan.PlaceOf(Rank(r)).replica == 0) sum += *digests[r];
    }
    return sum;
  }

  std::vector<char> Bytes(const DeviceSegment& segment) const {
    std::vector<char> bytes(static_cast<size_t>(segment.num_bytes()));
    EXPECT_OK(host.device()->Copy(bytes.data(), segment.data(), segment.num_bytes()));
    return bytes;
  }
  std::vector<char> Window() const { return Bytes(host.device()->window); }
  std::vector<char> Publication(int i) const { return Bytes(host.device()->publications[i]); }

  const JobSpec job;
  const Plan plan;
  const std::unique_ptr<Memory> memory;
  EmulatedKernels kernels;
  const WorkerDevice device;
  HostMemory host;
  std::vector<std::unique_ptr<DevicePass>> passes;
};

// The same job on processors and on a device, step by step.
struct TwoGroups {
  explicit TwoGroups(const JobSpec& job, DevicePassOptions options = {}, const TestMachine& machine = {})
      : cpu(job, 1), gpu(job, options, machine) {}

  void PlaceWeights() {
    cpu.PlaceWeights();
    Command command;
    command.kind = CommandKind::kInit;
    command.publish = 0;
    ASSERT_OK(gpu.Execute(command, cpu.seq, [&](int shard) { return cpu.InitialShard(shard); }).status());
  }

  void CopyGradients() {
    for (int s = 0; s < cpu.job.num_slots; ++s) {
      ASSERT_OK(gpu.host.device()->Copy(gpu.host.device()->slots[s].data(), cpu.host.slot(s).data(),
                                        cpu.plan.gradient_window_bytes()));
    }
  }

  // The step's command as the processors execute it, the device's to do.
  Command CpuStep(int64_t step) {
    Command command = cpu.StepCommand(step);
    cpu.WriteGroups(command, gpu.host);
    cpu.WriteGradients(step);
    CopyGradients();
    if (command.apply && cpu.job.clip_norm > 0) {
      Command norm = command;
      norm.kind = CommandKind::kNorm;
      cpu.Execute(norm);
      EXPECT_OK(gpu.Execute(norm, cpu.seq).status());
      command.clip = ClipFactor(cpu.job.clip_norm, GradientNorm(cpu.job, cpu.plan, SquareSums(gpu.host.control())));
      EXPECT_EQ(command.clip,
                ClipFactor(cpu.job.clip_norm, GradientNorm(cpu.job, cpu.plan, SquareSums(cpu.host.control()))));
    }
    cpu.Execute(command);
    if (command.apply) cpu.parity = 1 - cpu.parity;
    return command;
  }
  void RunStep(int64_t step) {
    const Command command = CpuStep(step);
    ASSERT_OK(gpu.Execute(command, cpu.seq).status());
  }

  void ExpectSame(const std::string& what) {
    ASSERT_EQ(gpu.Window(), cpu.Window()) << what;
    for (int i = 0; i < gpu.job.publications; ++i) ASSERT_EQ(gpu.Publication(i), cpu.Publication(i)) << what;
    Command command;
    command.kind = CommandKind::kDigest;
    command.parity = cpu.parity;
    const uint64_t expected = cpu.Digest();
    const absl::StatusOr<uint64_t> digest = gpu.Execute(command, cpu.seq);
    ASSERT_OK(digest.status()) << what;
    ASSERT_EQ(*digest, expected) << what;
  }

  PassGroup cpu;
  DeviceGroup gpu;
};

}  // namespace shardmesh
