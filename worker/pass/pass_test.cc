#include "worker/pass/pass.h"

#include "worker/testing/pass_group.h"

namespace shardmesh {
namespace {

constexpr int kSteps = 5;

TEST(PassTest, EveryMeshAndThreadCount_TrainsToTheOraclesBits) {
  TrainingOracle oracle(MixedJob("fsdp=1", 3));
  std::vector<std::unique_ptr<PassGroup>> groups;
  std::vector<std::string> names;
  for (const char* mesh :
       {"fsdp=1", "fsdp=2", "fsdp=3", "fsdp=4", "ddp=2", "ddp=2,fsdp=2", "fsdp=3,ddp=2", "ddp=2,fsdp=4"}) {
    for (int threads : {1, 2}) {
      groups.push_back(std::make_unique<PassGroup>(MixedJob(mesh, 3), threads));
      names.push_back(std::string(mesh) + " threads=" + std::to_string(threads));
      groups.back()->PlaceWeights();
      ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(*groups.back(), oracle, names.back() + " initial"));
      EXPECT_EQ(groups.back()->Publication(0), groups.back()->Window());
    }
  }
  ASSERT_GT(groups[0]->plan.buckets().size(), 4u);
  for (int64_t step = 1; step <= kSteps; ++step) {
    if (step != kSkippedStep) oracle.RunStep(step);
    for (size_t i = 0; i < groups.size(); ++i) {
      const std::string what = names[i] + " step " + std::to_string(step);
      groups[i]->RunStep(step);
      ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(*groups[i], oracle, what));
      EXPECT_EQ(groups[i]->Publication(step % 2) == groups[i]->Window(), step != kSkippedStep) << what;
    }
  }
}

TEST(PassTest, Fp32GradientsAndOneSlot_TrainToTheOraclesBits) {
  JobSpec job = MixedJob("ddp=2,fsdp=2", 1);
  job.gradient_format = Format::kFp32;
  TrainingOracle oracle(job);
  PassGroup group(job, 2);
  group.PlaceWeights();
  for (int64_t step = 1; step <= 2; ++step) {
    oracle.RunStep(step);
    group.RunStep(step);
    ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(group, oracle, "step " + std::to_string(step)));
  }
}

TEST(PassTest, SkippedStep_ChangesNoByte) {
  PassGroup group(MixedJob("fsdp=2", 2), 2);
  group.PlaceWeights();
  group.RunStep(1);
  const std::vector<char> window = group.Window(), first = group.Publication(0), second = group.Publication(1);
  const uint64_t digest = group.Digest();
  const int64_t gathered = group.passes[0]->gathered_bytes();
  group.RunStep(kSkippedStep);
  EXPECT_EQ(group.Window(), window);
  EXPECT_EQ(group.Publication(0), first);
  EXPECT_EQ(group.Publication(1), second);
  EXPECT_EQ(group.Digest(), digest);
  EXPECT_EQ(group.passes[0]->gathered_bytes(), gathered);
}

TEST(PassTest, ReplicasShareTheWritingOfTheWindow) {
  PassGroup one(MixedJob("fsdp=1", 1), 1), two(MixedJob("ddp=2", 1), 1);
  for (PassGroup* group : {&one, &two}) {
    group->PlaceWeights();
    group->RunStep(1);
  }
  const int64_t a = two.passes[0]->gathered_bytes(), b = two.passes[1]->gathered_bytes();
  EXPECT_GT(a, 0);
  EXPECT_GT(b, 0);
  EXPECT_EQ(a + b, one.passes[0]->gathered_bytes());
}

}  // namespace
}  // namespace shardmesh
