#include "core/mesh/mesh.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Lists = std::vector<std::vector<Rank>>;

Lists ToLists(const std::vector<std::vector<int>>& numbers) {
  Lists lists;
  for (const auto& list : numbers) {
    lists.emplace_back();
    for (const int r : list) lists.back().push_back(Rank(r));
  }
  return lists;
}

Mesh Cube() { return Mesh::Create({2, 2, 2}, {"ddp", "fsdp", "x"}).value(); }

TEST(MeshTest, Create_WholeMesh_HasOneInstanceInRowMajorOrder) {
  ASSERT_OK_AND_ASSIGN(const Mesh mesh, Mesh::Create({2, 3}, {"a", "b"}));
  EXPECT_EQ(mesh.Instances(), ToLists({{0, 1, 2, 3, 4, 5}}));
  EXPECT_THAT(mesh.Names(), ElementsAre("a", "b"));
  EXPECT_THAT(mesh.Sizes(), ElementsAre(2, 3));
  EXPECT_EQ(mesh.Axes()[0].stride, 3);
  EXPECT_EQ(mesh.Groups({"a"}).value(), ToLists({{0, 3}, {1, 4}, {2, 5}}));
  EXPECT_EQ(mesh.Groups({"b"}).value(), ToLists({{0, 1, 2}, {3, 4, 5}}));
  EXPECT_EQ(mesh.DebugString(), "mesh(a=2 stride 3, b=3 stride 1) 1 instance of 6 ranks");
}

TEST(MeshTest, Create_FromSpec_HasItsShape) {
  const MeshSpec spec = ParseMeshSpec("ddp=2,fsdp=4").value();
  ASSERT_OK_AND_ASSIGN(const Mesh mesh, Mesh::Create(spec));
  EXPECT_THAT(mesh.Names(), ElementsAre("ddp", "fsdp"));
  EXPECT_THAT(mesh.Sizes(), ElementsAre(2, 4));
  EXPECT_EQ(mesh.SizeOf("fsdp").value(), 4);
}

// DeviceMesh answers "Cannot create a submesh from a submesh" here.
TEST(MeshTest, SliceOfSlice_StandsForAllInstances) {
  ASSERT_OK_AND_ASSIGN(const Mesh two, Cube().Slice({"ddp", "fsdp"}));
  EXPECT_EQ(two.Instances(), ToLists({{0, 2, 4, 6}, {1, 3, 5, 7}}));
  ASSERT_OK_AND_ASSIGN(const Mesh one, two.Slice({"fsdp"}));
  EXPECT_EQ(one.Instances(), ToLists({{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
  EXPECT_EQ(one.Instances(), Cube().Slice({"fsdp"}).value().Instances());
  EXPECT_EQ(one.NumInstances(), 4);
  EXPECT_EQ(one.NumRanksPerInstance(), 2);
  EXPECT_EQ(one.NumRanks(), 8);
  EXPECT_EQ(one.GroupOf(Rank(5), "fsdp").value(), ToLists({{5, 7}})[0]);
  EXPECT_EQ(one.InstanceOf(Rank(5)).value(), 3);
  EXPECT_THAT(one.CoordinatesOf(Rank(7)).value(), ElementsAre(1));
}

TEST(MeshTest, Slice_HasTheOrderOfTheNames) {
  ASSERT_OK_AND_ASSIGN(const Mesh mesh, Cube().Slice({"x", "ddp"}));
  EXPECT_THAT(mesh.Names(), ElementsAre("x", "ddp"));
  EXPECT_EQ(mesh.Instances(), ToLists({{0, 4, 1, 5}, {2, 6, 3, 7}}));
  EXPECT_THAT(mesh.CoordinatesOf(Rank(6)).value(), ElementsAre(0, 1));
  ASSERT_OK_AND_ASSIGN(const Mesh again, mesh.Slice({"ddp", "x"}));
  EXPECT_EQ(again.Instances(), Cube().Slice({"ddp", "x"}).value().Instances());
}

TEST(MeshTest, Transpose_ReordersRanks) {
  ASSERT_OK_AND_ASSIGN(const Mesh mesh, Cube().Transpose({"x", "ddp", "fsdp"}));
  EXPECT_THAT(mesh.Names(), ElementsAre("x", "ddp", "fsdp"));
  EXPECT_EQ(mesh.Instances(), ToLists({{0, 2, 4, 6, 1, 3, 5, 7}}));
}

TEST(MeshTest, Flatten_AdjacentDims_IsOneStride) {
  ASSERT_OK_AND_ASSIGN(const Mesh mesh, Cube().Flatten({"ddp", "fsdp"}, "dp"));
  EXPECT_EQ(mesh.DebugString(), "mesh(dp=4 stride 2, x=2 stride 1) 1 instance of 8 ranks");
  EXPECT_EQ(mesh.Groups({"dp"}).value(), ToLists({{0, 2, 4, 6}, {1, 3, 5, 7}}));
}

TEST(MeshTest, Flatten_DistantDims_IsADimensionLikeAnyOther) {
  ASSERT_OK_AND_ASSIGN(const Mesh mesh, Cube().Flatten({"ddp", "x"}, "dx"));
  EXPECT_THAT(mesh.Names(), ElementsAre("dx", "fsdp"));
  EXPECT_EQ(mesh.Groups({"dx"}).value(), ToLists({{0, 1, 4, 5}, {2, 3, 6, 7}}));
  EXPECT_EQ(mesh.Groups({"fsdp"}).value(), ToLists({{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
  ASSERT_OK_AND_ASSIGN(const Mesh back, mesh.Unflatten("dx", {2, 2}, {"ddp", "x"}));
  EXPECT_EQ(back.Groups({"ddp"}).value(), Cube().Transpose({"ddp", "x", "fsdp"}).value().Groups({"ddp"}).value());
}

TEST(MeshTest, Flatten_OrderOfNames_SaysWhichVariesSlowest) {
  ASSERT_OK_AND_ASSIGN(const Mesh mesh, Cube().Flatten({"x", "ddp"}, "xd"));
  EXPECT_EQ(mesh.Groups({"xd"}).value(), ToLists({{0, 4, 1, 5}, {2, 6, 3, 7}}));
}

TEST(MeshTest, Flatten_IntoOneOfItsParts_IsAllowed) {
  ASSERT_OK_AND_ASSIGN(const Mesh mesh, Cube().Flatten({"ddp", "fsdp"}, "fsdp"));
  EXPECT_THAT(mesh.Names(), ElementsAre("fsdp", "x"));
}

TEST(MeshTest, Unflatten_AcrossAFormerBoundary_Works) {
  ASSERT_OK_AND_ASSIGN(const Mesh grid, Mesh::Create({3, 2, 2}, {"a", "b", "c"}));
  ASSERT_OK_AND_ASSIGN(const Mesh flat, grid.Flatten({"a", "c"}, "f"));
  ASSERT_OK_AND_ASSIGN(const Mesh mesh, flat.Unflatten("f", {2, 3}, {"p", "q"}));
  EXPECT_EQ(mesh.Groups({"q"}).value(), ToLists({{0, 1, 4}, {2, 3, 6}, {5, 8, 9}, {7, 10, 11}}));
}

TEST(MeshTest, Ranks_GivenByTheCaller_AreUsedInTheirOrder) {
  ASSERT_OK_AND_ASSIGN(const Mesh mesh, Mesh::Create({2, 2}, {"a", "b"}, {Rank(9), Rank(1), Rank(4), Rank(0)}));
  EXPECT_EQ(mesh.Groups({"a"}).value(), ToLists({{9, 4}, {1, 0}}));
  EXPECT_THAT(mesh.CoordinatesOf(Rank(4)).value(), ElementsAre(1, 0));
  EXPECT_EQ(mesh.RankAt({1, 1}).value(), Rank(0));
  EXPECT_THAT(mesh.CoordinatesOf(Rank(2)),
              StatusIs(absl::StatusCode::kNotFound, AllOf(HasSubstr("rank 2 is not in"), HasSubstr("0 to 9"))));
}

TEST(MeshTest, SliceManyTimes_OverSplitsOfOne_StaysSmall) {
  Mesh mesh = Mesh::Create({4}, {"a"}).value();
  for (int i = 0; i < 1000; ++i) {
    mesh = mesh.Unflatten("a", {4, 1}, {"a", "b"}).value().Slice({"a"}).value();
  }
  EXPECT_EQ(mesh.Instances(), ToLists({{0, 1, 2, 3}}));
}

TEST(MeshTest, LargestMesh_AllOperationsWork) {
  const std::vector<int64_t> shape = {4, 8, 4, 8, 4, 8, 4, 8};
  ASSERT_OK_AND_ASSIGN(const Mesh mesh, Mesh::Create(shape, {"a", "b", "c", "d", "e", "f", "g", "h"}));
  EXPECT_EQ(mesh.NumRanks(), kMaxMeshRanks);
  ASSERT_OK_AND_ASSIGN(const Mesh flat, mesh.Flatten({"h", "a", "d"}, "had"));
  EXPECT_EQ(flat.Groups({"had"}).value().size(), static_cast<size_t>(kMaxMeshRanks / 256));
  EXPECT_THAT(flat.CoordinatesOf(Rank(kMaxMeshRanks - 1)).value(), ElementsAre(255, 7, 3, 3, 7, 3));
}

struct ErrorCase {
  absl::Status status;
  absl::StatusCode code;
  std::string message;
};

void ExpectErrors(const std::vector<ErrorCase>& cases) {
  for (const ErrorCase& c : cases) EXPECT_THAT(c.status, StatusIs(c.code, HasSubstr(c.message)));
}

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnknown = absl::StatusCode::kNotFound;
constexpr auto kRange = absl::StatusCode::kOutOfRange;
constexpr auto kLimit = absl::StatusCode::kResourceExhausted;

TEST(MeshTest, Create_BadInput_NamesIt) {
  const int64_t huge = std::numeric_limits<int64_t>::max();
  ExpectErrors({
      {Mesh::Create({2, 2}, {"a"}).status(), kInvalid, "the shape has 2 sizes but 1 names"},
      {Mesh::Create({}, {}).status(), kInvalid, "no dimension"},
      {Mesh::Create({2, 2}, {"a", "a"}).status(), kInvalid, "dimension a is given twice"},
      {Mesh::Create({0}, {"a"}).status(), kInvalid, "has size 0"},
      {Mesh::Create({2}, {"a."}).status(), kInvalid, "\"a.\" is not a name"},
      {Mesh::Create({huge, huge}, {"a", "b"}).status(), kLimit, "more than 1048576 ranks"},
      {Mesh::Create(std::vector<int64_t>(9, 1), {"a", "b", "c", "d", "e", "f", "g", "h", "i"}).status(), kLimit,
       "at most 8"},
      {Mesh::Create({2}, {"a"}, {Rank(1)}).status(), kInvalid, "1 ranks are given for a shape of 2"},
      {Mesh::Create({2}, {"a"}, {Rank(1), Rank(1)}).status(), kInvalid, "rank 1 is given twice"},
      {Mesh::Create({2}, {"a"}, {Rank(1), Rank(-1)}).status(), kInvalid, "rank -1 is negative"},
  });
}

TEST(MeshTest, Operations_BadInput_NameIt) {
  const Mesh cube = Cube();
  ExpectErrors({
      {cube.Slice({}).status(), kInvalid, "name at least one of ddp, fsdp, x"},
      {cube.Slice({"y"}).status(), kUnknown, "named \"y\"; this mesh has ddp, fsdp, x"},
      {cube.Slice({"x", "x"}).status(), kInvalid, "dimension x is named twice"},
      {cube.Slice({"x"}).value().Slice({"ddp"}).status(), kUnknown, "named \"ddp\"; this mesh has x"},
      {cube.Transpose({"x", "ddp"}).status(), kInvalid, "names 2 of the dimensions ddp, fsdp, x"},
      {cube.Transpose({"x", "ddp", "ddp"}).status(), kInvalid, "ddp is named twice"},
      {cube.Flatten({}, "f").status(), kInvalid, "name at least one"},
      {cube.Flatten({"ddp", "y"}, "f").status(), kUnknown, "\"y\""},
      {cube.Flatten({"ddp", "x"}, "fsdp").status(), kInvalid, "fsdp is another dimension"},
      {cube.Flatten({"ddp", "x"}, "").status(), kInvalid, "\"\" is not a name"},
      {cube.Unflatten("y", {2}, {"a"}).status(), kUnknown, "\"y\""},
      {cube.Unflatten("x", {2, 2}, {"a", "b"}).status(), kInvalid, "make 4; their product must be 2"},
      {cube.Unflatten("x", {2, 1}, {"a", "a"}).status(), kInvalid, "a is given twice"},
      {cube.Unflatten("x", {2, 1}, {"a"}).status(), kInvalid, "2 sizes but 1 names"},
      {cube.Unflatten("x", {}, {}).status(), kInvalid, "no dimension"},
      {cube.Unflatten("x", {2, 1}, {"a", "ddp"}).status(), kInvalid, "into ddp, which is another"},
      {cube.Unflatten("x", {2, 1, 1, 1, 1, 1, 1}, {"a", "b", "c", "d", "e", "f", "g"}).status(), kLimit,
       "makes 9 in all; at most 8"},
  });
}

TEST(MeshTest, Questions_BadInput_NameIt) {
  const Mesh cube = Cube();
  ExpectErrors({
      {cube.Groups({"y"}).status(), kUnknown, "\"y\""},
      {cube.SizeOf("y").status(), kUnknown, "\"y\""},
      {cube.GroupOf(Rank(0), "y").status(), kUnknown, "\"y\""},
      {cube.GroupOf(Rank(8), "x").status(), kUnknown, "rank 8 is not in mesh("},
      {cube.InstanceOf(Rank(-1)).status(), kUnknown, "rank -1"},
      {cube.RankAt({0, 0}).status(), kInvalid, "2 coordinates are given"},
      {cube.RankAt({0, 2, 0}).status(), kRange, "no coordinate 2 along fsdp; they count from 0 to 1"},
      {cube.RankAt({0, -1, 0}).status(), kRange, "no coordinate -1"},
      {cube.RankAt({0, 0, 0}, 1).status(), kRange, "no instance 1; they count from 0 to 0"},
  });
}

}  // namespace
}  // namespace shardmesh
