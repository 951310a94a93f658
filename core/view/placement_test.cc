#include "core/view/placement.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using P = DimPlacement;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::SizeIs;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;

// A mesh with dimensions named a, b, c, ...
Mesh MeshOf(const std::vector<int64_t>& sizes) {
  std::vector<std::string> names;
  for (size_t d = 0; d < sizes.size(); ++d) names.emplace_back(1, static_cast<char>('a' + d));
  return Mesh::Create(sizes, names).value();
}

std::vector<LocalBox> Boxes(const Dims& shape, const Mesh& mesh, const std::vector<P>& placements, int32_t rank) {
  auto boxes = BoxesOf(shape, mesh, placements, Rank(rank));
  EXPECT_OK(boxes);
  return boxes.ok() ? *std::move(boxes) : std::vector<LocalBox>();
}

absl::Status Bad(const Dims& shape, const std::vector<P>& placements, const std::vector<int64_t>& sizes = {2, 2}) {
  return PlacedTensor::Create(shape, MeshOf(sizes), placements).status();
}

TEST(ShardTest, UnevenMatrix_EqualsTorchChunk) {
  for (int64_t ways = 1; ways <= 9; ++ways) {
    const Mesh mesh = MeshOf({ways});
    for (int64_t n = 0; n <= 40; ++n) {
      int64_t next = 0;
      for (int32_t r = 0; r < ways; ++r) {
        int64_t size = 0;  // torch.chunk, counted out: piece r gets elements until it has a ceil(n / ways)-th of them
        while (next + size < n && size * ways < n) ++size;
        const LocalBox expected{{{0, size == 0 ? n : next}, {3, size}}, 0, {std::max<int64_t>(size, 1), 1}};
        ASSERT_THAT(Boxes({3, n}, mesh, {P::Shard(1)}, r), ElementsAre(expected)) << n << " over " << ways;
        next += size;
      }
      ASSERT_EQ(next, n);
    }
  }
}

struct TorchRow {
  int64_t n;
  std::vector<int64_t> sizes;
  std::vector<P> placements;
  std::vector<std::pair<int64_t, int64_t>> shards;
};

TEST(ShardTest, TorchTable_OffsetsAndSizesAreEqual) {
  const std::vector<TorchRow> rows = {
#include "core/view/placement_torch_table.inc"
  };
  for (const TorchRow& row : rows) {
    const Mesh mesh = MeshOf(row.sizes);
    for (size_t r = 0; r < row.shards.size(); ++r) {
      const auto boxes = Boxes({row.n}, mesh, row.placements, static_cast<int32_t>(r));
      ASSERT_EQ(boxes.size(), 1u);
      const std::string what = absl::StrCat(row.n, " over ", absl::StrJoin(row.sizes, "x"), " rank ", r);
      EXPECT_EQ(boxes[0].box, (Box{{row.shards[r].first}, {row.shards[r].second}})) << what;
    }
  }
}

TEST(ShardTest, FsdpOverTensorParallel_LocalTensorIsRowMajor) {
  const auto boxes = Boxes({8, 6}, MeshOf({2, 3}), {P::Shard(0), P::Shard(1)}, 4);
  EXPECT_THAT(boxes, ElementsAre(LocalBox{{{4, 2}, {4, 2}}, 0, {2, 1}}));
}

TEST(OwnedTest, OnlyTheOwnerHasBoxes) {
  const Mesh mesh = MeshOf({3, 2});
  EXPECT_THAT(Boxes({4}, mesh, {P::Owned(1), P::Replicate()}, 3), ElementsAre(LocalBox{{{0}, {4}}, 0, {1}}));
  EXPECT_THAT(Boxes({4}, mesh, {P::Owned(1), P::Replicate()}, 4), IsEmpty());
  EXPECT_THAT(Boxes({}, mesh, {P::Owned(2), P::Replicate()}, 5), ElementsAre(LocalBox{}));
  EXPECT_THAT(Boxes({}, mesh, {P::Owned(2), P::Replicate()}, 0), IsEmpty());
}

TEST(FlatTest, GranulesAreNotCut_TheRangeIsFewBoxes) {
  const Mesh mesh = MeshOf({3});  // 35 elements in granules of 4: shards of 12
  EXPECT_THAT(Boxes({5, 7}, mesh, {P::Flat(4)}, 0),
              ElementsAre(LocalBox{{{0, 0}, {1, 7}}, 0, {7, 1}}, LocalBox{{{1, 0}, {1, 5}}, 7, {7, 1}}));
  EXPECT_THAT(Boxes({5, 7}, mesh, {P::Flat(4)}, 1),
              ElementsAre(LocalBox{{{1, 5}, {1, 2}}, 0, {7, 1}}, LocalBox{{{2, 0}, {1, 7}}, 2, {7, 1}},
                          LocalBox{{{3, 0}, {1, 3}}, 9, {7, 1}}));
  ASSERT_OK_AND_ASSIGN(const PlacedTensor placed, PlacedTensor::Create({5, 7}, mesh, {P::Flat(4)}));
  EXPECT_EQ(placed.LocalElementsAt({2}), 12);  // 11 and padding
}

TEST(FlatTest, InASpace_OffsetsAreTheSpacesShard) {
  // A space of 20 over 2 in granules of 4: shards of 12. The tensor of 8 lies at [8, 16).
  const Mesh mesh = MeshOf({2});
  EXPECT_THAT(Boxes({8}, mesh, {P::FlatIn(4, 20, 8)}, 0), ElementsAre(LocalBox{{{0}, {4}}, 8, {1}}));
  EXPECT_THAT(Boxes({8}, mesh, {P::FlatIn(4, 20, 8)}, 1), ElementsAre(LocalBox{{{4}, {4}}, 0, {1}}));
}

TEST(FlatTest, ScalarAndNothing_LieAtTheFirstOrNowhere) {
  const Mesh mesh = MeshOf({4});
  EXPECT_THAT(Boxes({}, mesh, {P::Flat(16)}, 0), ElementsAre(LocalBox{}));
  EXPECT_THAT(Boxes({}, mesh, {P::Flat(16)}, 1), IsEmpty());
  for (int32_t r = 0; r < 4; ++r) EXPECT_THAT(Boxes({0, 5}, mesh, {P::Flat(16)}, r), IsEmpty());
}

TEST(PlacementTest, BadPlacements_ErrorsSayWhatWouldBeRight) {
  EXPECT_THAT(Bad({4}, {P::Replicate()}), StatusIs(kInvalid, HasSubstr("1 are given for the mesh dimensions a, b")));
  EXPECT_THAT(Bad({4, 4}, {P::Replicate(), P::Shard(2)}),
              StatusIs(kInvalid, AllOf(HasSubstr("Shard(2) over the mesh dimension b of size 2"),
                                       HasSubstr("[4, 4] has no such dimension; they count from 0 to 1"))));
  EXPECT_THAT(Bad({4}, {P::Shard(-1), P::Replicate()}), StatusIs(kInvalid, HasSubstr("Shard(-1)")));
  EXPECT_THAT(Bad({}, {P::Shard(0), P::Replicate()}), StatusIs(kInvalid, HasSubstr("a scalar has no dimension")));
  EXPECT_THAT(Bad({4}, {P::StridedShard(0, 2), P::Replicate()}), StatusIs(kInvalid, HasSubstr("that can be 1")));
  EXPECT_THAT(Bad({4, 4}, {P::StridedShard(0, 2), P::Shard(1)}), StatusIs(kInvalid, HasSubstr("that can be 1")));
  EXPECT_THAT(Bad({4}, {P::StridedShard(0, 3), P::Shard(0)}), StatusIs(kInvalid, HasSubstr("that can be 1 or 2")));
  EXPECT_THAT(Bad({4}, {P::StridedShard(0, 0), P::Shard(0)}), StatusIs(kInvalid, HasSubstr("that can be 1 or 2")));
  EXPECT_THAT(Bad({4}, {P::Replicate(), P::StridedShard(0, 2)}), StatusIs(kInvalid, HasSubstr("that can be 1")));
  EXPECT_THAT(Bad({4}, {P::Owned(2), P::Shard(0)}), StatusIs(kInvalid, HasSubstr("they count from 0 to 1")));
  EXPECT_THAT(Bad({4}, {P::Partial(), P::Shard(0)}), StatusIs(kInvalid, HasSubstr("no storage; reduce first")));
  P unknown;
  unknown.kind = static_cast<P::Kind>(77);
  EXPECT_THAT(Bad({4}, {unknown, P::Shard(0)}), StatusIs(kInvalid, HasSubstr("placement kind 77")));
}

TEST(PlacementTest, BadFlat_ErrorsSayWhatWouldBeRight) {
  const auto bad = [](const P& flat) { return Bad({4, 5}, {flat}, {2}); };
  EXPECT_THAT(bad(P::Flat(0)), StatusIs(kInvalid, HasSubstr("the granule is 0; it must be 1 to")));
  EXPECT_THAT(bad(P::Flat(kMaxGranule + 1)), StatusIs(kInvalid, HasSubstr("the granule is")));
  EXPECT_THAT(bad(P::FlatIn(4, 99, 2)), StatusIs(kInvalid, HasSubstr("the first element is 2")));
  EXPECT_THAT(bad(P::FlatIn(4, 99, -4)), StatusIs(kInvalid, HasSubstr("the first element is -4")));
  EXPECT_THAT(bad(P::FlatIn(4, -1, 0)), StatusIs(kInvalid, HasSubstr("the space is -1")));
  EXPECT_THAT(bad(P::FlatIn(4, INT64_MAX, 0)), StatusIs(kInvalid, HasSubstr("the space is")));
  EXPECT_THAT(bad(P::FlatIn(4, 27, 8)), StatusIs(kInvalid, HasSubstr("at least 20 behind the first element 8")));
  EXPECT_OK(bad(P::FlatIn(4, 28, 8)));
  EXPECT_THAT(bad(P::FlatIn(4, 28, 32)), StatusIs(kInvalid, HasSubstr("the space is 28")));
  EXPECT_THAT(Bad({4}, {P::Flat(1), P::Flat(2)}), StatusIs(kInvalid, HasSubstr("another mesh dimension has Flat(2)")));
}

TEST(PlacementTest, HugeTensors_AreArithmeticOrTypedErrors) {
  const int64_t tera = int64_t{1} << 40, half = int64_t{1} << 31;
  const Mesh mesh = MeshOf({16384});
  EXPECT_THAT(Boxes({tera}, mesh, {P::Shard(0)}, 16383),
              ElementsAre(LocalBox{{{tera - (tera >> 14)}, {tera >> 14}}, 0, {1}}));
  EXPECT_THAT(Boxes({half, half}, mesh, {P::Flat(kMaxGranule)}, 0),
              ElementsAre(LocalBox{{{0, 0}, {half >> 14, half}}, 0, {half, 1}}));
  // Shards of whole granules: the last ones are empty, and their number times their size stays within 64 bits.
  const int64_t most = kMaxElements - 1;
  EXPECT_THAT(Boxes({most}, mesh, {P::Flat(kMaxGranule - 1)}, 16000), SizeIs(1));
  EXPECT_THAT(Boxes({most}, mesh, {P::Flat(kMaxGranule - 1)}, 16383), IsEmpty());
  EXPECT_THAT(Boxes({5}, mesh, {P::Flat(kMaxGranule)}, 16383), IsEmpty());
  EXPECT_THAT(BoxesOf({tera, tera}, mesh, {P::Shard(0)}, Rank(0)), StatusIs(kExhausted, HasSubstr("2^62")));
  EXPECT_THAT(BoxesOf({tera}, mesh, {P::Shard(0)}, Rank(16384)),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("rank 16384")));
}

TEST(PlacementTest, ForEachHolder_DisjointPartsUntilTold) {
  ASSERT_OK_AND_ASSIGN(const PlacedTensor placed,
                       PlacedTensor::Create({9}, MeshOf({2, 2}), {P::Shard(0), P::Shard(0)}));
  std::vector<std::pair<Coordinates, Box>> held;  // 0-2 and 3-4, 5-6 and 7-8
  const auto visit = [&](const Coordinates& at, const Box& part) {
    held.emplace_back(at, part);
    return held.size() < 2;
  };
  EXPECT_TRUE(placed.ForEachHolder({{4}, {0}}, visit));
  EXPECT_THAT(held, IsEmpty());
  EXPECT_FALSE(placed.ForEachHolder({{4}, {5}}, visit));
  EXPECT_THAT(held, ElementsAre(Pair(Coordinates{0, 1}, Box{{4}, {1}}), Pair(Coordinates{1, 0}, Box{{5}, {2}})));
}

TEST(PlacementTest, ByName_OthersReplicate) {
  const Mesh mesh = MeshOf({2, 3, 4});
  ASSERT_OK_AND_ASSIGN(const auto placements, PlaceAlong(mesh, {{"c", P::Shard(1)}, {"a", P::Owned(1)}}));
  std::vector<std::string> texts;
  for (const P& p : placements) texts.push_back(p.ToString());
  EXPECT_THAT(texts, ElementsAre("Owned(1)", "Replicate", "Shard(1)"));
  EXPECT_THAT(PlaceAlong(mesh, {{"tp", P::Shard(0)}}),
              StatusIs(absl::StatusCode::kNotFound, AllOf(HasSubstr("Shard(0)"), HasSubstr("\"tp\""))));
  EXPECT_THAT(PlaceAlong(mesh, {{"a", P::Shard(0)}, {"a", P::Flat(2)}}),
              StatusIs(kInvalid, HasSubstr("a is named twice, for Shard(0) and Flat(2)")));
}

TEST(ReplicasTest, Hsdp_ReplicasDifferAlongTheReplicatedDimension) {
  const std::vector<P> placements = {P::Replicate(), P::Shard(0)};
  EXPECT_THAT(ReplicasOf(MeshOf({2, 3}), placements, Rank(4)).value(), ElementsAre(Rank(1), Rank(4)));
  EXPECT_THAT(ReplicasOf(MeshOf({2, 3}), placements, Rank(1)).value(), ElementsAre(Rank(1), Rank(4)));
  EXPECT_THAT(ReplicasOf(MeshOf({2, 3}), {P::Shard(0), P::Flat(1)}, Rank(4)).value(), ElementsAre(Rank(4)));
  EXPECT_THAT(ReplicasOf(MeshOf({2, 3}), placements, Rank(6)), StatusIs(absl::StatusCode::kNotFound, HasSubstr("6")));
  EXPECT_THAT(ReplicasOf(MeshOf({2, 3}), {P::Shard(0)}, Rank(0)), StatusIs(kInvalid, HasSubstr("1 are given")));
}

TEST(ReplicasTest, SlicedMesh_InstancesAreReplicas) {
  const Mesh sliced = MeshOf({2, 2, 2}).Slice({"a", "c"}).value();
  const std::vector<P> placements = {P::Replicate(), P::Shard(0)};
  EXPECT_THAT(ReplicasOf(sliced, placements, Rank(3)).value(), ElementsAre(Rank(1), Rank(5), Rank(3), Rank(7)));
}

}  // namespace
}  // namespace shardmesh
