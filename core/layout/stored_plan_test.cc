#include "core/layout/stored_plan.h"

#include <set>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<LayoutTensor> Tensors() { return {{"a", {1024}, "bf16", {}, ""}, {"b", {300}, "bf16", {}, "a"}}; }

std::vector<Rank> Ranks(std::initializer_list<int> values) {
  std::vector<Rank> ranks;
  for (const int value : values) ranks.push_back(Rank(value));
  return ranks;
}

StoredPlan PlanOn(const Mesh& mesh, const std::vector<std::string>& replicate) {
  std::vector<LayoutTensor> tensors = Tensors();
  tensors.pop_back();
  return StoredPlan::Create(std::move(tensors), {}, mesh, replicate).value();
}

TEST(StoredPlanTest, ReplicasAndShards) {
  const Mesh mesh = Mesh::Create({2, 2}, {"ddp", "fsdp"}).value();
  const StoredPlan plan = PlanOn(mesh, {"ddp"});
  EXPECT_EQ(plan.layout().num_shards(), 2);
  EXPECT_THAT(plan.RanksOf(0), ElementsAre(Rank(0), Rank(2)));
  EXPECT_THAT(plan.RanksOf(1), ElementsAre(Rank(1), Rank(3)));
  EXPECT_EQ(plan.ShardOf(Rank(3)).value(), 1);
  EXPECT_THAT(plan.ShardOf(Rank(4)), StatusIs(absl::StatusCode::kNotFound, HasSubstr("4")));
  ASSERT_EQ(plan.PartsOf("a")->size(), 2u);
  EXPECT_THAT(plan.PartsOf("c"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("\"c\"")));
}

// A plan that puts a byte on another rank has another hash, although its layout is the same.
TEST(StoredPlanTest, Hash_SaysWhichRankHoldsWhat) {
  const Mesh line = Mesh::Create({4}, {"fsdp"}).value();
  const Mesh grid = Mesh::Create({2, 2}, {"ddp", "fsdp"}).value();
  std::set<std::string> hashes = {
      PlanOn(line, {}).hash(),
      PlanOn(Mesh::Create({4}, {"fsdp"}, Ranks({3, 2, 1, 0})).value(), {}).hash(),
      PlanOn(Mesh::Create({4}, {"fsdp"}, Ranks({10, 11, 12, 13})).value(), {}).hash(),
      PlanOn(grid.Transpose({"fsdp", "ddp"}).value(), {}).hash(),
      PlanOn(grid, {"ddp"}).hash(),
      PlanOn(grid, {"fsdp"}).hash(),
      PlanOn(grid.Slice({"fsdp"}).value(), {}).hash(),
  };
  EXPECT_EQ(hashes.size(), 7u);
  EXPECT_EQ(PlanOn(Mesh::Create({4}, {"tp"}).value(), {}).hash(),
            PlanOn(line, {}).hash());  // what a dimension is called
  EXPECT_EQ(PlanOn(grid, {}).hash(), PlanOn(line, {}).hash());
}

TEST(StoredPlanTest, BadReplicate_IsNamed) {
  const Mesh mesh = Mesh::Create({2, 2}, {"ddp", "fsdp"}).value();
  EXPECT_THAT(StoredPlan::Create({}, {}, mesh, {"tp"}), StatusIs(absl::StatusCode::kNotFound, HasSubstr("tp")));
  EXPECT_THAT(StoredPlan::Create({}, {}, mesh, {"ddp", "ddp"}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("ddp twice")));
  EXPECT_THAT(StoredPlan::Create(Tensors(), {}, mesh, {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("differs from it")));
}

}  // namespace
}  // namespace shardmesh
