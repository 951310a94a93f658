#include "core/job/plan.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <set>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

JobSpec SmallJob() {
  JobSpec job;
  job.name = "layout";
  job.mesh = *ParseMeshSpec("ddp=2,fsdp=2");
  job.num_slots = 2;
  job.parameters = {
      {"a", {3, 50}, WeightFormat::kFp32}, {"b", {7}, WeightFormat::kBf16}, {"c", {129}, WeightFormat::kFp32}};
  job.bucket_elements = kMinBucketElements;
  return job;
}

Plan PlanOf(const JobSpec& job) {
  absl::StatusOr<Plan> plan = Plan::Create(job);
  EXPECT_OK(plan);
  return *std::move(plan);
}

TEST(LayoutTest, WorkedExample) {
  const Plan plan = PlanOf(SmallJob());
  ASSERT_EQ(plan.buckets().size(), 2u);  // fp32: a at 0 (150 -> 256), c at 256 (129 -> 256); bf16: b
  EXPECT_EQ(plan.placements()[0].offset, 0);
  EXPECT_EQ(plan.placements()[2].offset, 256);
  EXPECT_EQ(plan.placements()[2].num_elements, 129);
  EXPECT_EQ(plan.buckets()[0].num_elements, 512);
  EXPECT_EQ(plan.buckets()[0].shard_elements, 256);
  EXPECT_EQ(plan.buckets()[0].padding, 512 - 150 - 129);
  EXPECT_EQ(plan.buckets()[1].num_elements, 512);
  EXPECT_EQ(plan.buckets()[1].padding, 512 - 7);
  EXPECT_EQ(plan.version_bytes(), 512 * 4 + 512 * 2);
  EXPECT_EQ(plan.total_elements(), 1024);
  EXPECT_EQ(plan.GradientShardBytes(0), 512 * 2);
  EXPECT_EQ(plan.InitialShardBytes(0), 512 * 4);
  EXPECT_EQ(plan.window_bytes(), 2 * kPageBytes);
}

// Codes of a byte, and behind those of the whole bucket the scales of its tensors.
TEST(LayoutTest, QuantizedWeights_HaveTheirScalesBehindTheCodes) {
  JobSpec job = SmallJob();
  job.parameters[0].gather = job.parameters[2].gather = GatherFormat::kFp8Row;
  job.parameters[2].shape = {129, 1};
  job.parameters.push_back({"tied", {3, 50}, WeightFormat::kFp32, "a", StateFormat::kFp32, GatherFormat::kFp8Row});
  job.parameters.push_back({"m", {2, 64}, WeightFormat::kFp32, "", StateFormat::kFp32, GatherFormat::kMx8});
  const Plan plan = PlanOf(job);
  ASSERT_EQ(plan.buckets().size(), 3u);                            // fp32 in rows: a and c; bf16: b; fp32 in mx8: m
  EXPECT_EQ(plan.buckets()[0].weight_bytes, 512 + (3 + 129) * 4);  // a multiple of 16
  EXPECT_EQ(plan.buckets()[1].weight_bytes, 512 * 2);
  EXPECT_EQ(plan.buckets()[2].weight_bytes, 512 + 16);  // 4 scales
  EXPECT_EQ(plan.placements()[0].scale_offset, 512);
  EXPECT_EQ(plan.placements()[2].scale_offset, 512 + 3 * 4);
  EXPECT_EQ(plan.placements()[2].first_maximum, 3);
  EXPECT_EQ(plan.placements()[3].scale_offset, 512);
  EXPECT_EQ(plan.placements()[3].scales.num_blocks, 3);
  EXPECT_EQ(plan.placements()[4].scale_offset, 512);
  EXPECT_EQ(plan.scales().num_maxima, 3 + 129);
  EXPECT_EQ(plan.version_bytes(), 512 + 132 * 4 + 512 * 2 + 512 + 16);
  EXPECT_EQ(plan.window_bytes(), 3 * kPageBytes);
  EXPECT_TRUE(plan.scales().quantized);
  EXPECT_FALSE(PlanOf(SmallJob()).scales().quantized);
  EXPECT_TRUE(plan.scales().steps_quantized);
  for (ParameterSpec& p : job.parameters) p.frozen = true;
  EXPECT_TRUE(PlanOf(job).scales().quantized);
  EXPECT_FALSE(PlanOf(job).scales().steps_quantized);
}

TEST(LayoutTest, Hash_IsGolden) { EXPECT_EQ(PlanOf(SmallJob()).hash(), "ea32528f29778f2d72a8a595db1a1619"); }

TEST(LayoutTest, Hash_ChangesWithEverythingThatMovesABit) {
  const std::vector<std::function<void(JobSpec&)>> changes = {
      [](JobSpec& j) { j.mesh = *ParseMeshSpec("ddp=1,fsdp=4"); },
      [](JobSpec& j) { j.mesh = *ParseMeshSpec("fsdp=2,ddp=2"); },
      [](JobSpec& j) { j.num_slots = 3; },
      [](JobSpec& j) { j.gradient_format = Format::kFp32; },
      [](JobSpec& j) { j.parameters[0].name = "x"; },
      [](JobSpec& j) {
        j.parameters[0].shape = {50, 3};
      },
      [](JobSpec& j) { j.parameters[0].shape = {150}; },
      [](JobSpec& j) {
        j.parameters[0].shape = {3, 51};
      },
      [](JobSpec& j) { j.parameters[0].format = WeightFormat::kBf16; },
      [](JobSpec& j) { j.parameters[1].format = WeightFormat::kBf16Sr; },
      [](JobSpec& j) { j.parameters[1].states = StateFormat::kDyn8; },
      [](JobSpec& j) { j.parameters[1].gather = GatherFormat::kFp8Tensor; },
      [](JobSpec& j) { j.parameters[1].gather = GatherFormat::kInt8Row; },
      [](JobSpec& j) { j.optimizer.kind = OptimizerKind::kLion; },  // one state
      [](JobSpec& j) { j.clip_norm = 1; },
      [](JobSpec& j) { j.parameters[1].frozen = true; },
      [](JobSpec& j) { std::swap(j.parameters[0], j.parameters[2]); },
      [](JobSpec& j) { j.parameters.pop_back(); },
      [](JobSpec& j) {
        j.parameters.push_back({"d", {150}, WeightFormat::kFp32});
      },
      [](JobSpec& j) {
        j.parameters.push_back({"d", {3, 50}, WeightFormat::kFp32, "a"});
      },
  };
  std::set<std::string> hashes = {PlanOf(SmallJob()).hash()};
  for (size_t i = 0; i < changes.size(); ++i) {
    JobSpec job = SmallJob();
    changes[i](job);
    EXPECT_TRUE(hashes.insert(PlanOf(job).hash()).second) << "change " << i;
  }
  JobSpec same = SmallJob();
  same.optimizer.lr = 0.5;
  same.more_groups = {same.optimizer};
  same.parameters[0].group = 1;
  same.seed = 9;
  EXPECT_EQ(PlanOf(same).hash(), PlanOf(SmallJob()).hash());  // layout alone
}

TEST(LayoutTest, BucketElements_CloseABucket) {
  JobSpec job = SmallJob();
  job.parameters.clear();
  for (const char* name : {"a", "b", "c"}) job.parameters.push_back({name, {600}, WeightFormat::kFp32});
  const Plan plan = PlanOf(job);  // 768 each: the second reaches 1536 >= 1024 and closes the bucket
  EXPECT_EQ(plan.placements()[1].bucket, 0);
  EXPECT_EQ(plan.placements()[2].bucket, 1);
  EXPECT_EQ(plan.placements()[2].offset, 0);
  job.bucket_elements = kDefaultBucketElements;
  EXPECT_EQ(PlanOf(job).buckets().size(), 1u);
}

TEST(LayoutTest, TiedParameter_HasItsOwnersPlace) {
  JobSpec job = SmallJob();
  job.parameters.insert(job.parameters.begin(), {"tied", {129}, WeightFormat::kFp32, "c"});  // before its owner
  const Plan plan = PlanOf(job);
  EXPECT_EQ(plan.placements()[0].bucket, plan.placements()[3].bucket);
  EXPECT_EQ(plan.placements()[0].offset, plan.placements()[3].offset);
  EXPECT_EQ(plan.total_elements(), PlanOf(SmallJob()).total_elements());
  for (const auto& run : plan.RunsIn(plan.placements()[3].bucket, 0, 512)) EXPECT_NE(run.tensor, 0);
}

// Frozen parameters: buckets of their own, in the parameter window alone.
TEST(LayoutTest, FrozenParameters_HaveNoGradients) {
  JobSpec job = SmallJob();
  job.clip_norm = 1;
  job.parameters = {{"a", {4096}, WeightFormat::kFp32},
                    {"b", {8192}, WeightFormat::kFp32},
                    {"c", {4096}, WeightFormat::kFp32},
                    {"none", {0}, WeightFormat::kFp32},
                    {"tied", {8192}, WeightFormat::kFp32, "b"}};
  job.bucket_elements = kDefaultBucketElements;
  const Plan all = PlanOf(job);
  for (int i : {1, 3, 4}) job.parameters[i].frozen = true;
  const Plan plan = PlanOf(job);
  ASSERT_EQ(plan.buckets().size(), 2u);
  EXPECT_FALSE(plan.buckets()[0].frozen);
  EXPECT_TRUE(plan.buckets()[1].frozen);
  for (int i : {0, 2}) EXPECT_EQ(plan.placements()[i].bucket, 0) << i;
  for (int i : {1, 3, 4}) EXPECT_EQ(plan.placements()[i].bucket, 1) << i;
  EXPECT_EQ(plan.buckets()[1].gradients(0), 0);
  EXPECT_EQ(plan.window_bytes(), all.window_bytes());
  EXPECT_EQ(plan.version_bytes(), all.version_bytes());
  EXPECT_EQ(plan.InitialShardBytes(0), all.InitialShardBytes(0));
  EXPECT_EQ(plan.gradient_window_bytes(), all.gradient_window_bytes() - 8192 * 2);
  EXPECT_EQ(plan.GradientShardBytes(0), all.GradientShardBytes(0) - 8192 * 2 / plan.num_shards());
  EXPECT_EQ(plan.norm_blocks(), all.norm_blocks() - 8192 / kBlockElements);
  for (int i : {0, 2}) job.parameters[i].frozen = true;
  EXPECT_EQ(PlanOf(job).gradient_window_bytes(), 0);
}

// Gradients of buckets behind a frozen one lie where they would without it.
TEST(LayoutTest, FrozenBucketBetweenOthers_TakesNoGradientSpace) {
  JobSpec job = SmallJob();
  job.clip_norm = 1;
  job.parameters = {{"a", {4096}, WeightFormat::kFp32}, {"b", {8192}, WeightFormat::kBf16}, {"c", {4096}}};
  job.parameters[1].frozen = true;
  job.bucket_elements = 4096;
  const Plan plan = PlanOf(job);
  ASSERT_EQ(plan.buckets().size(), 3u);
  EXPECT_TRUE(plan.buckets()[1].frozen);
  EXPECT_EQ(plan.buckets()[2].gradient_offset, 4096 * 2);
  EXPECT_EQ(plan.buckets()[2].first_block, 4096 / kBlockElements);
  EXPECT_EQ(plan.buckets()[2].weight_offset, 4096 * 4 + 8192 * 2);
}

TEST(LayoutTest, ScalarsAndEmptyTensors) {
  JobSpec job = SmallJob();
  job.parameters = {
      {"scalar", {}, WeightFormat::kFp32}, {"none", {4, 0}, WeightFormat::kFp32}, {"after", {65}, WeightFormat::kFp32}};
  const Plan plan = PlanOf(job);
  EXPECT_EQ(plan.placements()[0].num_elements, 1);
  EXPECT_EQ(plan.placements()[1].num_elements, 0);
  EXPECT_EQ(plan.placements()[2].offset, 256);
  EXPECT_EQ(plan.buckets()[0].num_elements, 512);
  EXPECT_EQ(plan.buckets()[0].padding, 512 - 66);
  job.parameters = {{"none", {0}, WeightFormat::kFp32}};
  const Plan nothing = PlanOf(job);
  EXPECT_EQ(nothing.total_elements(), 0);
  EXPECT_EQ(nothing.GradientShardBytes(0), 0);
  EXPECT_TRUE(nothing.RunsIn(0, 0, 0).empty());
}

TEST(LayoutTest, BadJob_IsRefused) {
  JobSpec job = SmallJob();
  job.num_slots = 0;
  EXPECT_THAT(Plan::Create(job), StatusIs(absl::StatusCode::kInvalidArgument, ::testing::HasSubstr("slots is 0")));
}

TEST(LayoutTest, PlaceOf_FollowsTheMeshOrder) {
  JobSpec job = SmallJob();
  job.mesh = *ParseMeshSpec("fsdp=2,ddp=3,x=2");  // shard, replicate, shard
  const Plan plan = PlanOf(job);
  EXPECT_EQ(plan.num_shards(), 4);
  EXPECT_EQ(plan.num_replicas(), 3);
  const ShardPlace place = plan.PlaceOf(Rank(1 * 6 + 2 * 2 + 1));  // coordinates (1, 2, 1)
  EXPECT_EQ(place.shard, 1 * 2 + 1);
  EXPECT_EQ(place.replica, 2);
}

// Random jobs against an oracle that writes the owner of every element into an array.
class LayoutProperty {
 public:
  explicit LayoutProperty(unsigned seed) : rng_(seed) {}

  void Run() {
    const JobSpec job = RandomJob();
    absl::StatusOr<Plan> created = Plan::Create(job);
    ASSERT_OK(created);
    const Plan& plan = *created;
    CheckRanks(plan);
    CheckWindows(job, plan);
    ASSERT_NO_FATAL_FAILURE(CheckElements(job, plan));
    EXPECT_EQ(plan.hash(), PlanOf(job).hash());
  }

 private:
  int Pick(int n) { return static_cast<int>(rng_() % n); }

  JobSpec RandomJob() {
    JobSpec job;
    job.name = "random";
    const char* names[] = {"ddp", "fsdp", "x", "replicate"};
    for (int d = 0; d <= Pick(3); ++d) job.mesh.dims.push_back({names[d], 1 + Pick(3), DefaultDimRole(names[d])});
    std::shuffle(job.mesh.dims.begin(), job.mesh.dims.end(), rng_);
    job.num_slots = 1 + Pick(3);
    job.gradient_format = Pick(2) ? Format::kFp32 : Format::kBf16;
    job.bucket_elements = kMinBucketElements << Pick(3);
    for (int i = 0, n = 1 + Pick(12); i < n; ++i) {
      ParameterSpec p{
          "p" + std::to_string(i), {}, static_cast<WeightFormat>(Pick(5)), "", static_cast<StateFormat>(Pick(2))};
      const int kind = Pick(8);
      if (kind == 0) p.shape = {0, 3};
      if (kind > 1) p.shape = {1 + Pick(40), 1 + Pick(kind == 2 ? 300 : 20)};
      if (kind > 3) p.gather = static_cast<GatherFormat>(Pick(3));
      const int owner = Pick(n);
      if (Pick(4) == 0 && owner < i && job.parameters[owner].tied_to.empty()) {
        p = {p.name,
             job.parameters[owner].shape,
             job.parameters[owner].format,
             job.parameters[owner].name,
             job.parameters[owner].states,
             job.parameters[owner].gather};
      }
      job.parameters.push_back(p);
    }
    return job;
  }

  void CheckRanks(const Plan& plan) {
    std::set<std::pair<int, int>> seen;
    for (int r = 0; r < plan.num_ranks(); ++r) {
      const ShardPlace place = plan.PlaceOf(Rank(r));
      EXPECT_TRUE(place.shard >= 0 && place.shard < plan.num_shards());
      EXPECT_TRUE(place.replica >= 0 && place.replica < plan.num_replicas());
      EXPECT_TRUE(seen.emplace(place.shard, place.replica).second);
      EXPECT_EQ(plan.RankOf(place), Rank(r));
    }
  }

  void CheckWindows(const JobSpec& job, const Plan& plan) {
    int64_t weights = 0, gradients = 0, version = 0, total = 0;
    for (const Bucket& b : plan.buckets()) {
      EXPECT_EQ(b.weight_offset % kPageBytes, 0);
      EXPECT_EQ(b.gradient_offset % kPageBytes, 0);
      EXPECT_GE(b.weight_offset, weights);  // disjoint, ascending
      EXPECT_GE(b.gradient_offset, gradients);
      EXPECT_LT(b.weight_offset - weights, kPageBytes);
      int64_t bytes = b.num_elements * (b.quantized() ? 1 : BytesPerElement(b.format()));
      for (size_t t = 0; t < job.parameters.size(); ++t) {
        const Placement& at = plan.placements()[t];
        if (!job.parameters[t].tied_to.empty() || &plan.buckets()[at.bucket] != &b) continue;
        EXPECT_EQ(at.scale_offset, bytes);
        bytes += 4 * at.scales.num_blocks;
      }
      bytes = (bytes + 15) / 16 * 16;
      EXPECT_EQ(b.weight_bytes, bytes);
      weights = b.weight_offset + bytes;
      gradients = b.gradient_offset + b.num_elements * BytesPerElement(job.gradient_format);
      version += bytes;
      total += b.num_elements;
      EXPECT_EQ(b.num_elements, b.shard_elements * plan.num_shards());
      EXPECT_EQ(b.shard_elements % kBlockElements, 0);
    }
    EXPECT_LE(weights, plan.window_bytes());
    EXPECT_LE(gradients, plan.gradient_window_bytes());
    EXPECT_EQ(version, plan.version_bytes());
    EXPECT_EQ(total, plan.total_elements());
  }

  void CheckElements(const JobSpec& job, const Plan& plan) {
    for (int b = 0; b < static_cast<int>(plan.buckets().size()); ++b) {
      const Bucket& bucket = plan.buckets()[b];
      std::vector<int> owner(bucket.num_elements, -1);      // -1: padding
      std::vector<int64_t> index(bucket.num_elements, -1);  // in its tensor
      int64_t real = 0;
      for (int t = 0; t < static_cast<int>(job.parameters.size()); ++t) {
        const Placement& p = plan.placements()[t];
        if (p.bucket != b || !job.parameters[t].tied_to.empty()) continue;
        ASSERT_EQ(p.offset % kBlockElements, 0);
        ASSERT_EQ(job.parameters[t].format, bucket.weights);
        ASSERT_EQ(job.parameters[t].gather, bucket.gather);
        ASSERT_EQ(p.num_elements, job.parameters[t].NumElements());
        real += p.num_elements;
        for (int64_t e = 0; e < p.num_elements; ++e) {
          ASSERT_LT(p.offset + e, bucket.num_elements);
          ASSERT_EQ(owner[p.offset + e], -1) << "two tensors at one place";
          owner[p.offset + e] = t;
          index[p.offset + e] = e;
        }
      }
      EXPECT_EQ(bucket.padding, bucket.num_elements - real);
      EXPECT_LT(bucket.padding, kBlockElements * (static_cast<int64_t>(job.parameters.size()) + plan.num_shards()));
      CheckRuns(plan, b, owner, index);
    }
  }

  // The runs of every shard, and of random stretches, name each owned element once and in order.
  void CheckRuns(const Plan& plan, int b, const std::vector<int>& owner, const std::vector<int64_t>& index) {
    const Bucket& bucket = plan.buckets()[b];
    std::vector<std::pair<int64_t, int64_t>> stretches;
    for (int s = 0; s < plan.num_shards(); ++s) {
      stretches.emplace_back(s * bucket.shard_elements, (s + 1) * bucket.shard_elements);
    }
    const int groups = static_cast<int>(bucket.num_elements / kBlockElements);
    for (int i = 0; i < 5; ++i) {
      const int a = Pick(groups + 1), c = Pick(groups + 1);
      stretches.emplace_back(std::min(a, c) * kBlockElements, std::max(a, c) * kBlockElements);
    }
    for (const auto& [begin, end] : stretches) {
      int64_t at = begin;
      for (const auto& run : plan.RunsIn(b, begin, end)) {
        for (; at < run.bucket_offset; ++at) EXPECT_EQ(owner[at], -1) << "left out";
        EXPECT_EQ(run.first_element % kBlockElements, 0);
        const bool to_the_end = run.first_element + run.num_elements == plan.placements()[run.tensor].num_elements;
        EXPECT_TRUE(run.num_elements % kBlockElements == 0 || to_the_end);
        EXPECT_GT(run.num_elements, 0);
        for (int64_t e = 0; e < run.num_elements; ++e, ++at) {
          EXPECT_EQ(owner[at], run.tensor);
          EXPECT_EQ(index[at], run.first_element + e);
        }
      }
      EXPECT_LE(at, end);
      for (; at < end; ++at) EXPECT_EQ(owner[at], -1) << "left out";
    }
  }

  std::mt19937 rng_;
};

TEST(LayoutTest, RandomJobs_AgreeWithTheOracle) {
  const char* fixed = std::getenv("SHARDMESH_TEST_SEED");
  const unsigned seed = fixed != nullptr ? std::stoul(fixed) : std::random_device()();
  std::printf("seed %u (repeat with SHARDMESH_TEST_SEED)\n", seed);
  LayoutProperty property(seed);
  for (int round = 0; round < 60; ++round) {
    ASSERT_NO_FATAL_FAILURE(property.Run()) << "seed " << seed << " round " << round;
    ASSERT_FALSE(::testing::Test::HasFailure()) << "seed " << seed << " round " << round;
  }
}

}  // namespace
}  // namespace shardmesh
