// Contract 1, in every format: with each optimizer and each format of weights and states, what a job has learnt is
// bit-identical on 1 to 8 workers, on meshes of up to three dimensions, for attached and connected trainers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "absl/strings/str_cat.h"
#include "core/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training.h"
#include "tests/testing/variant.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::Variant;

constexpr int kSlots = 3;  // of the variants
#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kSteps = 8;  // every pass and format, at a tenth of the speed
#else
constexpr int64_t kSteps = 50;
#endif

struct Combination {
  OptimizerKind kind;
  WeightFormat weights;
  StateFormat states;
  bool amsgrad = false;
  double clip_norm = 0;
};

// Every optimizer, every format of weights and every one of states, each more than once.
constexpr Combination kCombinations[] = {
    {OptimizerKind::kAdamW, WeightFormat::kFp32, StateFormat::kFp32},
    {OptimizerKind::kAdamW, WeightFormat::kBf16Sr, StateFormat::kFp32, false, /*clip_norm=*/1.0},
    {OptimizerKind::kAdamW, WeightFormat::kBf16Sr, StateFormat::kDyn8},
    {OptimizerKind::kAdamW, WeightFormat::kBf16Plus8Sr, StateFormat::kFp8x32},
    {OptimizerKind::kAdamW, WeightFormat::kBf16Plus16, StateFormat::kBf16Sr},
    {OptimizerKind::kAdamW, WeightFormat::kBf16Sr, StateFormat::kDyn4},
    {OptimizerKind::kAdamW, WeightFormat::kFp32, StateFormat::kFp8},
    {OptimizerKind::kAdam, WeightFormat::kBf16Plus8Sr, StateFormat::kDyn8, /*amsgrad=*/true},
    {OptimizerKind::kAdam, WeightFormat::kBf16, StateFormat::kFp8x32},
    {OptimizerKind::kLion, WeightFormat::kBf16Sr, StateFormat::kBf16Sr, false, /*clip_norm=*/0.5},
    {OptimizerKind::kLion, WeightFormat::kBf16Plus16, StateFormat::kFp8},
    {OptimizerKind::kSgd, WeightFormat::kBf16Plus8Sr, StateFormat::kDyn4},
    {OptimizerKind::kSgd, WeightFormat::kBf16, StateFormat::kFp32},
};

std::string Describe(const Combination& c) {
  return absl::StrCat(OptimizerName(c.kind), c.amsgrad ? "-amsgrad" : "", ".", WeightFormatName(c.weights), ".",
                      StateFormatName(c.states));
}

JobSpec JobOf(const Combination& c, const std::string& name) {
  JobSpec spec = testing::OddJob(name, "fsdp=1", kSlots);
  spec.optimizer = OptimizerHyper::Defaults(c.kind);
  spec.optimizer.weight_decay = 0.03;
  spec.optimizer.amsgrad = c.amsgrad;
  spec.clip_norm = c.clip_norm;
  if (c.kind == OptimizerKind::kSgd) spec.optimizer.momentum = 0.8;
  for (ParameterSpec& p : spec.parameters) {
    p.format = c.weights;
    p.states = c.states;
  }
  return spec;
}

class FormatInvariance : public ::testing::TestWithParam<int> {};

TEST_P(FormatInvariance, EveryMesh_LearnsTheSameBits) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 8, .threads = GetParam()}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  std::set<uint64_t> digests;
  int index = 0;
  for (const Combination& combination : kCombinations) {
    Learnt reference;
    for (const Variant& variant : testing::VariantsOfThreeSlots()) {
      SCOPED_TRACE(absl::StrCat(Describe(combination), " ", testing::Describe(variant)));
      const JobSpec spec = JobOf(combination, absl::StrCat("job-", index++));
      ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::TrainVariant(client, spec, variant, kSteps));
      if (reference.step < 0) reference = learnt;
      ASSERT_EQ(learnt, reference);
    }
    EXPECT_TRUE(digests.insert(reference.digest).second) << "two combinations learnt the same";
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, FormatInvariance, ::testing::Values(1, 2));

}  // namespace
}  // namespace shardmesh
