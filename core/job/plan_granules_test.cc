// Plan: what is not cut: matrices that Muon steps, and rows of int8_row weights.
#include <algorithm>
#include <numeric>
#include <vector>

#include "core/base/matchers.h"
#include "core/job/plan.h"

namespace shardmesh {
namespace {

JobSpec JobOn(const char* mesh) {
  JobSpec job;
  job.name = "granules";
  job.mesh = *ParseMeshSpec(mesh);
  job.num_slots = 1;
  job.bucket_elements = kMinBucketElements;
  job.more_groups = {OptimizerHyper::Defaults(OptimizerKind::kMuon), OptimizerHyper::Defaults(OptimizerKind::kSgd)};
  return job;
}

ParameterSpec Matrix(const std::string& name, int64_t rows, int64_t columns, int group) {
  ParameterSpec p{name, {rows, columns}, WeightFormat::kBf16Sr};
  p.group = group;
  return p;
}

// Every matrix is inside one shard's part of its bucket; the parts lie behind each other, and hold nothing but matrices
// filled up to whole blocks.
void ExpectWholeMatrices(const char* mesh, int64_t bucket_elements) {
  constexpr int kMatrices = 23;
  JobSpec job = JobOn(mesh);
  job.bucket_elements = bucket_elements;
  for (int i = 0; i < kMatrices; ++i) {
    job.parameters.push_back(Matrix("m" + std::to_string(i), 5 + i * 7, 300 - i * 11, 1));
  }
  ASSERT_OK_AND_ASSIGN(const Plan plan, Plan::Create(job));
  std::vector<int> found(kMatrices);
  std::vector<int64_t> owned(plan.num_shards());  // elements
  int64_t gradients = 0, padding = 0;
  for (int b = 0; b < static_cast<int>(plan.buckets().size()); ++b) {
    const Bucket& bucket = plan.buckets()[b];
    ASSERT_TRUE(bucket.owned());
    ASSERT_EQ(static_cast<int>(bucket.shard_begins.size()), plan.num_shards() + 1);
    EXPECT_EQ(bucket.shard_begins.front(), 0);
    EXPECT_EQ(bucket.shard_begins.back(), bucket.num_elements);
    EXPECT_EQ(bucket.num_states, 1);
    padding += bucket.padding;
    for (int shard = 0; shard < plan.num_shards(); ++shard) {
      int64_t next = bucket.begin(shard);
      for (const auto& run : plan.RunsIn(b, bucket.begin(shard), bucket.end(shard))) {
        const int64_t elements = job.parameters[run.tensor].NumElements();
        EXPECT_EQ(run.bucket_offset, next);
        EXPECT_EQ(run.first_element, 0);
        EXPECT_EQ(run.num_elements, elements) << "parameter " << run.tensor << " on " << mesh;
        EXPECT_EQ(plan.MatrixOf(run.tensor).second, job.parameters[run.tensor].shape[1]);
        next += (elements + kBlockElements - 1) / kBlockElements * kBlockElements;
        owned[shard] += elements;
        ++found[run.tensor];
      }
      EXPECT_EQ(next, bucket.end(shard));
    }
  }
  EXPECT_EQ(found, std::vector<int>(kMatrices, 1));
  EXPECT_LT(padding, kMatrices * kBlockElements);
  for (int shard = 0; shard < plan.num_shards(); ++shard) gradients += plan.GradientShardBytes(shard);
  EXPECT_EQ(gradients, plan.total_elements() * 2);
  if (plan.num_shards() > 8) return;  // fewer matrices than shards: some have none
  const int64_t all = std::accumulate(owned.begin(), owned.end(), int64_t{0});
  EXPECT_LE(*std::max_element(owned.begin(), owned.end()), 2 * all / plan.num_shards());
}

TEST(LayoutGranulesTest, MuonsMatrices_AreWholeInOneShard) {
  for (const char* mesh : {"fsdp=1", "fsdp=3", "ddp=2,fsdp=4", "fsdp=64"}) {
    for (const int64_t bucket_elements : {kMinBucketElements, int64_t{100'000}, kDefaultBucketElements}) {
      ASSERT_NO_FATAL_FAILURE(ExpectWholeMatrices(mesh, bucket_elements));
    }
  }
}

TEST(LayoutGranulesTest, GroupsWithOtherNumbersOfStates_ShareNoBucket) {
  JobSpec job = JobOn("fsdp=2");
  job.parameters = {Matrix("adamw", 3, 5, 0), Matrix("muon", 3, 5, 1), Matrix("sgd", 3, 5, 2), Matrix("too", 3, 5, 0),
                    Matrix("none", 0, 5, 1)};
  job.parameters.push_back(Matrix("tied", 3, 5, 2));
  job.parameters.back().tied_to = "muon";
  ASSERT_OK_AND_ASSIGN(const Plan plan, Plan::Create(job));
  ASSERT_EQ(plan.buckets().size(), 3u);
  EXPECT_EQ(plan.placements()[0].bucket, plan.placements()[3].bucket);
  EXPECT_EQ(plan.buckets()[plan.placements()[0].bucket].num_states, 2);
  EXPECT_EQ(plan.buckets()[plan.placements()[1].bucket].num_states, 1);
  EXPECT_EQ(plan.buckets()[plan.placements()[2].bucket].num_states, 0);
  EXPECT_FALSE(plan.buckets()[plan.placements()[4].bucket].owned());
  EXPECT_EQ(plan.placements()[5].bucket, plan.placements()[1].bucket);
  EXPECT_EQ(plan.placements()[5].offset, plan.placements()[1].offset);
}

TEST(LayoutGranulesTest, Int8Rows_AreNotCut_AndLieWithTheirScales) {
  JobSpec job = JobOn("fsdp=3");
  const auto add = [&](const char* name, std::vector<int64_t> shape) {
    job.parameters.push_back({name, std::move(shape), WeightFormat::kInt8Row});
  };
  add("a", {100, 96});
  add("b", {10, 96});
  add("c", {2, 5, 40});
  add("row", {1000});
  add("scalar", {});
  add("none", {0, 96});
  ASSERT_OK_AND_ASSIGN(const Plan plan, Plan::Create(job));
  for (int t = 0; t < 5; ++t) {
    const int64_t row = job.parameters[t].shape.empty() ? 1 : job.parameters[t].shape.back();
    const Placement& at = plan.placements()[t];
    const Bucket& bucket = plan.buckets()[at.bucket];
    EXPECT_EQ(bucket.row_elements, row);
    EXPECT_EQ(bucket.gather, GatherFormat::kInt8Row);
    EXPECT_FALSE(bucket.quantized()) << "they are gathered as they are stored";
    EXPECT_EQ(at.scales.num_blocks, at.num_elements / row);
    EXPECT_GE(at.scale_offset, bucket.num_elements);
    EXPECT_EQ(bucket.shard_elements % bucket.granule_elements, 0);
    for (int shard = 0; shard < plan.num_shards(); ++shard) {
      for (const auto& run : plan.RunsIn(at.bucket, bucket.begin(shard), bucket.end(shard))) {
        EXPECT_EQ(run.first_element % row, 0);
        EXPECT_EQ(run.num_elements % row, 0);
        EXPECT_EQ(run.first_element % kBlockElements, 0);
      }
    }
  }
  EXPECT_EQ(plan.buckets()[plan.placements()[0].bucket].granule_elements, 768) << "8 rows are 3 blocks";
  EXPECT_EQ(plan.scales().num_maxima, 0);
  EXPECT_EQ(plan.buckets()[plan.placements()[5].bucket].num_elements, 0);
}

TEST(LayoutGranulesTest, Int8Rows_ThatAreGatheredInOtherCodes_HaveMaximaAndScalesOfTheirTensor) {
  JobSpec job = JobOn("fsdp=3");
  job.parameters = {{"own", {100, 96}, WeightFormat::kInt8Row, "", StateFormat::kFp32, GatherFormat::kInt8Row},
                    {"fp8", {100, 96}, WeightFormat::kInt8Row, "", StateFormat::kFp32, GatherFormat::kFp8Row},
                    {"nf4", {100, 96}, WeightFormat::kInt8Row, "", StateFormat::kFp32, GatherFormat::kNf4}};
  ASSERT_OK_AND_ASSIGN(const Plan plan, Plan::Create(job));
  const auto bucket = [&](int t) { return plan.buckets()[plan.placements()[t].bucket]; };
  EXPECT_FALSE(bucket(0).quantized());
  EXPECT_TRUE(bucket(1).quantized());
  EXPECT_TRUE(bucket(2).quantized());
  EXPECT_EQ(plan.scales().num_maxima, 100 + 9600 / 64);
  EXPECT_EQ(bucket(2).granule_elements, 768) << "rows are not cut, whatever they are gathered as";
  EXPECT_EQ(bucket(2).CodeOffset(bucket(2).num_elements), bucket(2).num_elements / 2);
}

TEST(LayoutGranulesTest, Hash_ChangesWithOwnersAndRows) {
  JobSpec job = JobOn("fsdp=2");
  job.more_groups[0].momentum = 0.5;
  job.parameters = {Matrix("a", 64, 64, 1), Matrix("b", 64, 64, 1)};
  const std::string owned = Plan::Create(job)->hash();
  for (ParameterSpec& p : job.parameters) p.group = 0;
  const std::string adamw = Plan::Create(job)->hash();
  for (ParameterSpec& p : job.parameters) p.format = WeightFormat::kInt8Row;
  const std::string rows = Plan::Create(job)->hash();
  EXPECT_NE(owned, adamw);
  EXPECT_NE(adamw, rows);
}

}  // namespace
}  // namespace shardmesh
