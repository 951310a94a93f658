// Contract 1 with parameter groups: what a job in three groups has learnt, with learning rates that differ by group and
// step, are the reference kernel's bits of whole tensors, on every mesh, for attached and connected trainers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "core/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/raw_trainer.h"
#include "tests/testing/reference.h"
#include "tests/testing/training.h"
#include "tests/testing/variant.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::RawTrainer;
using ::shardmesh::testing::Variant;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr int kSlots = 3;  // of the variants
constexpr int64_t kSteps = 8;

JobSpec GroupedJob(const std::string& name) {
  JobSpec spec = testing::OddJob(name, "fsdp=1", kSlots);
  spec.more_groups.assign(2, spec.optimizer);
  spec.more_groups[0].weight_decay = 0;
  spec.more_groups[0].beta1 = 0.8;
  spec.more_groups[1].weight_decay = 0.3;
  spec.more_groups[1].beta2 = 0.95;
  spec.more_groups[1].eps = 1e-5;
  for (size_t t = 0; t < spec.parameters.size(); ++t) spec.parameters[t].group = static_cast<int>(t % 3);
  return spec;
}

TEST(ParameterGroups, EveryMesh_LearnsTheReferencesBits) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 8}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  int index = 0;
  for (const double clip_norm : {0.0, 0.5}) {
    JobSpec spec = GroupedJob("grouped");
    spec.clip_norm = clip_norm;
    const Learnt reference = testing::ReferenceOf(spec, kSteps);
    for (const Variant& variant : testing::VariantsOfThreeSlots()) {
      SCOPED_TRACE(absl::StrCat(testing::Describe(variant), " clip ", clip_norm));
      spec.name = absl::StrCat("job-", index++);
      ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::TrainVariant(client, spec, variant, kSteps));
      ASSERT_EQ(learnt, reference);
    }
  }
}

// Contract 6: errors name the group and the value, and the job goes on.
TEST(ParameterGroups, WrongRatesAndGroups_AreRefused_AndTheJobGoesOn) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 1}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  JobSpec bad = GroupedJob("bad");
  bad.parameters[4].group = 3;
  EXPECT_THAT(client.CreateJob(bad),
              StatusIs(Code::kInvalidArgument,
                       AllOf(HasSubstr("\"layers.1.scale\""), HasSubstr("group 3 is none of the job's: 0 to 2"))));
  bad = GroupedJob("bad");
  bad.more_groups[1] = OptimizerHyper::Defaults(OptimizerKind::kLion);
  bad.more_groups[1].beta2 = 2;
  EXPECT_THAT(client.CreateJob(bad), StatusIs(Code::kInvalidArgument, HasSubstr("group 2: lion: beta2 is 2")));
  const JobSpec spec = GroupedJob("grouped");
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto trainer, RawTrainer::Create(job));
  ASSERT_OK(trainer->PushAll(1));
  const auto step = [&](std::vector<double> rates) {
    v1::StepRequest request = trainer->Request({0, 1, 2}, 1);
    request.mutable_learning_rates()->Assign(rates.begin(), rates.end());
    return job->worker(Rank(0)).Step(request, absl::Seconds(10));
  };
  EXPECT_THAT(step({0.5, 0.5}), StatusIs(Code::kInvalidArgument,
                                         HasSubstr("2 learning rates for the 3 parameter groups of job grouped")));
  EXPECT_THAT(step({0.5, -1, 0.5}), StatusIs(Code::kInvalidArgument, HasSubstr("learning rate of group 1 is -1")));
  EXPECT_THAT(step({0.5, 0.5, 9}),
              StatusIs(Code::kInvalidArgument, HasSubstr("group 2: adamw: AdamW: lr * weight_decay")));
  for (int64_t s = 1; s <= kSteps; ++s) ASSERT_OK(trainer->WholeStep(s));
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, kSteps));
  EXPECT_EQ(learnt, testing::ReferenceOf(spec, kSteps));
}

}  // namespace
}  // namespace shardmesh
