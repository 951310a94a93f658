#include "client/cli/plan/layout_spec.h"

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ParseLayoutSpec, ReadsEverything) {
  const auto spec = ParseLayoutSpec(R"({"mesh": "ddp=2,fsdp=4", "bucket_elements": 4096, "tensors": [
      {"name": "a", "shape": [3, 64], "format": "int8_row", "granule": "rows:1"},
      {"name": "b", "shape": [], "tied_to": "a"}]})");
  ASSERT_OK(spec);
  EXPECT_EQ(spec->mesh.NumRanks(DimRole::kShard), 4);
  EXPECT_EQ(spec->options.bucket_elements, 4096);
  ASSERT_EQ(spec->tensors.size(), 2u);
  EXPECT_THAT(spec->tensors[0].shape, ElementsAre(3, 64));
  EXPECT_EQ(spec->tensors[0].granule.ToString(), "rows:1");
  EXPECT_EQ(spec->tensors[0].space, "int8_row");
  EXPECT_EQ(spec->tensors[1].granule.ToString(), "flat:256");
  EXPECT_EQ(spec->tensors[1].space, "fp32");
  EXPECT_EQ(spec->tensors[1].tied_to, "a");
}

TEST(PlanOf, DimensionsThatReplicate_HoldTheSame) {
  const auto plan = PlanOf(*ParseLayoutSpec(R"({"mesh": "ddp=2,fsdp=4", "tensors": [{"name": "a", "shape": [3]}]})"));
  ASSERT_OK(plan);
  EXPECT_EQ(plan->layout().num_shards(), 4);
  EXPECT_THAT(plan->RanksOf(1), ElementsAre(Rank(1), Rank(5)));
}

TEST(ParseLayoutSpec, WhatIsWrong_IsNamedWithItsPlace) {
  const std::pair<const char*, const char*> cases[] = {
      {"{", "no JSON at byte 2"},
      {"", "no JSON at byte 1"},
      {"{\"mesh\": \"\xff\"}", "no JSON at byte 11"},
      {R"({"mesh": "fsdp=2", "tensors": [], "mesh": "fsdp=4"})", "the key \"mesh\" twice"},
      {R"({"mesh": "fsdp=2", "tensors": [{"name": "a", "shape": [1], "name": "b"}]})", "the key \"name\" twice"},
      {"[]", "not an object"},
      {R"({"tensors": []})", "mesh is not there"},
      {R"({"mesh": 3, "tensors": []})", ".mesh is not a string"},
      {R"({"mesh": "fsdp=0", "tensors": []})", "fsdp"},
      {R"({"mesh": "fsdp=2"})", "tensors is not an array"},
      {R"({"mesh": "fsdp=2", "tensors": [], "tensor": 1})", "\"tensor\""},
      {R"({"mesh": "fsdp=2", "bucket_elements": 1.5, "tensors": []})", "bucket_elements is not an integer"},
      {R"({"mesh": "fsdp=2", "tensors": [{"shape": []}]})", "tensors[0].name"},
      {R"({"mesh": "fsdp=2", "tensors": [{"name": "a", "shape": [1], "format": ""}]})", "tensors[0].format is not a"},
      {R"({"mesh": "fsdp=2", "tensors": [{"name": "a"}]})", "tensors[0].shape"},
      {R"({"mesh": "fsdp=2", "tensors": [{"name": "a", "shape": [1, "x"]}]})", "tensors[0].shape[1]"},
      {R"({"mesh": "fsdp=2", "tensors": [{"name": "a", "shape": [18446744073709551615]}]})", "below 2^62"},
      {R"({"mesh": "fsdp=2", "tensors": [{"name": "a", "shape": [1,1,1,1,1,1,1,1,1]}]})", "at most 8"},
      {R"({"mesh": "fsdp=2", "tensors": [{"name": "a", "shape": [1], "granule": "tile"}]})",
       "tensors[0]: granule \"tile\""},
  };
  for (const auto& [text, message] : cases) {
    EXPECT_THAT(ParseLayoutSpec(text), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message))) << text;
  }
}

}  // namespace
}  // namespace shardmesh
