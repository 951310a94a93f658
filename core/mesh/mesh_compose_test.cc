// Meshes made of others: concatenated, restricted, flattened without the rest.
#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "core/mesh/mesh.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

std::vector<Rank> ToRanks(const std::vector<int>& numbers) {
  std::vector<Rank> ranks;
  for (const int r : numbers) ranks.push_back(Rank(r));
  return ranks;
}

std::vector<std::vector<Rank>> ToLists(const std::vector<std::vector<int>>& numbers) {
  std::vector<std::vector<Rank>> lists;
  for (const auto& list : numbers) lists.push_back(ToRanks(list));
  return lists;
}

Mesh Cube() { return Mesh::Create({2, 2, 2}, {"ddp", "fsdp", "abcd"}).value(); }
Mesh Part(const Mesh& mesh, const std::vector<std::string>& names) { return mesh.Slice(names).value(); }

TEST(MeshConcatenateTest, SlicesInAnyOrder_AreTheMeshInThatOrder) {
  const Mesh cube = Cube();
  ASSERT_OK_AND_ASSIGN(const Mesh two, Mesh::Concatenate({Part(cube, {"abcd"}), Part(cube, {"ddp"})}));
  EXPECT_THAT(two.Names(), ElementsAre("abcd", "ddp"));
  EXPECT_EQ(two.Instances(), ToLists({{0, 4, 1, 5}, {2, 6, 3, 7}}));
  EXPECT_EQ(two.Groups({"ddp"}).value(), ToLists({{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_THAT(two.CoordinatesOf(Rank(3)).value(), ElementsAre(1, 0));
  EXPECT_EQ(two.InstanceOf(Rank(3)).value(), 1);
  ASSERT_OK_AND_ASSIGN(const Mesh all, Mesh::Concatenate({Part(cube, {"abcd"}), Part(cube, {"ddp", "fsdp"})}));
  EXPECT_EQ(all.Instances(), cube.Transpose({"abcd", "ddp", "fsdp"}).value().Instances());
}

// A cube that is sliced twice, flattened, and put together again.
TEST(MeshConcatenateTest, SliceOfSliceAndFlattening_MakeTheWholeAgain) {
  const Mesh cube = Cube();
  const Mesh data = Part(cube, {"ddp", "fsdp"});
  const Mesh shard = Part(data, {"fsdp"});
  ASSERT_OK_AND_ASSIGN(const Mesh dp, data.Flatten({"ddp", "fsdp"}, "dp"));
  EXPECT_EQ(dp.Instances(), ToLists({{0, 2, 4, 6}, {1, 3, 5, 7}}));
  ASSERT_OK_AND_ASSIGN(const Mesh spmd, Mesh::Concatenate({dp, Part(cube, {"abcd"})}));
  EXPECT_EQ(spmd.Instances(), ToLists({{0, 1, 2, 3, 4, 5, 6, 7}}));
  ASSERT_OK_AND_ASSIGN(const Mesh grid, Mesh::Concatenate({Part(spmd, {"abcd"}), shard}));
  EXPECT_EQ(grid.Instances(), ToLists({{0, 2, 1, 3}, {4, 6, 5, 7}}));
}

TEST(MeshConcatenateTest, PartsWithRankMapsOfTheirOwn_KeepTheirGroups) {
  ASSERT_OK_AND_ASSIGN(const Mesh root,
                       Mesh::Create({2, 3, 2}, {"a", "b", "c"}, ToRanks({11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0})));
  ASSERT_OK_AND_ASSIGN(const Mesh ca, root.Flatten({"c", "a"}, "ca", /*keep_rest=*/false));
  ASSERT_OK_AND_ASSIGN(const Mesh transposed, root.Transpose({"c", "b", "a"}));
  ASSERT_OK_AND_ASSIGN(const Mesh mesh, Mesh::Concatenate({ca, Part(transposed, {"b"})}));
  EXPECT_EQ(mesh.Groups({"ca"}).value(), ToLists({{11, 5, 10, 4}, {9, 3, 8, 2}, {7, 1, 6, 0}}));
  EXPECT_EQ(mesh.Groups({"b"}).value(), ToLists({{11, 9, 7}, {5, 3, 1}, {10, 8, 6}, {4, 2, 0}}));
}

TEST(MeshConcatenateTest, Instances_AreOrderedAsTheirFirstRanksInTheRoot) {
  ASSERT_OK_AND_ASSIGN(const Mesh root, Mesh::Create({3, 2}, {"a", "b"}));
  const Mesh part = Part(root.Flatten({"b", "a"}, "f").value().Unflatten("f", {3, 2}, {"p", "q"}).value(), {"q"});
  EXPECT_EQ(part.Instances(), ToLists({{0, 2}, {4, 1}, {3, 5}}));
  EXPECT_EQ(Mesh::Concatenate({part}).value().Instances(), ToLists({{0, 2}, {3, 5}, {4, 1}}));
}

TEST(MeshConcatenateTest, RootsOfEqualContent_AreOneRoot) {
  ASSERT_OK_AND_ASSIGN(const Mesh flat, Mesh::Create({8}, {"world"}));
  ASSERT_OK_AND_ASSIGN(const Mesh other, flat.Unflatten("world", {4, 2}, {"x", "y"}));
  ASSERT_OK_AND_ASSIGN(const Mesh mesh, Mesh::Concatenate({Part(Cube(), {"ddp"}), Part(other, {"y"})}));
  EXPECT_EQ(mesh.Instances(), ToLists({{0, 1, 4, 5}, {2, 3, 6, 7}}));
}

TEST(MeshConcatenateTest, OtherRoots_AreRefused) {
  const Mesh cube = Cube();
  const Mesh reversed = Mesh::Create({8}, {"w"}, ToRanks({7, 6, 5, 4, 3, 2, 1, 0})).value();
  const Mesh more = Mesh::Create({9}, {"w"}).value();
  const Mesh rest = cube.Restrict(ToRanks({0, 1, 2, 3})).value().Flatten({"ddp", "fsdp", "abcd"}, "w").value();
  for (const Mesh& other : {reversed, more, rest}) {
    EXPECT_THAT(Mesh::Concatenate({Part(cube, {"ddp"}), other}),
                StatusIs(kInvalid, AllOf(HasSubstr("mesh(ddp=2 stride 4) 4 instances of 2 ranks and mesh(w="),
                                         HasSubstr("come from meshes of other ranks, or of another order"))));
  }
}

TEST(MeshConcatenateTest, RootDimensionUsedTwice_NamesBothPartsAndTwoRanks) {
  const Mesh cube = Cube();
  ASSERT_OK_AND_ASSIGN(const Mesh dx, cube.Flatten({"ddp", "abcd"}, "dx"));
  EXPECT_THAT(Mesh::Concatenate({Part(cube, {"fsdp"}), Part(cube, {"abcd"}), Part(dx, {"dx"})}),
              StatusIs(kInvalid, AllOf(HasSubstr("the parts with abcd and with dx use a dimension of the root twice"),
                                       HasSubstr("ranks 0 and 1 meet along both"))));
}

TEST(MeshConcatenateTest, GroupsThatFormNoGrid_AreNamed) {
  ASSERT_OK_AND_ASSIGN(const Mesh root, Mesh::Create({3, 2}, {"a", "b"}));
  ASSERT_OK_AND_ASSIGN(const Mesh flat, root.Flatten({"a", "b"}, "f"));
  const Mesh crossing = Part(flat.Unflatten("f", {2, 3}, {"p", "q"}).value(), {"p"});
  EXPECT_THAT(Mesh::Concatenate({Part(root, {"b"}), crossing}),
              StatusIs(kInvalid, AllOf(HasSubstr("the parts with b and with p form no grid"),
                                       HasSubstr("ranks 2 and 3 meet along b but differ along p too"))));
  EXPECT_THAT(Mesh::Concatenate({crossing, Part(root, {"b"})}),
              StatusIs(kInvalid, HasSubstr("ranks 0 and 3 meet along p but differ along b too")));
}

// Pairs that go around in a circle of twelve ranks: neighbours never disagree, yet after four steps the coordinates are
// those of the start.
TEST(MeshConcatenateTest, GroupsInACircle_AreNamed) {
  ASSERT_OK_AND_ASSIGN(const Mesh world, Mesh::Create({12}, {"w"}));
  ASSERT_OK_AND_ASSIGN(const Mesh split, world.Unflatten("w", {2, 2, 3}, {"a", "b", "c"}));
  ASSERT_OK_AND_ASSIGN(const Mesh turned, split.Flatten({"b", "a", "c"}, "f"));
  ASSERT_OK_AND_ASSIGN(const Mesh pairs, turned.Unflatten("f", {3, 2, 2}, {"d", "e", "g"}));
  ASSERT_OK_AND_ASSIGN(const Mesh neighbours, world.Unflatten("w", {6, 2}, {"h", "i"}));
  EXPECT_THAT(Mesh::Concatenate({Part(pairs, {"e"}), Part(neighbours, {"i"})}),
              StatusIs(kInvalid, AllOf(HasSubstr("the parts with e and with i form no grid"),
                                       HasSubstr("are joined by them but have the same coordinates"))));
}

TEST(MeshConcatenateTest, NamesAndNumbers_AreChecked) {
  const Mesh cube = Cube();
  EXPECT_THAT(Mesh::Concatenate({}), StatusIs(kInvalid, HasSubstr("nothing to concatenate")));
  EXPECT_THAT(Mesh::Concatenate({Part(cube, {"ddp"}), Part(cube, {"fsdp", "ddp"})}),
              StatusIs(kInvalid, HasSubstr("two of the parts to concatenate have a dimension ddp")));
  ASSERT_OK_AND_ASSIGN(const Mesh eight,
                       Mesh::Create(std::vector<int64_t>(8, 1), {"a", "b", "c", "d", "e", "f", "g", "h"}));
  ASSERT_OK_AND_ASSIGN(const Mesh ninth, Mesh::Create({1}, {"i"}));
  EXPECT_OK(Mesh::Concatenate({Part(eight, {"a", "b", "c", "d", "e", "f", "g"}), ninth}));
  EXPECT_THAT(Mesh::Concatenate({eight, ninth}),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("more than 8 dimensions")));
}

TEST(MeshRestrictTest, FullGrid_IsARootOfItsOwn) {
  ASSERT_OK_AND_ASSIGN(const Mesh grid, Mesh::Create({3, 4}, {"a", "b"}));
  ASSERT_OK_AND_ASSIGN(const Mesh mesh, grid.Restrict(ToRanks({11, 8, 9, 1, 0, 3})));
  EXPECT_THAT(mesh.Sizes(), ElementsAre(2, 3));
  EXPECT_EQ(mesh.NumRanks(), 6);
  EXPECT_EQ(mesh.Instances(), ToLists({{0, 1, 3, 8, 9, 11}}));
  EXPECT_THAT(mesh.CoordinatesOf(Rank(11)).value(), ElementsAre(1, 2));
  EXPECT_THAT(mesh.CoordinatesOf(Rank(2)), StatusIs(absl::StatusCode::kNotFound, HasSubstr("rank 2 is not in")));
}

TEST(MeshRestrictTest, Slice_KeepsOrDropsWholeInstances) {
  const Mesh data = Part(Cube(), {"ddp", "fsdp"});
  ASSERT_OK_AND_ASSIGN(const Mesh one, data.Restrict(ToRanks({1, 3, 5, 7})));
  EXPECT_EQ(one.Instances(), ToLists({{1, 3, 5, 7}}));
  ASSERT_OK_AND_ASSIGN(const Mesh both, data.Restrict(ToRanks({0, 1, 2, 3})));
  EXPECT_EQ(both.Instances(), ToLists({{0, 2}, {1, 3}}));
  EXPECT_THAT(both.Sizes(), ElementsAre(1, 2));
}

TEST(MeshRestrictTest, RestrictedSlicesOfOneMesh_AreOfOneRoot) {
  const Mesh cube = Cube();
  const std::vector<Rank> survivors = ToRanks({0, 1, 2, 3});
  ASSERT_OK_AND_ASSIGN(const Mesh abcd, Part(cube, {"abcd"}).Restrict(survivors));
  ASSERT_OK_AND_ASSIGN(const Mesh fsdp, Part(cube, {"fsdp"}).Restrict(survivors));
  EXPECT_EQ(Mesh::Concatenate({abcd, fsdp}).value().Instances(), ToLists({{0, 2, 1, 3}}));
}

TEST(MeshRestrictTest, Ranks_AreChecked) {
  const Mesh cube = Cube();
  EXPECT_THAT(cube.Restrict({}), StatusIs(kInvalid, HasSubstr("no rank survives")));
  EXPECT_THAT(cube.Restrict(ToRanks({0, 8})), StatusIs(absl::StatusCode::kNotFound, HasSubstr("rank 8 is not in")));
  EXPECT_THAT(cube.Restrict(ToRanks({0, 1, 0})), StatusIs(kInvalid, HasSubstr("rank 0 is twice")));
}

TEST(MeshRestrictTest, NoFullGrid_NamesAMissingRankAndTheLargestGrid) {
  struct Case {
    Mesh mesh;
    std::vector<int> survivors;
    std::string message;
  };
  const Mesh cube = Cube(), grid = Mesh::Create({3, 4}, {"a", "b"}).value();
  for (
      const Case& c : std::vector<Case>{
          {cube,
           {0, 1, 2, 3, 4, 5, 6},
           "rank 7 at (ddp=1, fsdp=1, abcd=1) is missing; leaving out ddp=1 too (ranks 4, 5, 6) makes the largest full "
           "grid, of 4 ranks"},
          {grid,
           {0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11},
           "rank 5 at (a=1, b=1) is missing; leaving out b=1 too (ranks 1, 9) makes the largest full grid, of 9 ranks"},
          {grid, {0, 1, 2, 3, 4, 5, 6, 7, 8}, "rank 9 at (a=2, b=1) is missing; leaving out a=2 too (rank 8) makes"},
          {grid, {0, 1, 3, 5, 6, 7, 8, 9, 10, 11}, "rank 2 at (a=0, b=2) is missing; leaving out b=0, 2 too "},
          {Part(cube, {"fsdp"}),
           {0, 2, 1, 3, 5},
           "rank 7 at (instance=3, fsdp=1) is missing; leaving out instance=3 too (rank 5) makes the largest full "
           "grid, "
           "of 4 ranks"},
          {cube, {0, 7}, "rank 1 at (ddp=0, fsdp=0, abcd=1) is missing; no coordinate of any dimension is whole"}}) {
    EXPECT_THAT(c.mesh.Restrict(ToRanks(c.survivors)),
                StatusIs(kInvalid, HasSubstr(absl::StrCat("the survivors are no full grid: ", c.message))));
  }
}

TEST(MeshRestrictTest, ManyRanksToLeaveOut_AreListedInPart) {
  ASSERT_OK_AND_ASSIGN(const Mesh mesh, Mesh::Create({2, 1000}, {"a", "b"}));
  std::vector<int> survivors;
  for (int r = 0; r < 1500; ++r) survivors.push_back(r);
  EXPECT_THAT(mesh.Restrict(ToRanks(survivors)),
              StatusIs(kInvalid, AllOf(HasSubstr("rank 1500 at (a=1, b=500)"),
                                       HasSubstr("(ranks 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1007 and 492 more)"),
                                       HasSubstr("of 1000 ranks"))));
}

TEST(MeshFlattenTest, WithoutTheRest_OnlyTheNewDimensionStays) {
  const Mesh cube = Cube();
  ASSERT_OK_AND_ASSIGN(const Mesh mesh, cube.Flatten({"abcd", "ddp"}, "ad", /*keep_rest=*/false));
  EXPECT_THAT(mesh.Names(), ElementsAre("ad"));
  EXPECT_EQ(mesh.Instances(), ToLists({{0, 4, 1, 5}, {2, 6, 3, 7}}));
  EXPECT_EQ(cube.Flatten({"ddp"}, "fsdp", /*keep_rest=*/false).value().Instances(), Part(cube, {"ddp"}).Instances());
  EXPECT_THAT(cube.Flatten({"y"}, "f", false), StatusIs(absl::StatusCode::kNotFound, HasSubstr("has ddp, fsdp, abcd")));
  EXPECT_THAT(cube.Flatten({"ddp"}, "a b", false), StatusIs(kInvalid, HasSubstr("\"a b\" is not a name")));
}

TEST(MeshGroupsTest, AlongSeveralDimensions_TheFirstNamedIsSlowest) {
  const Mesh cube = Cube();
  EXPECT_EQ(cube.Groups(std::vector<std::string>{"abcd", "ddp"}).value(), ToLists({{0, 4, 1, 5}, {2, 6, 3, 7}}));
  EXPECT_EQ(cube.Groups(std::vector<std::string>{"ddp", "abcd"}).value(), ToLists({{0, 1, 4, 5}, {2, 3, 6, 7}}));
  EXPECT_EQ(Part(cube, {"ddp", "fsdp"}).Groups(std::vector<std::string>{"fsdp", "ddp"}).value(),
            ToLists({{0, 4, 2, 6}, {1, 5, 3, 7}}));
  EXPECT_THAT(cube.Groups(std::vector<std::string>{}), StatusIs(kInvalid, HasSubstr("name at least one of")));
  EXPECT_THAT(cube.Groups(std::vector<std::string>{"x"}), StatusIs(absl::StatusCode::kNotFound, HasSubstr("\"x\"")));
  EXPECT_THAT(cube.Groups(std::vector<std::string>{"ddp", "ddp"}), StatusIs(kInvalid, HasSubstr("ddp is named twice")));
}

TEST(MeshConcatenateTest, LargestMesh_TakesEightPartsAndHalfTheRanks) {
  const std::vector<std::string> names = {"a", "b", "c", "d", "e", "f", "g", "h"};
  std::vector<Rank> ranks;  // shuffled, with gaps
  for (int64_t i = 0; i < kMaxMeshRanks; ++i)
    ranks.push_back(Rank(static_cast<int32_t>(i * 77773 % kMaxMeshRanks * 2)));
  ASSERT_OK_AND_ASSIGN(const Mesh mesh, Mesh::Create({4, 8, 4, 8, 4, 8, 4, 8}, names, ranks));
  std::vector<Mesh> parts;
  for (const std::string& name : names) parts.insert(parts.begin(), Part(mesh, {name}));
  ASSERT_OK_AND_ASSIGN(const Mesh turned, Mesh::Concatenate(parts));
  int64_t sum = 0;
  for (const Rank rank : ranks) sum += turned.CoordinatesOf(rank).value()[7];
  EXPECT_EQ(sum, kMaxMeshRanks / 4 * (0 + 1 + 2 + 3));
  ranks.resize(ranks.size() / 2);
  EXPECT_EQ(turned.Restrict(ranks).value().SizeOf("a").value(), 2);
  ranks.pop_back();
  EXPECT_THAT(turned.Restrict(ranks), StatusIs(kInvalid, HasSubstr("makes the largest full grid, of 458752 ranks")));
}

}  // namespace
}  // namespace shardmesh
