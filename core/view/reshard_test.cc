#include "core/view/reshard.h"

#include "core/base/matchers.h"

namespace shardmesh {

// For messages of failing tests.
void PrintTo(const Copy& c, std::ostream* out) {
  *out << "{" << c.source.value() << " -> " << c.destination.value() << ", tensor " << c.tensor << ", "
       << c.source_offset << " -> " << c.destination_offset << ", " << c.num_elements << "}";
}

namespace {

using P = DimPlacement;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;

Mesh Line(int64_t size) { return Mesh::Create({size}, {"a"}).value(); }

TensorView Placed(const Dims& shape, int64_t ranks, const P& placement) {
  return TensorView::Placed(shape, Line(ranks), {placement}).value();
}

LocalBox Dense(const Box& box) { return {box, 0, RowMajorStrides(box.sizes)}; }

TEST(ReshardTest, MoreRanks_EachTakesItsIntervals) {
  const auto plan = PlanReshard({Placed({12}, 2, P::Shard(0))}, {Placed({12}, 3, P::Shard(0))}, Rank(1));
  ASSERT_OK(plan);
  EXPECT_THAT(plan->copies, ElementsAre(Copy{Rank(0), Rank(1), 0, 4, 0, 2}, Copy{Rank(1), Rank(1), 0, 0, 2, 2}));
  EXPECT_EQ(plan->num_elements, 4);
  ASSERT_THAT(plan->sources, SizeIs(2));
  EXPECT_EQ(plan->sources[1].source, Rank(1));
  EXPECT_EQ(plan->sources[1].num_copies, 1);
  EXPECT_EQ(plan->sources[1].num_elements, 2);
}

TEST(ReshardTest, NamedTensors_AreNamedInMessages) {
  const TensorView four = Placed({4}, 2, P::Shard(0)), five = Placed({5}, 2, P::Shard(0));
  const TensorView none = TensorView::Listed({4}, {}).value();
  EXPECT_THAT(PlanReshard({four, four}, {four, five}, Rank(0), 9, {"a.w", "b.w"}),
              StatusIs(kInvalid, HasSubstr("tensor \"b.w\" is [4] at the source")));
  EXPECT_THAT(PlanReshard({none}, {four}, Rank(0), 9, {"a.w"}), StatusIs(kInvalid, HasSubstr("tensor \"a.w\": ")));
  EXPECT_THAT(PlanReshard({four}, {four}, Rank(0), 9, {"a", "b"}), StatusIs(kInvalid, HasSubstr("2 names")));
}

TEST(ReshardTest, FlatHeadBodyTail_BecomeOneCopy) {
  // Shards of 18 of a 5 x 4 x 3 tensor: boxes of three kinds, one run of memory.
  const auto plan = PlanReshard({Placed({5, 4, 3}, 4, P::Flat(6))}, {Placed({5, 4, 3}, 1, P::Replicate())}, Rank(0));
  ASSERT_OK(plan);
  EXPECT_THAT(plan->copies, ElementsAre(Copy{Rank(0), Rank(0), 0, 0, 0, 18}, Copy{Rank(1), Rank(0), 0, 0, 18, 18},
                                        Copy{Rank(2), Rank(0), 0, 0, 36, 18}, Copy{Rank(3), Rank(0), 0, 0, 54, 6}));
}

TEST(ReshardTest, ColumnsToRows_OneRunPerRow) {
  const auto plan = PlanReshard({Placed({4, 6}, 2, P::Shard(1))}, {Placed({4, 6}, 2, P::Shard(0))}, Rank(1));
  ASSERT_OK(plan);
  EXPECT_THAT(plan->copies, ElementsAre(Copy{Rank(0), Rank(1), 0, 6, 0, 3}, Copy{Rank(0), Rank(1), 0, 9, 6, 3},
                                        Copy{Rank(1), Rank(1), 0, 6, 3, 3}, Copy{Rank(1), Rank(1), 0, 9, 9, 3}));
}

TEST(ReshardTest, SameColumnMajorMemory_IsOneCopy) {
  const Box whole = Box::Whole({2, 3, 4});
  const LocalBox transposed{whole, 0, {1, 2, 6}};
  // Not one by one and then joined: one counts against the limit.
  const auto copies = Intersect({2, 3, 4}, {{Rank(0), transposed}}, {{Rank(5), {whole, 7, {1, 2, 6}}}}, 1);
  ASSERT_OK(copies);
  EXPECT_THAT(*copies, ElementsAre(Copy{Rank(0), Rank(5), 0, 0, 7, 24}));
}

TEST(ReshardTest, QOutOfStoredQkv_IsReadInPlace) {
  const PackedParts qkv =
      PackedParts::Create({8, 4}, {{"q", {{0, 0}, {4, 4}}}, {"kv", {{4, 0}, {4, 4}}}}, Gaps::kRefuse).value();
  const TensorView kv = TensorView::Part(qkv.shape(), *qkv.Find("kv"), Line(1), {P::Replicate()}).value();
  const auto plan = PlanReshard({Placed({8, 4}, 3, P::Shard(0))}, {kv}, Rank(0));  // rows 0-2, 3-5, 6-7
  ASSERT_OK(plan);
  EXPECT_THAT(plan->copies, ElementsAre(Copy{Rank(1), Rank(0), 0, 4, 0, 8}, Copy{Rank(2), Rank(0), 0, 0, 8, 8}));
}

TEST(ReshardTest, ScalarAndEmptyTensors_OneElementAndNone) {
  const auto plan = PlanReshard({Placed({}, 3, P::Owned(2)), Placed({0, 7}, 2, P::Shard(1))},
                                {Placed({}, 2, P::Replicate()), Placed({0, 7}, 2, P::Flat(4))}, Rank(1));
  ASSERT_OK(plan);
  EXPECT_THAT(plan->copies, ElementsAre(Copy{Rank(2), Rank(1), 0, 0, 0, 1}));
}

TEST(ReshardTest, RankOfOtherMesh_GetsNothingOfThatTensor) {
  const Mesh stage = Mesh::Create({2}, {"a"}, {Rank(2), Rank(3)}).value();
  const std::vector<TensorView> source = {Placed({4}, 2, P::Shard(0)), Placed({4}, 2, P::Shard(0))};
  const std::vector<TensorView> stages = {Placed({4}, 2, P::Shard(0)),
                                          TensorView::Placed({4}, stage, {P::Shard(0)}).value()};
  EXPECT_THAT(PlanReshard(source, stages, Rank(2)).value().copies, ElementsAre(Copy{Rank(0), Rank(2), 1, 0, 0, 2}));
  EXPECT_THAT(PlanReshard(source, stages, Rank(4)),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("rank 4 has no part in any of the 2 tensors")));
  EXPECT_THAT(PlanReshard({}, {}, Rank(4)).value().copies, IsEmpty());
}

TEST(ReshardTest, DifferentLists_AreInvalidArgument) {
  const TensorView a = Placed({4}, 2, P::Shard(0)), b = Placed({5}, 2, P::Shard(0));
  EXPECT_THAT(PlanReshard({a}, {a, a}, Rank(0)), StatusIs(kInvalid, HasSubstr("1 tensors at the source and 2")));
  EXPECT_THAT(PlanReshard({a, a}, {a, b}, Rank(0)),
              StatusIs(kInvalid, HasSubstr("tensor 1 is [4] at the source and [5] at the destination")));
}

TEST(ReshardTest, OneTensorWithoutAName_HasNoNumber) {
  const TensorView a = Placed({4}, 2, P::Shard(0)), b = Placed({5}, 2, P::Shard(0));
  EXPECT_THAT(PlanReshard({a}, {b}, Rank(0)), StatusIs(kInvalid, HasSubstr("reshard: the tensor is [4] at the")));
  EXPECT_THAT(PlanReshard({a}, {b}, Rank(0), 9, {"w"}), StatusIs(kInvalid, HasSubstr("reshard: tensor \"w\" is [4]")));
}

TEST(ReshardTest, SourceThatLacksOrContradicts_IsInvalidArgument) {
  const TensorView want = Placed({8}, 1, P::Replicate());
  const LocalBox low = Dense({{0}, {5}}), high = Dense({{6}, {2}}), middle = Dense({{3}, {4}});
  const TensorView gap = TensorView::Listed({8}, {{Rank(0), low}, {Rank(1), high}}).value();
  EXPECT_THAT(
      PlanReshard({want, gap}, {want, want}, Rank(0)),
      StatusIs(kInvalid, AllOf(HasSubstr("tensor 1: "), HasSubstr("has 7 of the 8 elements [0:8] that rank 0"))));
  const TensorView both = TensorView::Listed({8}, {{Rank(0), low}, {Rank(1), high}, {Rank(2), middle}}).value();
  EXPECT_THAT(PlanReshard({both}, {want}, Rank(0)), StatusIs(kInvalid, HasSubstr("the tensor: view: [")));
  EXPECT_OK(PlanReshard({want}, {both}, Rank(2)));  // readers may overlap
}

TEST(ReshardTest, MaxCopies_IsALimitWithTheCount) {
  const std::vector<TensorView> columns = {Placed({100, 6}, 2, P::Shard(1))}, rows = {Placed({100, 6}, 1, P::Shard(0))};
  EXPECT_THAT(PlanReshard(columns, rows, Rank(0), 200).value().copies, SizeIs(200));
  EXPECT_THAT(PlanReshard(columns, rows, Rank(0), 199),
              StatusIs(kExhausted, AllOf(HasSubstr("the tensor: reshard: 200 copies or more"), HasSubstr("is 199"))));
  // 2^60 runs are refused without being written out.
  const int64_t giga = int64_t{1} << 30;
  EXPECT_THAT(
      PlanReshard({Placed({giga, giga, 2}, 2, P::Shard(2))}, {Placed({giga, giga, 2}, 1, P::Shard(0))}, Rank(0)),
      StatusIs(kExhausted, HasSubstr("1152921504606846976 copies or more")));
}

TEST(ReshardTest, Intersect_AllDestinationsInOrder) {
  const Dims shape = {4, 2};
  const std::vector<RankBox> stored = {{Rank(1), Dense({{0, 0}, {2, 2}})}, {Rank(0), Dense({{2, 0}, {2, 2}})}};
  const std::vector<RankBox> wanted = {{Rank(7), Dense({{1, 0}, {2, 2}})}, {Rank(3), Dense({{0, 0}, {1, 1}})}};
  const auto copies = Intersect(shape, stored, wanted);
  ASSERT_OK(copies);
  EXPECT_THAT(*copies, ElementsAre(Copy{Rank(1), Rank(3), 0, 0, 0, 1}, Copy{Rank(0), Rank(7), 0, 0, 2, 2},
                                   Copy{Rank(1), Rank(7), 0, 2, 0, 2}));
  EXPECT_THAT(Intersect(shape, stored, wanted, 2), StatusIs(kExhausted, HasSubstr("3 copies or more")));
  EXPECT_THAT(Intersect(shape, stored, {{Rank(7), Dense({{3, 0}, {2, 2}})}}), StatusIs(kInvalid, HasSubstr("[3:5")));
}

TEST(ReshardTest, ElementsFarApart_DoNotOverflow) {
  const LocalBox far{{{0}, {2}}, 0, {kMaxElements}};
  const auto copies = Intersect({2}, {{Rank(0), far}}, {{Rank(0), far}});
  ASSERT_OK(copies);
  EXPECT_THAT(*copies, ElementsAre(Copy{Rank(0), Rank(0), 0, 0, 0, 1},
                                   Copy{Rank(0), Rank(0), 0, kMaxElements, kMaxElements, 1}));
}

TEST(ReshardTest, HugeSpace_IsIntervalArithmetic) {
  const int64_t tera = int64_t{1} << 40;
  const auto plan =
      PlanReshard({Placed({tera}, 4096, P::Flat(256))}, {Placed({tera}, 16384, P::Flat(256))}, Rank(16001));
  ASSERT_OK(plan);
  EXPECT_THAT(plan->copies, ElementsAre(Copy{Rank(4000), Rank(16001), 0, tera >> 14, 0, tera >> 14}));
}

}  // namespace
}  // namespace shardmesh
