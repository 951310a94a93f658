// Contract 1 with parameter groups: what a job in three groups has learnt, with learning rates that differ by group and
// step, are the reference kernel's bits of whole tensors, on every mesh, for attached and connected trainers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/raw_trainer.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"
#include "tests/testing/training/variant.h"

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

// As many groups as a job can have: parameters in the first one, the last one and between; every residency.
TEST(ParameterGroups, AsManyAsAJobCanHave_LearnTheReferencesBits) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 2}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  JobSpec spec = GroupedJob("many");
  spec.more_groups.resize(kMaxGroups - 1, spec.optimizer);
  const int last = static_cast<int>(spec.parameters.size()) - 1;
  for (int t = 0; t <= last; ++t) spec.parameters[t].group = t * (kMaxGroups - 1) / last;
  const Learnt reference = testing::ReferenceOf(spec, kSteps);
  int index = 0;
  for (const Residency residency : {Residency::kFull, Residency::kBucket}) {
    for (const bool attached : {true, false}) {
      if (residency == Residency::kBucket && !attached) continue;
      spec.name = absl::StrCat("many-", index++);
      Variant variant{index % 2 == 0 ? "fsdp=2" : "ddp=2", {{{0, 1, 2}, attached}}};
      variant.residency = residency;
      SCOPED_TRACE(testing::Describe(variant));
      ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::TrainVariant(client, spec, variant, kSteps));
      ASSERT_EQ(learnt, reference);
    }
  }
}

// A request that no mailbox can hold would wait for ever.
TEST(ParameterGroups, AnAttachedTrainersRates_BeyondWhatAMessageHolds_AreRefused) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 1}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(GroupedJob("grouped")));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0), Slot(1), Slot(2)}));
  StepOptions options;
  options.timeout = absl::Seconds(20);
  options.learning_rates.assign(6000, 0.5);
  EXPECT_THAT(session->Step(options),
              StatusIs(Code::kInvalidArgument, HasSubstr("each of the job's 3 parameter groups")));
  options.learning_rates.assign(4, 0.5);
  EXPECT_THAT(session->Step(options), StatusIs(Code::kInvalidArgument, HasSubstr("4 learning rates for the 3")));
  EXPECT_OK(testing::TrainTo(*session, 2));
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
