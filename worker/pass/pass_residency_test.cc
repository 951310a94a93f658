// Pass: with bucket residency a step gives the bits that it gives with full residency, whatever the window holds.
#include <random>

#include "worker/pass/pass.h"
#include "worker/testing/numerics_oracle.h"
#include "worker/testing/pass_group.h"

namespace shardmesh {
namespace {

// Frozen parameters, weights gathered in codes, among them frozen ones, two groups, the norm.
JobSpec BucketJob(const std::string& mesh, double clip_norm) {
  JobSpec job = MixedJob(mesh, 3);
  job.residency = Residency::kBucket;
  job.clip_norm = clip_norm;
  job.more_groups = {job.optimizer};
  job.more_groups[0].lr = 0.01;
  job.parameters[2].group = 1;
  const StateFormat fp32 = StateFormat::kFp32;
  job.parameters.push_back({"rows", {40, 192}, WeightFormat::kBf16Sr, "", fp32, GatherFormat::kFp8Row});
  job.parameters.push_back({"frozen", {9000}, WeightFormat::kFp32, "", fp32, GatherFormat::kStored, 0, true});
  job.parameters.push_back({"codes", {40, 128}, WeightFormat::kBf16, "", fp32, GatherFormat::kFp8Tensor, 0, true});
  return job;
}

int64_t SlotBytes(const PassGroup& group) { return group.host.Resident().slots; }

TEST(PassResidencyTest, AnyBucketsHeld_TheBitsOfTheOracle) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (const char* mesh : {"fsdp=1", "fsdp=3", "ddp=2,fsdp=2"}) {
    for (const double clip_norm : {0.0, 0.01}) {
      PassGroup group(BucketJob(mesh, clip_norm), 2);
      group.PlaceWeights();
      NumericsOracle oracle(group.job);
      const int buckets = static_cast<int>(group.plan.buckets().size());
      int64_t nothing = 0;
      for (int b = 0; b < buckets; ++b) {
        group.Drop(b);
        nothing += AbsentWeights(group.plan).PageBytes(b);
      }
      for (int64_t step = 1; step <= 4; ++step) {
        std::vector<int> held;
        for (int b = 0; b < buckets; ++b) {
          if (random() % 2 == 0) held.push_back(b);
        }
        for (int b : held) group.Hold(b);
        group.RunStep(step);
        if (step != kSkippedStep) oracle.RunStep(step);
        for (int t = 0; t < static_cast<int>(group.job.parameters.size()); ++t) {
          const int b = group.plan.placements()[t].bucket;
          if (std::find(held.begin(), held.end(), b) == held.end()) continue;
          ASSERT_EQ(group.TensorInWindow(t), oracle.Stored(group.job.StorageOf(t)))
              << mesh << " step " << step << ": " << group.job.parameters[t].name;
        }
        for (int b : held) group.Drop(b);
        EXPECT_EQ(group.host.window().ResidentBytes(), nothing);
      }
      group.HoldAll();
      ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(group, oracle, mesh));
    }
  }
}

// What was summed takes no memory in the slots any more, bucket by bucket.
TEST(PassResidencyTest, SummedBuckets_GiveTheirPagesBack) {
  PassGroup group(BucketJob("fsdp=2", 0), 1);
  group.PlaceWeights();
  group.WriteGradients(1);
  int64_t before = SlotBytes(group);
  ASSERT_GT(before, 0);
  for (int b = 0; b < static_cast<int>(group.plan.buckets().size()); ++b) {
    if (group.plan.buckets()[b].frozen) continue;
    group.Execute(group.BucketCommand(CommandKind::kReduceBucket, b));
    EXPECT_EQ(SlotBytes(group), before);
    ASSERT_OK(group.passes[0]->GiveBackGradients(group.BucketCommand(CommandKind::kReduceBucket, b)));
    EXPECT_LE(SlotBytes(group), before - group.job.num_slots * kPageBytes);
    before = SlotBytes(group);
  }
  EXPECT_EQ(before, 0);
}

}  // namespace
}  // namespace shardmesh
