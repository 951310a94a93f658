#include "core/layout/bucket_layout.h"

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

LayoutTensor Tensor(const char* name, std::vector<int64_t> shape, const char* granule = "flat:256",
                    const char* space = "bf16") {
  return {name, std::move(shape), space, *ParseGranule(granule), ""};
}

LayoutTensor Tied(LayoutTensor tensor, const char* name, const char* to) {
  tensor.name = name;
  tensor.tied_to = to;
  return tensor;
}

LayoutOptions Shards(int64_t n, int64_t bucket_elements = 1 << 20) {
  LayoutOptions options;
  options.num_shards = n;
  options.bucket_elements = bucket_elements;
  return options;
}

TEST(BucketLayout, PlacesInOrder_PaddingReported) {
  const auto layout =
      *BucketLayout::Create({Tensor("a", {300}), Tensor("b", {2, 256}), Tensor("scalar", {})}, Shards(2));
  ASSERT_EQ(layout.buckets().size(), 1u);
  EXPECT_EQ(layout.places()[1].offset, 512);
  EXPECT_EQ(layout.places()[2].offset, 1024);
  EXPECT_EQ(layout.buckets()[0].shard_elements, 768);  // 1280 elements in granules of 256, on two shards
  EXPECT_EQ(layout.buckets()[0].padding, 1536 - 300 - 512 - 1);
  const std::vector<Stretch> stretches = layout.StretchesOf(0, 1);
  ASSERT_EQ(stretches.size(), 2u);
  EXPECT_EQ(stretches[0].tensor, 1);
  EXPECT_EQ(stretches[0].first_element, 256);
  EXPECT_EQ(stretches[0].shard_offset, 0);
  EXPECT_EQ(stretches[1].tensor, 2);
  EXPECT_EQ(stretches[1].shard_offset, 256);
}

TEST(BucketLayout, GranulesThatWouldPadEachOther_HaveSpacesOfTheirOwn) {
  const auto layout = *BucketLayout::Create(
      {Tensor("a", {64, 4096}, "rows:1"), Tensor("b", {64, 7168}, "rows:1"), Tensor("c", {64, 4096}, "rows:1"),
       Tensor("d", {4096}), Tensor("e", {64, 4096}, "rows:1", "int8_row")},
      Shards(64));
  EXPECT_EQ(layout.buckets().size(), 4u);
  EXPECT_EQ(layout.places()[0].bucket, layout.places()[2].bucket);
  EXPECT_NE(layout.places()[0].bucket, layout.places()[4].bucket);
  const std::vector<KindPadding> padding = layout.PaddingByKind();
  ASSERT_EQ(padding.size(), 2u);
  EXPECT_EQ(padding[0].kind, GranuleKind::kFlat);
  EXPECT_EQ(padding[0].padding, 64 * 256 - 4096);
  EXPECT_EQ(padding[1].padding, 0);
}

TEST(BucketLayout, OwnedMatrices_LieWholeAndBalanced) {
  std::vector<LayoutTensor> tensors;
  for (int i = 0; i < 8; ++i) tensors.push_back(Tensor(absl::StrCat("w", i).c_str(), {64, 64}, "whole"));
  const auto layout = *BucketLayout::Create(tensors, Shards(4));
  std::vector<int> matrices(4);
  for (const TensorPlace& place : layout.places()) {
    ++matrices[place.owner];
    EXPECT_EQ(layout.ShardsOf(0).first, layout.ShardsOf(0).second);
  }
  EXPECT_THAT(matrices, ElementsAre(2, 2, 2, 2));
  EXPECT_EQ(layout.buckets()[0].padding, 0);
  EXPECT_EQ(layout.StretchesOf(0, 3).size(), 2u);
}

TEST(BucketLayout, TiesShareTheOwnersPlace) {
  const LayoutTensor a = Tensor("a", {64});
  const auto layout = *BucketLayout::Create({Tied(a, "z", "a"), a, Tied(a, "y", "a")}, Shards(1));
  EXPECT_EQ(layout.buckets()[0].num_elements, 256);
  EXPECT_EQ(layout.places()[0].bucket, 0);
  EXPECT_THAT(layout.buckets()[0].tensors, ElementsAre(1));
}

TEST(BucketLayout, NothingToPlace) {
  EXPECT_TRUE(BucketLayout::Create({}, Shards(8))->buckets().empty());
  const auto layout = *BucketLayout::Create({Tensor("none", {0, 7})}, Shards(8));
  EXPECT_TRUE(layout.buckets().empty());
  EXPECT_EQ(layout.places()[0].bucket, -1);
  EXPECT_EQ(layout.ShardsOf(0), (std::pair<int64_t, int64_t>(0, -1)));
}

TEST(BucketLayout, BadArguments_AreNamed) {
  const LayoutTensor a = Tensor("a", {64});
  const auto create = [](std::vector<LayoutTensor> tensors, LayoutOptions options = Shards(2)) {
    return BucketLayout::Create(std::move(tensors), options).status();
  };
  EXPECT_THAT(create({a, a}), StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("0 and 1"), HasSubstr("\"a\""))));
  EXPECT_THAT(create({Tensor("", {1})}), StatusIs(Code::kInvalidArgument, HasSubstr("empty")));
  EXPECT_THAT(create({Tensor("v", {64}, "rows:1")}), StatusIs(Code::kInvalidArgument, HasSubstr("\"v\"")));
  EXPECT_THAT(create({Tied(a, "b", "nobody")}), StatusIs(Code::kInvalidArgument, HasSubstr("\"nobody\"")));
  EXPECT_THAT(create({a, Tied(a, "b", "a"), Tied(a, "c", "b")}),
              StatusIs(Code::kInvalidArgument, HasSubstr("itself tied")));
  EXPECT_THAT(create({a, Tied(Tensor("", {65}), "b", "a")}),
              StatusIs(Code::kInvalidArgument, HasSubstr("[65] and [64]")));
  EXPECT_THAT(create({a}, Shards(0)), StatusIs(Code::kInvalidArgument, HasSubstr("num_shards is 0")));
  EXPECT_THAT(create({a}, Shards(kMaxShards + 1)), StatusIs(Code::kInvalidArgument, HasSubstr("1048577")));
  EXPECT_THAT(create({a}, Shards(1, 0)), StatusIs(Code::kInvalidArgument, HasSubstr("bucket_elements is 0")));
  LayoutOptions options;
  options.max_padding = 0;
  EXPECT_THAT(create({a}, options), StatusIs(Code::kInvalidArgument, HasSubstr("max_padding is 0")));
  EXPECT_THAT(create({Tensor("huge", {1, int64_t{1} << 40}, "rows:1")}, Shards(1 << 10)),
              StatusIs(Code::kResourceExhausted, AllOf(HasSubstr("\"huge\""), HasSubstr("fewer shards"))));
  std::vector<LayoutTensor> many;
  for (int i = 0; i < 65; ++i) many.push_back(Tensor(absl::StrCat("t", i).c_str(), {int64_t{1} << 40}));
  EXPECT_THAT(create(many), StatusIs(Code::kResourceExhausted, HasSubstr("\"t64\"")));
}

TEST(BucketLayout, UnknownName_NotFound) {
  const auto layout = *BucketLayout::Create({Tensor("a", {64})}, Shards(1));
  EXPECT_EQ(*layout.IndexOf("a"), 0);
  EXPECT_THAT(layout.IndexOf("b"), StatusIs(Code::kNotFound, AllOf(HasSubstr("\"b\""), HasSubstr("\"a\""))));
}

// The hash is an agreement between processes of different builds and machines: this value never changes.
TEST(BucketLayout, HashIsStable_AndDependsOnEverything) {
  std::vector<LayoutTensor> tensors = {Tensor("embed.w", {1000, 64}), Tensor("l.w", {64, 64}, "whole"),
                                       Tensor("l.q", {256, 256}, "block:128"), Tensor("l.b", {64}, "flat:64", "fp32")};
  const std::string hash = BucketLayout::Create(tensors, Shards(4))->hash();
  EXPECT_EQ(hash, BucketLayout::Create(tensors, Shards(4))->hash());
  EXPECT_EQ(hash, "dde53afb0d1c4f86b0819ddd1d2812e0");
  EXPECT_NE(hash, BucketLayout::Create(tensors, Shards(2))->hash());
  tensors[3].name = "l.c";
  EXPECT_NE(hash, BucketLayout::Create(tensors, Shards(4))->hash());
}

}  // namespace
}  // namespace shardmesh
