#include "core/job/absent_weights.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>

#include "core/base/matchers.h"
#include "core/mesh/mesh_spec.h"

namespace shardmesh {
namespace {

JobSpec Job(int blocks) {
  JobSpec job;
  job.name = "job";
  job.mesh = *ParseMeshSpec("fsdp=2");
  job.residency = Residency::kBucket;
  for (int b = 0; b < blocks; ++b) {
    const std::string block = "layers." + std::to_string(b);
    job.parameters.push_back({block + ".weight", {64, 480}});
    job.parameters.push_back({block + ".bias", {5}});
    job.parameters.push_back({block + ".half", {3000}, WeightFormat::kBf16});
    job.parameters.push_back({block + ".none", {0}});
    job.parameters.push_back(
        {block + ".codes", {40, 128}, WeightFormat::kFp32, "", StateFormat::kFp32, GatherFormat::kFp8Tensor});
  }
  job.parameters.push_back({"tied", {64, 480}, WeightFormat::kFp32, "layers.0.weight"});
  return job;
}

// NaN where a parameter begins, in its page, and nothing beside parameters.
TEST(AbsentWeightsTest, EveryParameterBeginsWithNaN_AndPaddingHoldsZeros) {
  const JobSpec job = Job(2);
  ASSERT_OK_AND_ASSIGN(const Plan plan, Plan::Create(job));
  const AbsentWeights absent(plan);
  std::string window(plan.window_bytes(), '\0'), expected = window;
  int64_t pages = 0;
  for (int b = 0; b < static_cast<int>(plan.buckets().size()); ++b) {
    absent.Show(b, window.data());
    pages += absent.PageBytes(b);
  }
  for (size_t t = 0; t < job.parameters.size(); ++t) {
    const Placement& placement = plan.placements()[t];
    const Bucket& bucket = plan.buckets()[placement.bucket];
    const int64_t begin = bucket.weight_offset + bucket.CodeOffset(placement.offset);
    const int64_t end = begin + GatheredCodeBytes(bucket.format(), bucket.gather, placement.num_elements);
    for (int64_t at = begin; at < end && (at == begin || at % kPageBytes != 0); ++at) expected[at] = '\xff';
    if (placement.num_elements == 0 || bucket.quantized()) continue;
    float value = 0;  // bf16 is the upper half of an fp32
    std::memcpy(&value, window.data() + begin, bucket.weights == WeightFormat::kFp32 ? 4 : 2);
    if (bucket.weights == WeightFormat::kBf16) std::memcpy(reinterpret_cast<char*>(&value) + 2, &value, 2);
    EXPECT_TRUE(std::isnan(value)) << job.parameters[t].name;
  }
  EXPECT_TRUE(window == expected);
  int64_t touched = 0;
  for (size_t page = 0; page < window.size(); page += kPageBytes) {
    touched += window.substr(page, kPageBytes).find_first_not_of('\0') != std::string::npos ? kPageBytes : 0;
  }
  EXPECT_EQ(pages, touched);
  EXPECT_LT(touched, plan.window_bytes() / 2);
}

}  // namespace
}  // namespace shardmesh
