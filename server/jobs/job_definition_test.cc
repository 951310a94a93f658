#include "server/jobs/job_definition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <utility>
#include <vector>

#include "core/base/matchers.h"
#include "server/coordinator/testing/small_jobs.h"
#include "server/jobs/near_miss.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

JobSpec Named(const std::vector<std::pair<std::string, std::string>>& names_and_ties) {
  JobSpec spec = SmallSpec("j", 2);
  spec.parameters.clear();
  for (const auto& [name, tie] : names_and_ties) spec.parameters.push_back({name, {4}, WeightFormat::kFp32, tie});
  return spec;
}

TEST(DefineJob, NamesBecomeCanonical_TiesToo) {
  ASSERT_OK_AND_ASSIGN(
      const auto job, DefineJob(Named({{"_orig_mod.head.w", "_orig_mod.embed.w"}, {"_orig_mod.embed.w", ""}}), {}, {}));
  EXPECT_EQ(job->spec().parameters[0].name, "head.w");
  EXPECT_EQ(job->spec().parameters[0].tied_to, "embed.w");
  EXPECT_EQ(job->StorageOf(0), 1);
  ASSERT_OK_AND_ASSIGN(const auto names, ResolveNames(*job, {"head.w", "_orig_mod.embed.w"}, {}));
  EXPECT_EQ(names[0].canonical, "head.w");
  EXPECT_EQ(names[0].tensor, 1);
  EXPECT_EQ(names[1].tensor, 1);
}

TEST(DefineJob, Collision_NamesBoth) {
  EXPECT_THAT(DefineJob(Named({{"_orig_mod.w", ""}, {"w", ""}}), {}, {}),
              StatusIs(Code::kAlreadyExists, AllOf(HasSubstr("_orig_mod.w"), HasSubstr("\"w\""))));
}

TEST(DefineJob, TieWithTheCanonicalNameOfItsOwner_IsOneParameter) {
  ASSERT_OK_AND_ASSIGN(const auto job, DefineJob(Named({{"_orig_mod.w", ""}, {"w", "_orig_mod.w"}}), {}, {}));
  EXPECT_EQ(job->spec().parameters.size(), 1u);
  JobSpec frozen = Named({{"w", "_orig_mod.w"}, {"_orig_mod.w", ""}});
  frozen.parameters[0].frozen = true;
  EXPECT_THAT(DefineJob(frozen, {}, {}), StatusIs(Code::kInvalidArgument, HasSubstr("freeze both or neither")));
}

TEST(DefineJob, NamesAsGiven_AreRemembered_AndNotPartOfThePlan) {
  const auto plain = *DefineJob(Named({{"embed.w", ""}, {"head.w", "embed.w"}, {"b", ""}}), {}, {});
  ASSERT_OK_AND_ASSIGN(
      const auto job,
      DefineJob(Named({{"_orig_mod.embed.w", ""}, {"_orig_mod.head.w", "_orig_mod.embed.w"}, {"b", ""}}), {}, {}));
  EXPECT_EQ(job->spec().parameters[0].given, "_orig_mod.embed.w");
  EXPECT_EQ(job->spec().parameters[1].given, "_orig_mod.head.w");
  EXPECT_EQ(job->spec().parameters[2].given, "");
  EXPECT_EQ(job->plan().hash(), plain->plan().hash());
  ASSERT_OK_AND_ASSIGN(const auto stored, JobDefinition::Parse(job->Serialize()));
  EXPECT_EQ(stored->spec().parameters[1].given, "_orig_mod.head.w");
  ASSERT_OK_AND_ASSIGN(const auto again, DefineJob(stored->spec(), {}, {}));  // as a restore gives it
  EXPECT_EQ(again->spec().parameters[0].name, "embed.w");
  EXPECT_EQ(again->spec().parameters[0].given, "_orig_mod.embed.w");
  v1::JobSpec older = job->proto();  // of a build that knew no such field
  for (v1::Parameter& parameter : *older.mutable_parameters()) parameter.clear_given();
  ASSERT_OK_AND_ASSIGN(const auto old, JobDefinition::Parse(older.SerializeAsString()));
  EXPECT_EQ(old->spec().parameters[0].original_name(), "embed.w");
  EXPECT_EQ(old->plan().hash(), job->plan().hash());
}

TEST(DefineJob, TieToNothing_InvalidArgument) {
  EXPECT_THAT(DefineJob(Named({{"a", "b"}}), {}, {}),
              StatusIs(Code::kInvalidArgument, HasSubstr("\"a\" is tied to \"b\"")));
}

TEST(DefineJob, MeshOfAnotherPlace_BecomesOneThatFits) {
  const auto mesh = [](const char* text) { return *ParseMeshSpec(text); };
  const MeshSpec none, saved = mesh("fsdp=3"), replicas = mesh("ddp=2,fsdp=2");
  EXPECT_EQ(FittingMesh(saved, none, 3), saved);
  EXPECT_EQ(FittingMesh(saved, none, 8), saved);
  EXPECT_EQ(FittingMesh(saved, none, 2), mesh("fsdp=2"));
  EXPECT_EQ(FittingMesh(saved, none, 0), saved);
  EXPECT_EQ(FittingMesh(saved, mesh("fsdp=1"), 1), mesh("fsdp=1"));
  EXPECT_EQ(FittingMesh(saved, mesh("fsdp=4"), 4), mesh("fsdp=4"));
  EXPECT_EQ(FittingMesh(replicas, mesh("fsdp=4"), 4), replicas);
  EXPECT_EQ(FittingMesh(saved, mesh("fsdp=4"), 3), saved);
  EXPECT_EQ(FittingMesh(saved, mesh("fsdp=4"), 1), mesh("fsdp=1"));
}

TEST(DefineJob, Mesh_DefaultOrRefused) {
  JobSpec spec = SmallSpec("j", 2);
  spec.mesh.dims.clear();
  EXPECT_THAT(DefineJob(spec, {}, {}), StatusIs(Code::kInvalidArgument, HasSubstr("no default mesh")));
  ASSERT_OK_AND_ASSIGN(const auto job, DefineJob(spec, {}, {{{"ddp", 3, DimRole::kReplicate}}}));
  EXPECT_EQ(job->plan().num_replicas(), 3);
}

TEST(DefineJob, MoreRanksThanAHostHolds_ResourceExhausted) {
  EXPECT_OK(DefineJob(SmallSpec("j", kMaxHostRanks), {}, {}));
  JobSpec spec = SmallSpec("j", 99);
  spec.mesh.dims.insert(spec.mesh.dims.begin(), {"ddp", 2, DimRole::kReplicate});
  EXPECT_THAT(DefineJob(spec, {}, {}),
              StatusIs(Code::kResourceExhausted,
                       AllOf(HasSubstr("mesh ddp=2,fsdp=99 has 198 ranks"), HasSubstr("at most 64 ranks"))));
}

// Of each feature that a specification has; a topology more in the table, and the job is taken.
TEST(DefineJob, FeatureThatNoTopologySupports_IsUnimplemented) {
  const std::vector<std::pair<Feature, std::function<void(JobSpec&)>>> features = {
      {Feature::kTraining, [](JobSpec&) {}},
      {Feature::kClipNorm, [](JobSpec& job) { job.clip_norm = 1; }},
      {Feature::kTokenWeights, [](JobSpec& job) { job.token_weights = true; }},
      {Feature::kCheckEvery, [](JobSpec& job) { job.check_every = 2; }},
      {Feature::kQuantizedGathers, [](JobSpec& job) { job.parameters[0].gather = GatherFormat::kFp8Row; }},
      {Feature::kBucketResidency, [](JobSpec& job) { job.residency = Residency::kBucket; }},
      {Feature::kPulledSlots, [](JobSpec& job) {
         job.slot_mode = SlotMode::kPulled;
         job.num_trainers = 1;
       }}};
  for (const auto& [feature, need] : features) {
    JobSpec spec = SmallSpec("j", 2);
    need(spec);
    bool somewhere = false;
    for (int kind = 0; kind < kNumTopologyKinds; ++kind) {
      somewhere = somewhere || Works(feature, static_cast<TopologyKind>(kind));
    }
    EXPECT_EQ(DefineJob(spec, {}, {}).status(),
              somewhere ? absl::OkStatus() : CheckSupported(spec, *Plan::Create(spec), {1, 2, false}))
        << RowOf(feature).name;
  }
}

TEST(DefineJob, FeaturesThatExcludeEachOther_AreRefusedInTheWordsOfTheTable) {
  JobSpec spec = SmallSpec("j", 2);
  spec.optimizer = OptimizerHyper::Defaults(OptimizerKind::kMuon);
  spec.parameters[0].format = WeightFormat::kInt8Row;
  const absl::Status together = CheckTogether("", Feature::kMuon, Feature::kInt8RowWeights);
  EXPECT_THAT(DefineJob(spec, {}, {}), StatusIs(together.code(), HasSubstr(std::string(together.message()))));
}

TEST(JobDefinition, Refusals_AreThoseOfEachTopology) {
  JobSpec spec = SmallSpec("j", 2);
  spec.check_every = 3;
  const auto job = JobDefinition::Create(spec).value();
  for (const Topology& at :
       {Topology{1, 2, false}, Topology{2, 2, false}, Topology{1, 2, true}, Topology{2, 2, true}}) {
    EXPECT_EQ(job->refusals()[static_cast<int>(at.kind())], CheckSupported(spec, job->plan(), at).message());
  }
}

TEST(DefineJob, BadRules_Refused) {
  NameRules rules;
  rules.root_wrappers = {"nonsense"};
  EXPECT_THAT(DefineJob(SmallSpec("j", 2), rules, {}), StatusIs(Code::kInvalidArgument, HasSubstr("nonsense")));
  EXPECT_THAT(ResolveNames(*SmallJob("j", 2), {}, rules), StatusIs(Code::kInvalidArgument, HasSubstr("nonsense")));
}

TEST(JobDefinition, SerializedAndParsed_IsTheSame) {
  const auto job = SmallJob("j", 2);
  ASSERT_OK_AND_ASSIGN(const auto back, JobDefinition::Parse(job->Serialize()));
  EXPECT_EQ(Difference(job->spec(), back->spec()), "");
  EXPECT_EQ(back->plan().hash(), job->plan().hash());
  EXPECT_THAT(JobDefinition::Parse("\xff\xff"), StatusIs(Code::kDataLoss, HasSubstr("no JobSpec")));
  EXPECT_THAT(JobDefinition::Parse(""), StatusIs(Code::kDataLoss, HasSubstr("optimizer")));
}

TEST(ResolveNames, UnknownName_HasBothFormsAndTheNearest) {
  EXPECT_THAT(
      ResolveNames(*SmallJob("j", 2), {"a.w", "_orig_mod.a.v"}, {}),
      StatusIs(Code::kNotFound, AllOf(HasSubstr("\"_orig_mod.a.v\", canonical \"a.v\", is no parameter of job j"),
                                      HasSubstr("did you mean \"a.w\"?"))));
  EXPECT_THAT(ResolveNames(*SmallJob("j", 2), {"module.a.w"}, {}),
              StatusIs(Code::kNotFound, HasSubstr("did you mean \"a.w\"?")));
}

TEST(NearestName, EditsAndTails) {
  const std::vector<ParameterSpec> names = {{"encoder.layer.0.weight"}, {"encoder.layer.1.weight"}, {"head.bias"}};
  EXPECT_EQ(NearestName("encoder.layer.0.weigth", names), "encoder.layer.0.weight");
  EXPECT_EQ(NearestName("encoder.layr.1.weight", names), "encoder.layer.1.weight");
  EXPECT_EQ(NearestName("hed.bia", names), "head.bias");
  EXPECT_EQ(NearestName("hed.ba", names), "") << "three edits";
  EXPECT_EQ(NearestName("bias", names), "head.bias");
  EXPECT_EQ(NearestName("model.head.bias", names), "head.bias");
  EXPECT_EQ(NearestName("xhead.bias.very.far", names), "");
  EXPECT_EQ(NearestName(std::string(5000, 'a'), names), "");
  EXPECT_EQ(NearestName("", names), "");
}

}  // namespace
}  // namespace shardmesh
