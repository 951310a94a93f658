#include "core/mesh/mesh_spec.h"

#include <random>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(MeshSpecTest, Parse_NamesWithoutRole_GetTheDefaultRole) {
  ASSERT_OK_AND_ASSIGN(const MeshSpec spec, ParseMeshSpec("ddp=2,fsdp=4"));
  const MeshSpec want{{{"ddp", 2, DimRole::kReplicate}, {"fsdp", 4, DimRole::kShard}}};
  EXPECT_EQ(spec, want);
  EXPECT_EQ(spec.NumRanks(), 8);
  EXPECT_EQ(spec.NumRanks(DimRole::kReplicate), 2);
  EXPECT_EQ(spec.NumRanks(DimRole::kShard), 4);
  for (const char* name : {"ddp", "dp_replicate", "replicate"}) EXPECT_EQ(DefaultDimRole(name), DimRole::kReplicate);
  for (const char* name : {"fsdp", "dp", "DDP", "ddp2"}) EXPECT_EQ(DefaultDimRole(name), DimRole::kShard);
}

TEST(MeshSpecTest, Parse_ExplicitRole_Wins) {
  ASSERT_OK_AND_ASSIGN(const MeshSpec spec, ParseMeshSpec("ddp:shard=3,x:replicate=2,y:shard=5"));
  const MeshSpec want{{{"ddp", 3, DimRole::kShard}, {"x", 2, DimRole::kReplicate}, {"y", 5, DimRole::kShard}}};
  EXPECT_EQ(spec, want);
  EXPECT_EQ(spec.ToString(), "ddp:shard=3,x:replicate=2,y=5");
}

TEST(MeshSpecTest, Role_PrintAndParse_AreInverse) {
  for (const DimRole role : {DimRole::kReplicate, DimRole::kShard}) {
    ASSERT_OK_AND_ASSIGN(const DimRole back, ParseDimRole(DimRoleName(role)));
    EXPECT_EQ(back, role);
  }
  EXPECT_THAT(ParseDimRole("Shard"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("replicate and shard")));
}

TEST(MeshSpecTest, Parse_BadText_SaysWhatAndWhatWouldBeRight) {
  struct Case {
    std::string text;
    std::string message;
  };
  const std::vector<Case> cases = {
      {"", "no dimension"},
      {"fsdp", "\"fsdp\" is not a dimension; write name=size"},
      {"fsdp=2,", "\"\" is not a dimension"},
      {"a=2=3", "\"a=2=3\" is not a dimension"},
      {"=2", "\"\" is not a name"},
      {"2x=2", "\"2x\" is not a name"},
      {"a b=2", "is not a name"},
      {" a=2", "is not a name"},
      {std::string("a\0z=2", 5), "\"a\\x00z\" is not a name"},
      {std::string(65, 'a') + "=2", "at most 64 bytes"},
      {"a=", "size \"\""},
      {"a=0", "has size 0; a size is at least 1"},
      {"a=-2", "size \"-2\""},
      {"a=+2", "size \"+2\""},
      {"a= 2", "size \" 2\""},
      {"a=2.5", "size \"2.5\""},
      {"a=99999999999999999999", "size \"99999999999999999999\""},
      {"a=2,b=3,a=4", "dimension a is given twice"},
      {"a:=2", "\"\" is not a role"},
      {"a:tensor=2", "\"tensor\" is not a role"},
      {"a:shard:shard=2", "\"shard:shard\" is not a role"},
  };
  for (const Case& c : cases) {
    EXPECT_THAT(ParseMeshSpec(c.text), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(c.message))) << c.text;
  }
}

TEST(MeshSpecTest, Parse_OverALimit_NamesIt) {
  EXPECT_OK(ParseMeshSpec("a=1048576"));
  EXPECT_OK(ParseMeshSpec("a=1,b=1,c=1,d=1,e=1,f=1,g=1,h=1"));
  EXPECT_THAT(ParseMeshSpec("a=1,b=1,c=1,d=1,e=1,f=1,g=1,h=1,i=1"),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("at most 8")));
  for (const char* text : {"a=1048577", "a=1024,b=1025", "a=9223372036854775807,b=9223372036854775807"}) {
    EXPECT_THAT(ParseMeshSpec(text), StatusIs(absl::StatusCode::kResourceExhausted,
                                              AllOf(HasSubstr("more than 1048576 ranks"), HasSubstr("dimension"))))
        << text;
  }
}

TEST(MeshSpecTest, Validate_RoleOutsideTheEnum_IsAnError) {
  const MeshSpec spec{{{"a", 2, static_cast<DimRole>(7)}}};
  EXPECT_THAT(spec.Validate(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("unknown role value 7")));
}

TEST(MeshSpecTest, Property_ToStringThenParse_GivesBackTheSpec) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 rng(seed);
  const std::vector<std::string> names = {"ddp", "fsdp", "replicate", "_x", "tp9", "dp_replicate", "z", "Q"};
  for (int round = 0; round < 2000; ++round) {
    MeshSpec spec;
    const size_t num_dims = 1 + rng() % names.size();
    for (size_t d = 0; d < num_dims; ++d) {
      spec.dims.push_back({names[(d + round) % names.size()], static_cast<int64_t>(1 + rng() % 4),
                           rng() % 2 ? DimRole::kShard : DimRole::kReplicate});
    }
    ASSERT_OK_AND_ASSIGN(const MeshSpec back, ParseMeshSpec(spec.ToString()));
    ASSERT_EQ(back, spec) << spec.ToString();
  }
}

}  // namespace
}  // namespace shardmesh
