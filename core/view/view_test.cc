#include "core/view/view.h"

#include <map>
#include <random>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using P = DimPlacement;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kNotFound = absl::StatusCode::kNotFound;

Mesh MeshOf(const std::vector<int64_t>& sizes) {
  std::vector<std::string> names;
  for (size_t d = 0; d < sizes.size(); ++d) names.emplace_back(1, static_cast<char>('a' + d));
  return Mesh::Create(sizes, names).value();
}

// q of 4 rows, k and v of 2, 4 columns.
PackedParts Qkv() {
  return PackedParts::Create({8, 4}, {{"q", {{0, 0}, {4, 4}}}, {"k", {{4, 0}, {2, 4}}}, {"v", {{6, 0}, {2, 4}}}},
                             Gaps::kRefuse)
      .value();
}

std::vector<std::pair<int32_t, LocalBox>> Sources(const TensorView& view, const Box& want, int32_t reader) {
  std::vector<std::pair<int32_t, LocalBox>> sources;
  EXPECT_TRUE(view.ForEachSource(want, Rank(reader), [&](Rank rank, const LocalBox& local) {
    sources.emplace_back(rank.value(), local);
    return true;
  }));
  return sources;
}

TEST(ViewTest, Part_BoxesAreThoseOfTheStoredTensor) {
  const PackedParts qkv = Qkv();
  ASSERT_OK_AND_ASSIGN(const TensorView k, TensorView::Part(qkv.shape(), *qkv.Find("k"), MeshOf({2}), {P::Shard(0)}));
  EXPECT_EQ(k.shape(), (Dims{8, 4}));
  EXPECT_THAT(k.BoxesOf(Rank(1)).value(), ElementsAre(LocalBox{{{5, 0}, {1, 4}}, 0, {4, 1}}));
  EXPECT_THAT(Sources(k, {{4, 1}, {2, 2}}, 0), ElementsAre(Pair(0, LocalBox{{{4, 1}, {1, 2}}, 1, {4, 1}}),
                                                           Pair(1, LocalBox{{{5, 1}, {1, 2}}, 1, {4, 1}})));
  EXPECT_THAT(Sources(k, {{0, 0}, {4, 4}}, 0), IsEmpty());
}

TEST(ViewTest, Packed_LocalPartsLieSideBySide) {
  ASSERT_OK_AND_ASSIGN(const TensorView rows,
                       TensorView::Packed(Qkv(), 0, MeshOf({2}), {{P::Shard(0)}, {P::Shard(0)}, {P::Shard(0)}}));
  EXPECT_THAT(rows.BoxesOf(Rank(1)).value(),
              ElementsAre(LocalBox{{{2, 0}, {2, 4}}, 0, {4, 1}}, LocalBox{{{5, 0}, {1, 4}}, 8, {4, 1}},
                          LocalBox{{{7, 0}, {1, 4}}, 12, {4, 1}}));
  ASSERT_OK_AND_ASSIGN(
      const PackedParts gate_up,
      PackedParts::Create({2, 8}, {{"gate", {{0, 0}, {2, 6}}}, {"up", {{0, 6}, {2, 2}}}}, Gaps::kRefuse));
  ASSERT_OK_AND_ASSIGN(const TensorView columns,
                       TensorView::Packed(gate_up, 1, MeshOf({2}), {{P::Shard(1)}, {P::Shard(1)}}));
  EXPECT_THAT(columns.BoxesOf(Rank(1)).value(),
              ElementsAre(LocalBox{{{0, 3}, {2, 3}}, 0, {4, 1}}, LocalBox{{{0, 7}, {2, 1}}, 3, {4, 1}}));
}

TEST(ViewTest, BadPacking_ErrorsNameTheParts) {
  const Mesh mesh = MeshOf({2});
  const auto packed = [&](const std::vector<std::vector<P>>& placements, int dim = 0) {
    return TensorView::Packed(Qkv(), dim, mesh, placements).status();
  };
  const std::vector<P> row = {P::Shard(0)}, column = {P::Shard(1)};
  EXPECT_THAT(packed({row, row}), StatusIs(kInvalid, HasSubstr("placements of 2 parts for a tensor of 3")));
  EXPECT_THAT(packed({row, row, row}, 2), StatusIs(kInvalid, HasSubstr("no dimension 2")));
  EXPECT_THAT(packed({row, row, row}, 1),
              StatusIs(kInvalid, AllOf(HasSubstr("\"q\" [0:4, 0:4] and \"k\" [4:6, 0:4] differ along dimension 0"),
                                       HasSubstr("side by side along 1"))));
  EXPECT_THAT(packed({row, row, column}), StatusIs(kInvalid, HasSubstr("\"v\" [6:8, 0:4] differ along dimension 1")));
  EXPECT_THAT(packed({row, {P::Flat(1)}, row}), StatusIs(kInvalid, HasSubstr("\"k\" is flat")));
  EXPECT_THAT(packed({row, {P::Shard(7)}, row}), StatusIs(kInvalid, HasSubstr("part \"k\": placement: Shard(7)")));
  EXPECT_THAT(TensorView::Part({8, 4}, {{7, 0}, {2, 4}}, mesh, row), StatusIs(kInvalid, HasSubstr("[7:9, 0:4]")));
}

TEST(ViewTest, Replicas_ReaderItselfElseReaderModuloTheirNumber) {
  ASSERT_OK_AND_ASSIGN(const TensorView hsdp, TensorView::Placed({6}, MeshOf({3, 2}), {P::Replicate(), P::Shard(0)}));
  const Box low{{0}, {1}}, high{{4}, {1}};
  const auto rank_of = [&](const Box& want, int32_t reader) { return Sources(hsdp, want, reader).at(0).first; };
  EXPECT_EQ(rank_of(low, 4), 4);   // itself
  EXPECT_EQ(rank_of(high, 4), 3);  // 4 mod 3 = 1: the second of 1, 3, 5
  EXPECT_EQ(rank_of(high, 5), 5);
  EXPECT_EQ(rank_of(low, 6), 0);
  EXPECT_EQ(rank_of(low, 7), 2);
  EXPECT_EQ(rank_of(low, 8), 4);
}

TEST(ViewTest, SlicedMesh_OtherInstancesAreReplicas) {
  const Mesh sliced = MeshOf({2, 2}).Slice({"b"}).value();
  ASSERT_OK_AND_ASSIGN(const TensorView view, TensorView::Placed({4}, sliced, {P::Shard(0)}));
  EXPECT_THAT(Sources(view, {{0}, {4}}, 3), ElementsAre(Pair(2, LocalBox{{{0}, {2}}, 0, {1}}),  // 3 mod 2
                                                        Pair(3, LocalBox{{{2}, {2}}, 0, {1}})));
}

TEST(ViewTest, Listed_BoxlessRankHasAPart) {
  ASSERT_OK_AND_ASSIGN(const TensorView view,
                       TensorView::Listed({}, {{Rank(1), {Box::Whole({}), 0, {}}}}, {Rank(9), Rank(4)}));
  EXPECT_EQ(view.BoxesOf(Rank(1))->size(), 1u);
  for (const Rank rank : {Rank(4), Rank(9)}) EXPECT_TRUE(view.BoxesOf(rank).value().empty());
  EXPECT_THAT(view.BoxesOf(Rank(5)), StatusIs(absl::StatusCode::kNotFound, HasSubstr("rank 5")));
  EXPECT_THAT(TensorView::Listed({}, {}, {Rank(-1)}), StatusIs(kInvalid, HasSubstr("rank -1 is negative")));
}

TEST(ViewTest, Listed_EqualBoxesAreReplicas) {
  const LocalBox left{{{0, 0}, {2, 1}}, 5, {1, 1}}, right{{{0, 1}, {2, 2}}, 0, {1, 2}};
  ASSERT_OK_AND_ASSIGN(
      const TensorView view,
      TensorView::Listed(
          {2, 3}, {{Rank(9), left}, {Rank(2), right}, {Rank(4), left}, {Rank(4), {{{2, 3}, {0, 0}}, 0, {1, 1}}}}));
  EXPECT_OK(view.CanBeSource());
  EXPECT_THAT(view.BoxesOf(Rank(2)).value(), ElementsAre(right));
  EXPECT_EQ(view.BoxesOf(Rank(4)).value().size(), 2u);
  EXPECT_THAT(view.BoxesOf(Rank(3)), StatusIs(kNotFound, HasSubstr("rank 3 has no box")));
  const LocalBox left_row{{{1, 0}, {1, 1}}, 6, {1, 1}}, right_row{{{1, 1}, {1, 2}}, 1, {1, 2}};
  const Box row{{1, 0}, {1, 3}};
  EXPECT_THAT(Sources(view, row, 9), UnorderedElementsAre(Pair(9, left_row), Pair(2, right_row)));
  EXPECT_THAT(Sources(view, row, 6), UnorderedElementsAre(Pair(4, left_row), Pair(2, right_row)));
}

TEST(ViewTest, BadLists_AreTyped) {
  const LocalBox whole{{{0}, {4}}, 0, {1}}, tail{{{3}, {1}}, 9, {1}};
  EXPECT_THAT(TensorView::Listed({4}, {{Rank(1), whole}, {Rank(1), tail}}),
              StatusIs(kInvalid, HasSubstr("the boxes [0:4] and [3:4] of rank 1 overlap")));
  EXPECT_THAT(TensorView::Listed({4}, {{Rank(1), whole}, {Rank(1), whole}}), StatusIs(kInvalid, HasSubstr("rank 1")));
  EXPECT_THAT(TensorView::Listed({3}, {{Rank(1), whole}}), StatusIs(kInvalid, HasSubstr("view: rank 1: box: [0:4]")));
  EXPECT_THAT(TensorView::Listed({4}, {{Rank(-1), whole}}), StatusIs(kInvalid, HasSubstr("rank -1 is negative")));
  ASSERT_OK_AND_ASSIGN(const TensorView view, TensorView::Listed({4}, {{Rank(1), whole}, {Rank(2), tail}}));
  EXPECT_THAT(view.CanBeSource(), StatusIs(kInvalid, HasSubstr("[0:4] of rank 1 and [3:4] of rank 2 overlap")));
}

TEST(ViewTest, Listed_BoxesThatSharePlaces_AreInvalidArgument) {
  const auto listed = [](const Dims& shape, const LocalBox& a, const LocalBox& b) {
    const LocalBox far{Box::Whole(shape), 1000, RowMajorStrides(shape)};
    return TensorView::Listed(shape, {{Rank(3), a}, {Rank(1), far}, {Rank(3), b}}).status();
  };
  const LocalBox low{{{0}, {2}}, 0, {1}};
  EXPECT_THAT(
      listed({4}, low, {{{2}, {2}}, 0, {1}}),
      StatusIs(kInvalid, HasSubstr("the boxes [0:2] at offset 0 and [2:4] at offset 0 of rank 3 share places")));
  EXPECT_THAT(listed({4}, low, {{{2}, {2}}, 1, {1}}), StatusIs(kInvalid, HasSubstr("share places")));
  EXPECT_OK(listed({4}, low, {{{2}, {2}}, 2, {1}}));
  EXPECT_OK(listed({4}, low, {{{2}, {0}}, 0, {1}}));
  // Columns of one row-major tensor lie between each other.
  const LocalBox left{{{0, 0}, {3, 2}}, 0, {4, 1}};
  EXPECT_OK(listed({3, 4}, left, {{{0, 2}, {3, 2}}, 2, {4, 1}}));
  EXPECT_THAT(listed({3, 4}, left, {{{0, 2}, {3, 2}}, 1, {4, 1}}), StatusIs(kInvalid, HasSubstr("share places")));
  EXPECT_OK(listed({3, 4}, left, {{{0, 2}, {3, 1}}, 3, {4, 1}}));
  // Every second element, and those between; strides that agree at one element alone.
  EXPECT_OK(listed({8}, {{{0}, {4}}, 0, {2}}, {{{4}, {4}}, 1, {2}}));
  EXPECT_THAT(listed({8}, {{{0}, {4}}, 1, {6}}, {{{4}, {4}}, 4, {3}}), StatusIs(kInvalid, HasSubstr("share places")));
  EXPECT_OK(listed({8}, {{{0}, {4}}, 1, {6}}, {{{4}, {4}}, 3, {3}}));
}

TEST(ViewTest, Listed_SharedPlacesAmongAllPairs_AgreeWithCounting) {
  std::mt19937_64 random(20);
  const auto below = [&random](int64_t n) { return static_cast<int64_t>(random() % n); };
  int shared = 0;
  for (int round = 0; round < 2000; ++round) {
    const Dims shape = {4, 4};
    std::vector<RankBox> boxes;
    std::map<int64_t, int> places;
    for (int64_t row = 0; row < 4; row += 2) {
      for (int64_t column = 0; column < 4; column += 2) {
        const int64_t inner = 1 + below(3), outer = inner + 1 + below(12);
        LocalBox local{{{row, column}, {1 + below(2), 1 + below(2)}}, below(40), {outer, inner}};
        if (below(2) == 0) std::swap(local.strides[0], local.strides[1]);
        for (int64_t i = 0; i < local.box.sizes[0]; ++i) {
          for (int64_t j = 0; j < local.box.sizes[1]; ++j) {
            ++places[local.offset + i * local.strides[0] + j * local.strides[1]];
          }
        }
        boxes.push_back({Rank(0), local});
      }
    }
    const bool expected = absl::c_any_of(places, [](const auto& place) { return place.second > 1; });
    shared += expected;
    EXPECT_EQ(TensorView::Listed(shape, boxes).ok(), !expected) << round;
  }
  EXPECT_GT(shared, 200);
  EXPECT_LT(shared, 1800);
}

// Two boxes of so many rows that share a place in each; a row of a box is a run.
absl::Status ListSharing(int64_t rows) {
  const LocalBox left{{{0, 0}, {rows, 2}}, 0, {4, 1}}, right{{{0, 2}, {rows, 2}}, 1, {4, 1}};
  return TensorView::Listed({rows, 4}, {{Rank(0), left}, {Rank(0), right}}).status();
}

TEST(ViewTest, Listed_MoreRunsThanAreChecked_AreTheCallersPromise) {
  EXPECT_THAT(ListSharing(kMaxCheckedRuns / 2), StatusIs(kInvalid, HasSubstr("share places")));
  EXPECT_OK(ListSharing(kMaxCheckedRuns / 2 + 1));
}

TEST(ViewTest, Packed_PartsThatLieSideBySide_StartWhereTheLastEnds) {
  std::vector<NamedBox> parts;
  for (int64_t p = 0; p < 4096; ++p) parts.push_back({absl::StrCat(p), {{2 * p}, {2}}});
  ASSERT_OK_AND_ASSIGN(const PackedParts packed, PackedParts::Create({8192}, parts, Gaps::kRefuse));
  const std::vector<std::vector<P>> placements(4096, {P::Shard(0)});
  ASSERT_OK_AND_ASSIGN(const TensorView view, TensorView::Packed(packed, 0, MeshOf({2}), placements));
  const std::vector<LocalBox> boxes = view.BoxesOf(Rank(1)).value();
  ASSERT_EQ(boxes.size(), 4096u);
  for (int64_t p = 0; p < 4096; ++p) EXPECT_EQ(boxes[p], (LocalBox{{{2 * p + 1}, {1}}, p, {1}}));
  parts.push_back({"more", {{8192}, {1}}});
  EXPECT_THAT(PackedParts::Create({8193}, parts, Gaps::kRefuse),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("there are 4097; one tensor has at most 4096")));
}

TEST(ViewTest, RankOutsideTheMesh_IsNotFound) {
  ASSERT_OK_AND_ASSIGN(const TensorView view, TensorView::Placed({4}, MeshOf({2}), {P::Shard(0)}));
  EXPECT_THAT(view.BoxesOf(Rank(2)), StatusIs(kNotFound, HasSubstr("rank 2 is not in")));
}

}  // namespace
}  // namespace shardmesh
