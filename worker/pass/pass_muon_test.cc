// Pass: matrices that Muon steps, each whole at one worker, beside parameters of other optimizers: the bits of the
// reference kernel on the whole matrix, on any mesh and any number of threads. (Workers that are killed on the way:
// pass_restart_test.cc.)
#include <algorithm>
#include <string>
#include <vector>

#include "worker/pass/pass.h"
#include "worker/testing/numerics_oracle.h"
#include "worker/testing/pass_group.h"

namespace shardmesh {
namespace {

OptimizerHyper MuonOf(double lr, bool nesterov) {
  OptimizerHyper hyper = OptimizerHyper::Defaults(OptimizerKind::kMuon);
  hyper.lr = lr;
  hyper.nesterov = nesterov;
  return hyper;
}

// Two groups of Muon; one of AdamW, Lion and SGD without states each. Matrices of any shape in all formats, one tied to
// another, one frozen, one without elements.
JobSpec MuonJob(const std::string& mesh) {
  JobSpec job = SmallJob(mesh, 3);
  job.seed = 21;
  job.gradient_format = Format::kBf16;
  job.bucket_elements = 20'000;
  job.more_groups = {MuonOf(0.02, true), OptimizerHyper::Defaults(OptimizerKind::kLion), MuonOf(0.05, false),
                     OptimizerHyper::Defaults(OptimizerKind::kSgd)};
  job.more_groups[2].maximize = true;
  const std::vector<std::vector<int64_t>> shapes = {{96, 128}, {37, 53}, {130, 70}, {1, 257}, {300, 2}, {64, 64}};
  for (int i = 0; i < 24; ++i) {  // the last ones share buckets
    ParameterSpec p{"matrix-" + std::to_string(i), shapes[i % 6], static_cast<WeightFormat>(i < 18 ? i % 5 : 2)};
    p.states = i < 18 ? static_cast<StateFormat>(i / 3) : StateFormat::kDyn8;
    p.group = i % 4 == 1 ? 3 : 1;
    job.parameters.push_back(p);
  }
  const ParameterSpec owner = job.parameters[4];
  job.parameters.push_back({"tied", owner.shape, owner.format, owner.name, owner.states, owner.gather, 0});
  job.parameters.push_back({"none", {0, 7}, WeightFormat::kFp32, "", StateFormat::kFp32, GatherFormat::kStored, 1});
  job.parameters.push_back(
      {"frozen", {9}, WeightFormat::kFp32, "", StateFormat::kFp32, GatherFormat::kStored, 1, true});
  job.parameters.push_back({"lion", {999}, WeightFormat::kBf16Sr, "", StateFormat::kDyn8, GatherFormat::kStored, 2});
  job.parameters.push_back({"sgd", {33, 3}, WeightFormat::kFp32, "", StateFormat::kFp32, GatherFormat::kStored, 4});
  return job;
}

void ExpectEverywhere(const std::function<JobSpec(const std::string& mesh)>& job_on, int64_t steps) {
  OracleInput input;
  input.rates = [](int group, int64_t step) { return 0.01 * static_cast<double>(1 + group * step); };
  NumericsOracle oracle(job_on("fsdp=1"), input);
  std::vector<std::unique_ptr<PassGroup>> groups;
  for (const auto& [mesh, threads] :
       {std::pair("fsdp=1", 1), {"fsdp=1", 3}, {"fsdp=3", 2}, {"ddp=2,fsdp=2", 1}, {"ddp=3", 2}, {"fsdp=8", 1}}) {
    groups.push_back(std::make_unique<PassGroup>(job_on(mesh), threads));
    groups.back()->rates = input.rates;
    groups.back()->PlaceWeights();
    ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(*groups.back(), oracle, std::string(mesh) + " initial"));
  }
  for (int64_t step = 1; step <= steps; ++step) {
    if (step != kSkippedStep) oracle.RunStep(step);
    for (const auto& group : groups) {
      group->RunStep(step);
      ASSERT_NO_FATAL_FAILURE(
          ExpectEqualsOracle(*group, oracle, group->job.mesh.ToString() + " step " + std::to_string(step)));
      if (step == kSkippedStep) continue;
      EXPECT_EQ(group->Publication(static_cast<int>(step % 2)), group->Window());
    }
  }
}

TEST(PassMuon, EveryMesh_GivesTheReferencesBits) { ExpectEverywhere(MuonJob, 4); }

TEST(PassMuon, ClippedGradients_GiveTheReferencesBits) {
  const auto job_on = [](const std::string& mesh) {
    JobSpec job = MuonJob(mesh);
    job.clip_norm = 0.1;
    return job;
  };
  ExpectEverywhere(job_on, 2);
}

TEST(PassMuon, EveryGatherFormat_GivesTheReferencesBits) {
  const auto job_on = [](const std::string& mesh) {
    JobSpec job = MuonJob(mesh);
    int i = 0;
    for (ParameterSpec& p : job.parameters) {
      if (p.group == 0 || p.NumElements() == 0 || !p.tied_to.empty()) continue;
      const GatherFormat gathers[] = {GatherFormat::kFp8Block, GatherFormat::kFp8Tensor, GatherFormat::kStored,
                                      GatherFormat::kInt8Row,  GatherFormat::kFp8Row,    GatherFormat::kMx8};
      do p.gather = gathers[i++ % 6];
      while (!ScaleBlocksOf(p.gather, p.shape).ok());
    }
    for (ParameterSpec& p : job.parameters) {
      if (p.name == "tied") p.gather = job.parameters[4].gather;
    }
    return job;
  };
  ExpectEverywhere(job_on, 2);
}

// A shard has the matrices that it owns, whole, and no other; so shards differ in size, and the largest of one has the
// scratch for its own alone.
TEST(PassMuon, Matrices_LieWholeAtTheirOwners) {
  const PassGroup group(MuonJob("fsdp=3"), 1);
  int matrices = 0;
  for (int r = 0; r < 3; ++r) {
    const ShardStorage& storage = *group.storages[r];
    MuonSpace space;
    for (int i = 0; i < static_cast<int>(storage.ranges().size()); ++i) {
      const StorageRange& range = storage.ranges()[i];
      const Bucket& bucket = group.plan.buckets()[range.bucket];
      EXPECT_EQ(range.matrix >= 0, bucket.owned());
      if (range.matrix < 0) continue;
      ++matrices;
      int64_t elements = 0;
      for (const ChunkRun& run : storage.runs(i)) elements += run.num_elements;
      const int tensor = storage.runs(i).front().tensor;
      EXPECT_EQ(elements, group.job.parameters[tensor].NumElements());
      EXPECT_LT(range.num_elements - elements, kBlockElements);
      EXPECT_EQ(range.spare(), std::min(kChunkElements, range.num_elements));
      space.Include(group.job.parameters[tensor].shape[0], group.job.parameters[tensor].shape[1]);
    }
    EXPECT_EQ(storage.scratch_space().num_bytes(), space.num_bytes());
    EXPECT_EQ(storage.num_bytes(), ShardStorage::NumBytes(group.plan, r));
  }
  EXPECT_EQ(matrices, 24);
  EXPECT_EQ(StorageBytesOfAll(group.plan),
            group.storages[0]->num_bytes() + group.storages[1]->num_bytes() + group.storages[2]->num_bytes());
}

}  // namespace
}  // namespace shardmesh
