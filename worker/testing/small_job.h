// Small jobs, gradients and a host's memory for the tests of worker/. Tests only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/matchers.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "worker/memory/host_memory.h"
#include "worker/memory/memory.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

// A valid job of two small fp32 tensors, fp32 gradients, one bucket; 150 + 7 elements.
inline JobSpec SmallJob(const std::string& mesh, int num_slots) {
  JobSpec job;
  job.name = "small";
  job.mesh = *ParseMeshSpec(mesh);
  job.num_slots = num_slots;
  job.parameters = {{"layer.w", {3, 50}, WeightFormat::kFp32}, {"layer.b", {7}, WeightFormat::kFp32}};
  job.gradient_format = Format::kFp32;
  job.bucket_elements = kMinBucketElements;
  job.optimizer.lr = 0.125;
  return job;
}

// A job of many shapes and all formats, in several buckets and, for one shard, several chunks of storage.
inline JobSpec MixedJob(const std::string& mesh, int num_slots) {
  JobSpec job = SmallJob(mesh, num_slots);
  job.name = "mixed";
  job.seed = 77;
  job.gradient_format = Format::kBf16;
  job.bucket_elements = 20'000;
  job.parameters = {{"a", {101, 97}, WeightFormat::kFp32},   {"scalar", {}, WeightFormat::kBf16Sr},
                    {"b", {263, 61}, WeightFormat::kBf16Sr}, {"none", {0, 4}, WeightFormat::kBf16},
                    {"c", {9001}, WeightFormat::kBf16},      {"a2", {101, 97}, WeightFormat::kFp32, "a"},
                    {"d", {64}, WeightFormat::kFp32},        {"e", {12'289}, WeightFormat::kBf16Sr},
                    {"f", {65}, WeightFormat::kBf16},        {"g", {11, 1024}, WeightFormat::kFp32},
                    {"h", {4097, 3}, WeightFormat::kBf16Sr}, {"i", {63}, WeightFormat::kFp32}};
  return job;
}

inline std::vector<std::string> MemberNames(int n) {
  std::vector<std::string> names;
  for (int i = 0; i < n; ++i) names.push_back("worker-" + std::to_string(i));
  return names;
}

// A pseudo-random float of a few hundredths, and of either sign, from three numbers.
inline float RandomValue(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t x = a * 0x9E3779B97F4A7C15u ^ b * 0xC2B2AE3D27D4EB4Fu ^ c * 0x165667B19E3779F9u;
  x = (x ^ x >> 31) * 0x94D049BB133111EBu;
  x ^= x >> 29;
  return static_cast<float>(static_cast<int64_t>(x >> 40) - (1 << 23)) * 0x1p-27f;
}

// A job, its plan, the memory of its host, and a view of the protocol.
struct TestHost {
  explicit TestHost(const JobSpec& spec)
      : job(spec),
        plan(*Plan::Create(job)),
        memory(NewProcessMemory()),
        host(*HostMemory::Create(*memory, job.name, job, plan)),
        protocol(host.control(), &host.notifier(), &job, &plan, MemberNames(plan.num_ranks())) {}

  const JobSpec job;
  const Plan plan;
  const std::unique_ptr<Memory> memory;
  HostMemory host;
  StepProtocol protocol;
};

}  // namespace shardmesh
