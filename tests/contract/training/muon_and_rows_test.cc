// Matrices that Muon steps, each whole at one worker, and int8_row weights, cut between rows: fewer of them than
// workers, and what is refused. (That they learn the same bits on every mesh: mesh_invariance_test.cc.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"
#include "tests/testing/training/variant.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::Variant;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr int kSlots = 3;

// Group 1 is Muon's, group 0 AdamW's.
JobSpec MuonJob(const std::string& name) {
  JobSpec spec = testing::OddJob(name, "fsdp=1", kSlots);
  spec.parameters.push_back({"blocks", {70, 160}});
  spec.more_groups = {OptimizerHyper::Defaults(OptimizerKind::kMuon)};
  for (ParameterSpec& p : spec.parameters) {
    p.format = WeightFormat::kBf16Sr;
    p.states = StateFormat::kDyn8;
    p.group = p.shape.size() == 2 ? 1 : 0;
  }
  return spec;
}

// Fewer matrices than workers: some own nothing, are pushed nothing, and have their part in every step all the same.
TEST(MuonAndRowsEdge, OneMatrixOnEightWorkers_LearnsTheReferencesBits) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 8}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  JobSpec spec = testing::TinyJob("one", "fsdp=1", kSlots);
  spec.optimizer = OptimizerHyper::Defaults(OptimizerKind::kMuon);
  spec.clip_norm = 0.5;
  spec.parameters = {{"w", {33, 50}, WeightFormat::kBf16Sr, "", StateFormat::kDyn8, GatherFormat::kNf4}};
  const Learnt reference = testing::ReferenceOf(spec, 3);
  for (const bool attached : {true, false}) {
    const Variant variant = {"ddp=2,fsdp=4", {{{0, 1, 2}, attached}}};
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::TrainVariant(client, spec, variant, 3));
    EXPECT_EQ(learnt, reference) << attached;
  }
}

// What has no meaning is an error that says what would have one; the job of the same name then works.
TEST(MuonAndRowsInput, ShapesAndFormatsWithoutMeaning_AreRefused) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 1}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  const JobSpec good = MuonJob("job");
  const auto refused = [&](const ParameterSpec& added, Code code, const char* words) {
    JobSpec bad = good;
    bad.parameters.push_back(added);
    EXPECT_THAT(client.CreateJob(bad), StatusIs(code, HasSubstr(words)));
  };
  ParameterSpec p{"p", {7}};
  p.group = 1;
  refused(p, Code::kInvalidArgument, "shape [7]; muon steps matrices: reshape it to two dimensions");
  p.shape = {2, 3, 4};
  refused(p, Code::kInvalidArgument, "shape [2,3,4]; muon steps matrices");
  p.shape = {3, 4};
  p.format = WeightFormat::kInt8Row;
  refused(p, Code::kInvalidArgument, "is stepped by Muon and has int8_row weights, which cannot go together: int8_row has a scale for each row");
  p.group = 0;
  p.gather = GatherFormat::kMx8;
  refused(p, Code::kInvalidArgument, "shape [3,4] cannot be gathered as mx8, which codes rows of multiples of 32");
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Undisturbed(client, good, 2));
  const Learnt reference = testing::ReferenceOf(good, 2);
  EXPECT_EQ(learnt, reference);
}

}  // namespace
}  // namespace shardmesh
