#include "proto/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

v1::JobSpec Minimal() {
  v1::JobSpec proto;
  proto.set_name("j");
  proto.set_slots(1);
  proto.mutable_optimizer()->set_epsilon(1e-8);
  proto.add_parameters()->set_name("w");
  return proto;
}

TEST(JobSpecFromProto, UnsetFields_BecomeTheStatedDefaults) {
  ASSERT_OK_AND_ASSIGN(const JobSpec spec, JobSpecFromProto(Minimal()));
  EXPECT_TRUE(spec.mesh.dims.empty());
  EXPECT_EQ(spec.gradient_format, Format::kBf16);
  EXPECT_EQ(spec.parameters[0].format, WeightFormat::kFp32);
  EXPECT_EQ(spec.non_finite, NonFinitePolicy::kSkip);
  EXPECT_EQ(spec.bucket_elements, kDefaultBucketElements);
  EXPECT_EQ(spec.publish_every, 1);
  EXPECT_EQ(spec.publications, 3);
  EXPECT_EQ(spec.seed, 0u);
  EXPECT_EQ(spec.optimizer.lr, 0) << "a message's 0 is a value, not the C++ default";
}

TEST(JobSpecFromProto, EveryFieldSet_SurvivesBothWays) {
  JobSpec spec;
  spec.name = "job-1";
  spec.mesh.dims = {{"ddp", 2, DimRole::kShard}, {"fsdp", 3, DimRole::kReplicate}, {"ddp2", 5, DimRole::kShard}};
  spec.num_slots = 7;
  spec.parameters = {
      {"a", {2, 3}, WeightFormat::kBf16, ""},
      {"b", {2, 3}, WeightFormat::kBf16, "a"},
      {"c", {}, WeightFormat::kBf16Sr, "", StateFormat::kFp32, GatherFormat::kStored, 2, /*frozen=*/true}};
  spec.parameters[2].given = "_orig_mod.c";
  spec.gradient_format = Format::kFp32;
  spec.optimizer.kind = OptimizerKind::kSgd;
  spec.optimizer.lr = 0.1;
  spec.optimizer.beta1 = 0.2;
  spec.optimizer.beta2 = 0.3;
  spec.optimizer.eps = 0.4;
  spec.optimizer.weight_decay = 0.5;
  spec.optimizer.momentum = 0.6;
  spec.optimizer.dampening = 0.7;
  spec.optimizer.maximize = spec.optimizer.amsgrad = spec.optimizer.nesterov = true;
  spec.more_groups = {spec.optimizer, OptimizerHyper::Defaults(OptimizerKind::kLion)};
  spec.more_groups[0].lr = 0.2;
  spec.seed = ~uint64_t{0};
  spec.non_finite = NonFinitePolicy::kFail;
  spec.bucket_elements = 4096;
  spec.publish_every = 9;
  spec.publications = 5;
  spec.check_every = 11;
  spec.clip_norm = 0.75;
  spec.residency = Residency::kBucket;
  spec.prefetch_buckets = 5;
  spec.on_loss = OnLoss::kCheckpoint;
  ASSERT_OK_AND_ASSIGN(const JobSpec back, JobSpecFromProto(ToProto(spec)));
  EXPECT_EQ(Difference(spec, back), "");
  EXPECT_EQ(back.mesh, spec.mesh);
  EXPECT_EQ(ToProto(back).SerializeAsString(), ToProto(spec).SerializeAsString());
  EXPECT_EQ(back.optimizer.weight_decay, 0.5);
  EXPECT_EQ(back.optimizer.dampening, 0.7);
  EXPECT_TRUE(back.optimizer.nesterov);
  EXPECT_EQ(back.num_groups(), 3);
  EXPECT_EQ(back.group(1).lr, 0.2);
  EXPECT_EQ(back.parameters[2].group, 2);
  EXPECT_TRUE(back.parameters[2].frozen);
  EXPECT_EQ(back.parameters[2].given, "_orig_mod.c");
}

TEST(JobSpecFromProto, EveryFormatAndOptimizer_SurvivesBothWays) {
  JobSpec spec;
  for (const OptimizerKind kind :
       {OptimizerKind::kSgd, OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kLion}) {
    spec.optimizer.kind = kind;
    for (const WeightFormat weights : {WeightFormat::kFp32, WeightFormat::kBf16, WeightFormat::kBf16Sr,
                                       WeightFormat::kBf16Plus16, WeightFormat::kBf16Plus8Sr}) {
      for (const StateFormat states : {StateFormat::kFp32, StateFormat::kBf16Sr, StateFormat::kDyn8, StateFormat::kDyn4,
                                       StateFormat::kFp8, StateFormat::kFp8x32}) {
        spec.parameters = {{"a", {2, 64}, weights, "", states}};
        spec.parameters[0].gather =
            static_cast<GatherFormat>((static_cast<int>(weights) + static_cast<int>(states)) % 6);
        ASSERT_OK_AND_ASSIGN(const JobSpec back, JobSpecFromProto(ToProto(spec)));
        EXPECT_EQ(Difference(spec, back), "");
      }
    }
  }
}

TEST(JobSpecFromProto, NoOptimizer_Refused) {
  v1::JobSpec proto = Minimal();
  proto.clear_optimizer();
  EXPECT_THAT(JobSpecFromProto(proto), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("optimizer is unset")));
}

TEST(JobSpecFromProto, UnknownEnumValues_NameFieldAndValue) {
  const auto refused = [](const v1::JobSpec& proto, const std::string& field) {
    EXPECT_THAT(JobSpecFromProto(proto),
                StatusIs(absl::StatusCode::kInvalidArgument, AllOf(HasSubstr(field), HasSubstr("is 77"))));
  };
  v1::JobSpec proto = Minimal();
  proto.mutable_parameters(0)->set_format(static_cast<v1::Format>(77));
  refused(proto, "parameter 0 \"w\": format");
  proto = Minimal();
  proto.mutable_parameters(0)->set_states(static_cast<v1::StateFormat>(77));
  refused(proto, "parameter 0 \"w\": states");
  proto.mutable_parameters(0)->clear_states();
  proto.mutable_parameters(0)->set_gather(static_cast<v1::GatherFormat>(77));
  refused(proto, "parameter 0 \"w\": gather");
  proto = Minimal();
  proto.mutable_optimizer()->set_kind(static_cast<v1::OptimizerKind>(77));
  refused(proto, "optimizer kind");
  proto = Minimal();
  proto.set_gradient_format(static_cast<v1::Format>(77));
  refused(proto, "gradient_format");
  proto = Minimal();
  proto.set_non_finite(static_cast<v1::NonFinitePolicy>(77));
  refused(proto, "non_finite");
  proto = Minimal();
  proto.set_on_loss(static_cast<v1::OnLoss>(77));
  refused(proto, "on_loss");
  proto = Minimal();
  proto.add_mesh()->set_name("x");
  proto.mutable_mesh(0)->set_role(static_cast<v1::DimensionRole>(77));
  refused(proto, "mesh dimension \"x\": role");
}

TEST(MeshSpecFromProto, UnsetRole_IsTheDefaultOfItsName) {
  v1::JobSpec proto;
  proto.add_mesh()->set_name("ddp");
  proto.add_mesh()->set_name("fsdp");
  ASSERT_OK_AND_ASSIGN(const MeshSpec mesh, MeshSpecFromProto(proto.mesh()));
  EXPECT_EQ(mesh.dims[0].role, DimRole::kReplicate);
  EXPECT_EQ(mesh.dims[1].role, DimRole::kShard);
  EXPECT_EQ(mesh.dims[0].size, 0) << "ranges are Validate()'s";
}

TEST(NameRulesFromProto, EveryField_SurvivesBothWays) {
  NameRules rules;
  rules.root_wrappers = {"module", "_orig_mod"};
  rules.wrapped_at = {"a", "b.c"};
  rules.literal = {"d"};
  const NameRules back = NameRulesFromProto(ToProto(rules));
  EXPECT_EQ(back.root_wrappers, rules.root_wrappers);
  EXPECT_EQ(back.wrapped_at, rules.wrapped_at);
  EXPECT_EQ(back.literal, rules.literal);
}

}  // namespace
}  // namespace shardmesh
