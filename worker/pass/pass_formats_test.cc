// Pass: every optimizer, weight format and state format gives the bits of the reference kernel on whole tensors, on any
// mesh.
#include <string>
#include <vector>

#include "worker/pass/pass.h"
#include "worker/testing/numerics_oracle.h"
#include "worker/testing/pass_group.h"

namespace shardmesh {
namespace {

constexpr int kSteps = 4;

// All hyper-parameters that each has, set and different.
std::vector<OptimizerHyper> Optimizers() {
  std::vector<OptimizerHyper> all;
  for (const OptimizerKind kind :
       {OptimizerKind::kSgd, OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kLion}) {
    OptimizerHyper hyper = OptimizerHyper::Defaults(kind);
    hyper.lr = 0.03;
    hyper.weight_decay = 0.02;
    if (kind == OptimizerKind::kSgd) all.push_back(hyper);  // without momentum: no state
    hyper.momentum = 0.7;
    hyper.nesterov = kind == OptimizerKind::kSgd;
    hyper.amsgrad = kind == OptimizerKind::kAdam;
    hyper.maximize = kind == OptimizerKind::kLion;
    all.push_back(hyper);
  }
  return all;
}

constexpr WeightFormat kWeights[] = {WeightFormat::kFp32,       WeightFormat::kBf16,        WeightFormat::kBf16Sr,
                                     WeightFormat::kBf16Plus16, WeightFormat::kBf16Plus8Sr, WeightFormat::kInt8Row};
constexpr StateFormat kStateFormats[] = {StateFormat::kFp32, StateFormat::kBf16Sr, StateFormat::kDyn8,
                                         StateFormat::kDyn4, StateFormat::kFp8,    StateFormat::kFp8x32};

// Odd sizes in every pair of formats: a scalar, less than a block, blocks and a rest, more than a chunk, rows that fill
// blocks together.
JobSpec EveryFormat(const std::string& mesh, const OptimizerHyper& optimizer) {
  JobSpec job = SmallJob(mesh, 3);
  job.seed = 9;
  job.gradient_format = Format::kBf16;
  job.optimizer = optimizer;
  job.bucket_elements = 1 << 20;
  job.parameters.clear();
  for (const WeightFormat weights : kWeights) {
    for (const StateFormat states : kStateFormats) {
      const std::string name = std::string(WeightFormatName(weights)) + "." + std::string(StateFormatName(states));
      job.parameters.push_back({name + ".scalar", {}, weights, "", states});
      job.parameters.push_back({name + ".short", {7, 19}, weights, "", states});
      job.parameters.push_back({name + ".rest", {1000}, weights, "", states});
      job.parameters.push_back({name + ".long", {kChunkElements + 300}, weights, "", states});
      job.parameters.push_back({name + ".rows", {67, 96}, weights, "", states});
    }
  }
  return job;
}

TEST(PassFormats, EveryOptimizerAndFormat_OnEveryMesh_GivesTheReferencesBits) {
  for (const OptimizerHyper& optimizer : Optimizers()) {
    NumericsOracle oracle(EveryFormat("fsdp=1", optimizer));
    std::vector<std::unique_ptr<PassGroup>> groups;
    std::vector<std::string> names;
    for (const auto& [mesh, threads] : {std::pair("fsdp=1", 1), {"fsdp=3", 2}, {"ddp=2,fsdp=2", 1}, {"fsdp=8", 2}}) {
      groups.push_back(std::make_unique<PassGroup>(EveryFormat(mesh, optimizer), threads));
      names.push_back(std::string(OptimizerName(optimizer.kind)) + " " + mesh);
      groups.back()->PlaceWeights();
      ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(*groups.back(), oracle, names.back() + " initial"));
    }
    for (int64_t step = 1; step <= kSteps; ++step) {
      if (step != kSkippedStep) oracle.RunStep(step);
      for (size_t i = 0; i < groups.size(); ++i) {
        groups[i]->RunStep(step);
        ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(*groups[i], oracle, names[i] + " step " + std::to_string(step)));
      }
    }
  }
}

// A job of `optimizer` in three groups: everything that it reads is different in each, and neighbours in a bucket are
// of different groups.
JobSpec InGroups(const std::string& mesh, const OptimizerHyper& optimizer) {
  JobSpec job = EveryFormat(mesh, optimizer);
  for (int g = 1; g < 3; ++g) {
    OptimizerHyper hyper = optimizer;
    hyper.lr /= 1 + g;
    hyper.weight_decay = g == 1 ? 0 : 0.2;
    hyper.beta1 -= 0.2 * g;
    hyper.beta2 -= 0.04 * g;
    hyper.eps *= 100 * g;
    hyper.momentum /= 1 + g;
    hyper.nesterov = optimizer.nesterov && g == 2;
    hyper.dampening = hyper.nesterov ? 0.0 : 0.1 * g;
    hyper.maximize = g == 2;
    job.more_groups.push_back(hyper);
  }
  for (size_t t = 0; t < job.parameters.size(); ++t) job.parameters[t].group = static_cast<int>(t % 3);
  job.parameters.push_back({"tied", job.parameters[3].shape, job.parameters[3].format, job.parameters[3].name,
                            job.parameters[3].states, job.parameters[3].gather,
                            2});  // of another group than its owner, which counts
  return job;
}

TEST(PassFormats, ParameterGroups_WithRatesOfTheirOwn_GiveTheReferencesBits_OnEveryMesh) {
  const GroupRates rates = [](int group, int64_t step) { return 0.01 * static_cast<double>(1 + group * step); };
  for (const OptimizerHyper& optimizer : Optimizers()) {
    for (const auto& [mesh, threads] : {std::pair("fsdp=1", 2), {"fsdp=3", 1}, {"ddp=2,fsdp=2", 2}}) {
      PassGroup group(InGroups(mesh, optimizer), threads);
      group.rates = rates;
      OracleInput input;
      input.rates = rates;
      NumericsOracle oracle(group.job, input);
      group.PlaceWeights();
      for (int64_t step = 1; step <= 2; ++step) {
        oracle.RunStep(step);
        group.RunStep(step);
        ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(group, oracle, mesh));
      }
    }
  }
}

// Clipped by the norm over all parameters, each element once, whatever the mesh and its replicas.
TEST(PassFormats, ClippedGradients_GiveTheReferencesBits_OnEveryMesh) {
  const auto job_on = [](const std::string& mesh) {
    JobSpec job = EveryFormat(mesh, OptimizerHyper::Defaults(OptimizerKind::kAdamW));
    job.parameters.push_back({"tied", job.parameters[3].shape, job.parameters[3].format, job.parameters[3].name});
    job.clip_norm = 0.5;
    return job;
  };
  for (const auto& [mesh, threads] : {std::pair("fsdp=1", 2), {"fsdp=3", 1}, {"ddp=2,fsdp=2", 2}, {"ddp=3", 1}}) {
    PassGroup group(job_on(mesh), threads);
    NumericsOracle oracle(group.job);
    group.PlaceWeights();
    for (int64_t step = 1; step <= 2; ++step) {
      oracle.RunStep(step);
      group.RunStep(step);
      ASSERT_NO_FATAL_FAILURE(ExpectEqualsOracle(group, oracle, mesh));
      EXPECT_EQ(GradientNorm(group.job, group.plan, SquareSums(group.host.control())), oracle.norm());
    }
  }
}

// The norm beside its definition in double precision. Each of the sums has an error of at most 2^-24 of it for every
// addition on the way to the root: 32 + 3 in a block, and 15 in the trees.
TEST(PassFormats, TheNorm_IsThatOfAllGradients) {
  JobSpec job = EveryFormat("fsdp=1", OptimizerHyper::Defaults(OptimizerKind::kAdamW));
  job.clip_norm = 1;
  NumericsOracle oracle(job);
  oracle.RunStep(1);
  double squares = 0;
  for (size_t t = 0; t < job.parameters.size(); ++t) {
    for (int64_t e = 0; e < job.parameters[t].NumElements(); ++e) {
      double sum = 0;
      for (int slot = 0; slot < 3; ++slot) sum += GradientValue(Format::kBf16, slot, 1, static_cast<int>(t), e);
      squares += sum / 3 * (sum / 3);
    }
  }
  EXPECT_GT(oracle.norm(), job.clip_norm);  // they are clipped
  EXPECT_NEAR(oracle.norm() / std::sqrt(squares), 1, 50 * 0x1p-24);
}

}  // namespace
}  // namespace shardmesh
