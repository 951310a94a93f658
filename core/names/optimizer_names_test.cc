#include "core/names/optimizer_names.h"

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

TEST(OptimizerNamesTest, Parse_TellsTheParts) {
  ASSERT_OK_AND_ASSIGN(const OptimizerName state, ParseOptimizerName("state.layers.0.w.exp_avg"));
  EXPECT_EQ(state.prefix, "");
  EXPECT_EQ(state.kind, OptimizerNameKind::kState);
  EXPECT_EQ(state.parameter, "layers.0.w");
  EXPECT_EQ(state.state, "exp_avg");
  ASSERT_OK_AND_ASSIGN(const OptimizerName group,
                       ParseOptimizerName("app.optim.param_groups.w.betas", {"optim", "app.optim"}));
  EXPECT_EQ(group.prefix, "app.optim");
  EXPECT_EQ(group.kind, OptimizerNameKind::kParamGroup);
  EXPECT_EQ(group.parameter, "w");
  EXPECT_EQ(group.state, "betas");
  EXPECT_EQ(group.ToString(), "app.optim.param_groups.w.betas");
}

TEST(OptimizerNamesTest, Parse_ParametersNamedLikeTheKinds_AreParameters) {
  EXPECT_EQ(ParseOptimizerName("state.state.w.step").value().parameter, "state.w");
  EXPECT_EQ(ParseOptimizerName("state.param_groups.step").value().parameter, "param_groups");
  EXPECT_EQ(ParseOptimizerName("state.optim.state.w.step", {"optim"}).value().parameter, "optim.state.w");
}

TEST(OptimizerNamesTest, Canonical_ChangesTheParameterAlone) {
  ASSERT_OK_AND_ASSIGN(const Canonicalizer rules,
                       Canonicalizer::Create({{"module"}, {"module.enc"}, {"module.a._orig_mod"}}));
  const auto canonical = [&](absl::string_view raw) { return CanonicalOptimizerName(raw, rules, {"optim"}).value(); };
  EXPECT_EQ(canonical("state.module._orig_mod.layers.0.w.exp_avg"), "state.layers.0.w.exp_avg");
  EXPECT_EQ(canonical("optim.state.module.enc.module.w.exp_avg"), "optim.state.enc.w.exp_avg");
  EXPECT_EQ(canonical("optim.param_groups.module.a._orig_mod.w.lr"), "optim.param_groups.a._orig_mod.w.lr");
  // The last segment of a parameter's name, and of the whole, is never a wrapper.
  EXPECT_EQ(canonical("state.module.x._orig_mod.exp_avg"), "state.x._orig_mod.exp_avg");
  EXPECT_EQ(canonical("state.module.step"), "state.module.step");
  EXPECT_EQ(canonical("state.w._orig_mod"), "state.w._orig_mod");
  // `module` counts at the head of the parameter's name, not of the whole one.
  EXPECT_EQ(canonical("state.w.module.exp_avg"), "state.w.module.exp_avg");
  EXPECT_THAT(CanonicalOptimizerName("module.state.w.exp_avg", rules), StatusIs(kInvalid, HasSubstr("does not begin")));
}

TEST(OptimizerNamesTest, NestedState_IsKept) {
  const Canonicalizer none;
  EXPECT_EQ(CanonicalOptimizerName("state._orig_mod.w.factors.0", none).value(), "state.w.factors.0");
}

TEST(OptimizerNamesTest, OtherNames_AreRefused) {
  struct Case {
    std::string name, message;
  };
  for (const Case& c : std::vector<Case>{
           {"layers.0.w",
            "name \"layers.0.w\" does not begin like one of optimizer state; optimizer state is named "
            "state.PARAMETER.STATE or param_groups.PARAMETER.FIELD, maybe behind a prefix of \"optim, o2\""},
           {"state", "does not begin"},
           {"states.w.step", "does not begin"},
           {"optimizer.state.w.step", "does not begin"},
           {"optim.layers.w.step", "does not begin"},
           {"state.w", "name \"state.w\" has no parameter or no state"},
           {"optim.param_groups.lr", "has no parameter or no state"},
           {"state..step", "empty segment at offset 6"},
           {"", "is empty"},
           {std::string("state.w\0.step", 13), "NUL byte at offset 7"},
           {"state." + std::string(5000, 'w') + ".step", "has 5011 bytes"}}) {
    EXPECT_THAT(ParseOptimizerName(c.name, {"optim", "o2"}), StatusIs(kInvalid, HasSubstr(c.message)));
    EXPECT_THAT(CanonicalOptimizerName(c.name, Canonicalizer(), {"optim", "o2"}),
                StatusIs(kInvalid, HasSubstr(c.message)));
  }
}

TEST(OptimizerNamesTest, BadPrefixes_AreRefused) {
  EXPECT_THAT(ParseOptimizerName("state.w.step", {"optim", ""}),
              StatusIs(kInvalid, AllOf(HasSubstr("optimizer prefix: name \"\" is empty"))));
  EXPECT_THAT(ParseOptimizerName("state.w.step", {"optim."}),
              StatusIs(kInvalid, HasSubstr("optimizer prefix: name \"optim.\"")));
  EXPECT_THAT(ParseOptimizerName("state.w.step", {"optim.state"}),
              StatusIs(kInvalid, HasSubstr("optimizer prefix \"optim.state\" has the segment state")));
  EXPECT_THAT(ParseOptimizerName("state.w.step", {"param_groups"}),
              StatusIs(kInvalid, HasSubstr("segment param_groups")));
}

}  // namespace
}  // namespace shardmesh
