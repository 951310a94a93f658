// Pass: weights that are gathered in codes are those that kernels/encode/encode.h gives for the whole of each tensor,
// on every mesh, in the window and in the publication. (Workers that are killed on the way: pass_restart_test.cc.)
#include <string>
#include <vector>

#include "worker/pass/pass.h"
#include "worker/testing/numerics_oracle.h"
#include "worker/testing/pass_group.h"

namespace shardmesh {
namespace {

constexpr GatherFormat kGathers[] = {GatherFormat::kFp8Tensor, GatherFormat::kFp8Row,  GatherFormat::kFp8Block,
                                     GatherFormat::kMx8,       GatherFormat::kInt8Row, GatherFormat::kNf4};
constexpr WeightFormat kWeights[] = {WeightFormat::kFp32, WeightFormat::kBf16Sr, WeightFormat::kBf16Plus16,
                                     WeightFormat::kBf16Plus8Sr};

// Odd shapes in every gather format that takes them, of weights in numbers and in rows of int8, one of them tied, and
// some that are not quantized among them.
JobSpec GatherJob(const std::string& mesh) {
  const std::vector<std::vector<int64_t>> shapes = {{}, {7, 19}, {300, 1}, {3, 320}, {130, 257}, {2, 4096 + 32}};
  JobSpec job = SmallJob(mesh, 2);
  job.seed = 5;
  job.gradient_format = Format::kBf16;
  job.bucket_elements = 60'000;
  job.parameters = {{"plain", {1000}, WeightFormat::kBf16Sr}, {"none", {0, 3}, WeightFormat::kFp32}};
  int number = 0;
  for (const GatherFormat gather : kGathers) {
    for (const std::vector<int64_t>& shape : shapes) {
      if (!ScaleBlocksOf(gather, shape).ok()) continue;
      const std::string name = std::string(GatherFormatName(gather)) + "." + std::to_string(++number);
      const StateFormat states = number % 2 == 0 ? StateFormat::kFp32 : StateFormat::kDyn8;
      job.parameters.push_back({name, shape, kWeights[number % 4], "", states, gather});
      if (gather == GatherFormat::kInt8Row) continue;
      job.parameters.push_back({"rows." + name, shape, WeightFormat::kInt8Row, "", states, gather});
    }
  }
  for (const std::vector<int64_t>& shape : shapes) {  // a table of scales that several shards fill
    for (const GatherFormat gather : {GatherFormat::kStored, GatherFormat::kNf4}) {
      const std::string name = "base." + std::to_string(++number);
      job.parameters.push_back({name, shape, WeightFormat::kNf4, "", StateFormat::kFp32, gather});
      job.parameters.back().frozen = true;
    }
  }
  job.parameters.push_back({"base.none", {0, 3}, WeightFormat::kNf4});
  job.parameters.back().frozen = true;
  ParameterSpec tied = job.parameters.back();
  tied = job.parameters[job.parameters.size() - 2];
  tied.tied_to = tied.name;
  tied.name = "tied";
  job.parameters.push_back(tied);
  return job;
}

TEST(PassGather, EveryFormatOnEveryMesh_IsEncodeOfTheWholeTensor) {
  NumericsOracle oracle(GatherJob("fsdp=1"));
  std::vector<std::unique_ptr<PassGroup>> groups;
  const std::vector<std::pair<std::string, int>> meshes = {{"fsdp=1", 1}, {"fsdp=2", 2}, {"fsdp=3", 1},
                                                           {"fsdp=8", 1}, {"ddp=3", 2},  {"ddp=2,fsdp=2,x=2", 1}};
  for (const auto& [mesh, threads] : meshes) {
    groups.push_back(std::make_unique<PassGroup>(GatherJob(mesh), threads));
    groups.back()->PlaceWeights();
    ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(*groups.back(), oracle, mesh + " initial"));
    EXPECT_EQ(groups.back()->Publication(0), groups.back()->Window());
  }
  for (int64_t step = 1; step <= 4; ++step) {
    if (step != kSkippedStep) oracle.RunStep(step);
    for (size_t i = 0; i < groups.size(); ++i) {
      groups[i]->RunStep(step);
      const std::string what = meshes[i].first + " step " + std::to_string(step);
      ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(*groups[i], oracle, what));
      const int published = step == kSkippedStep ? 0 : static_cast<int>(step % 2);
      EXPECT_EQ(groups[i]->Publication(published), groups[i]->Window()) << what;
    }
  }
}

// A step alone writes nothing of quantized weights into the window, and an unpublished one nothing into a publication.
TEST(PassGather, TheStepItself_LeavesCodesAlone) {
  JobSpec job = GatherJob("fsdp=1");
  job.parameters.erase(job.parameters.begin(), job.parameters.begin() + 2);  // what is not quantized
  PassGroup group(job, 1);
  group.PlaceWeights();
  const std::vector<char> window = group.Window(), other = group.Publication(1);
  group.WriteGradients(2);
  Command command = group.StepCommand(2);
  command.publish = -1;
  group.Execute(command);
  EXPECT_EQ(group.Window(), window);
  group.parity = 1 - group.parity;
  group.Gather(command);
  EXPECT_NE(group.Window(), window);
  EXPECT_EQ(group.Publication(0), window);
  EXPECT_EQ(group.Publication(1), other);
}

TEST(PassGather, GatheredBytes_CountCodesOnce) {
  JobSpec job = SmallJob("ddp=2,fsdp=2", 1);
  for (ParameterSpec& p : job.parameters) p.gather = GatherFormat::kFp8Tensor;
  PassGroup group(job, 1);
  group.PlaceWeights();
  group.RunStep(1);
  int64_t bytes = 0;
  for (const auto& pass : group.passes) bytes += pass->gathered_bytes();
  EXPECT_EQ(bytes, 157);  // initial weights are not counted
}

}  // namespace
}  // namespace shardmesh
