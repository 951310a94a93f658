#include "core/layout/layout_reshard.h"

#include <cstdlib>
#include <map>
#include <random>
#include <tuple>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "core/layout/element_order_model.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

LayoutOptions Shards(int64_t n, int64_t bucket_elements) {
  LayoutOptions options;
  options.num_shards = n;
  options.bucket_elements = bucket_elements;
  return options;
}

// Every shard's memory of every bucket, by (bucket, shard, offset): the tensor and the coordinates of what lies there;
// without coordinates it is padding.
using Memory = std::map<std::tuple<int, int64_t, int64_t>, std::pair<std::string, std::vector<int64_t>>>;

Memory Fill(const BucketLayout& layout) {
  Memory memory;
  for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
    for (int64_t shard = 0; shard < layout.num_shards(); ++shard) {
      for (const Stretch& s : layout.StretchesOf(b, shard)) {
        const LayoutTensor& tensor = layout.tensors()[s.tensor];
        for (int64_t i = 0; i < s.num_elements; ++i) {
          memory[{b, shard, s.shard_offset + i}] = {tensor.name, CoordinatesAt(tensor, s.first_element + i)};
        }
      }
    }
  }
  return memory;
}

Memory Moved(const BucketLayout& from, const BucketLayout& to) {
  const Memory source = Fill(from);
  Memory memory;
  for (int64_t shard = 0; shard < to.num_shards(); ++shard) {
    const std::vector<ShardCopy> copies = *CopiesInto(from, to, shard);
    for (const ShardCopy& copy : copies) {
      for (int64_t i = 0; i < copy.num_elements; ++i) {
        const bool fresh = memory
                               .emplace(std::make_tuple(copy.destination_bucket, shard, copy.destination_offset + i),
                                        source.at({copy.source_bucket, copy.source_shard, copy.source_offset + i}))
                               .second;
        EXPECT_TRUE(fresh) << "written twice";
      }
    }
  }
  return memory;
}

Memory WithoutPadding(const Memory& memory) {
  Memory kept;
  for (const auto& [place, element] : memory) {
    if (!element.second.empty()) kept.emplace(place, element);
  }
  return kept;
}

TEST(CopiesInto, RandomModels_EveryElementArrivesOnce) {
  uint64_t seed = std::random_device()();
  if (const char* given = std::getenv("SHARDMESH_TEST_SEED"); given != nullptr) {
    ASSERT_TRUE(absl::SimpleAtoi(given, &seed));
  }
  SCOPED_TRACE(absl::StrCat("SHARDMESH_TEST_SEED=", seed));
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t n) { return static_cast<int64_t>(random() % n); };
  const char* const granules[] = {"flat:64", "flat:256", "rows:1", "whole", "block:8", "block:16"};
  for (int round = 0; round < 40 && !HasFailure(); ++round) {
    std::vector<LayoutTensor> here, there;
    for (int64_t i = 1 + below(12); i-- > 0;) {
      LayoutTensor tensor{absl::StrCat("t", i), {below(40), 1 + below(40)}, below(2) == 0 ? "a" : "b", {}, ""};
      if (below(3) == 0) tensor.shape.insert(tensor.shape.begin(), 1 + below(3));
      tensor.granule = *ParseGranule(granules[below(6)]);
      here.push_back(tensor);
      tensor.granule = *ParseGranule(granules[below(6)]);
      there.push_back(tensor);
    }
    const auto from = *BucketLayout::Create(there, Shards(1 + below(7), 1 + below(3000)));
    const auto to = *BucketLayout::Create(here, Shards(1 + below(7), 1 + below(3000)));
    EXPECT_EQ(WithoutPadding(Moved(from, to)), WithoutPadding(Fill(to)));
  }
}

TEST(CopiesInto, TheSameLayout_OneCopyABucket) {
  const auto layout = *BucketLayout::Create(
      {{"a", {512}, "", {}, ""}, {"b", {512}, "", {}, ""}, {"c", {512}, "", {}, ""}}, Shards(2, 1 << 20));
  const auto copies = *CopiesInto(layout, layout, 1);
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(copies[0].num_elements, 768);
  EXPECT_EQ(copies[0].source_shard, 1);
}

TEST(CopiesInto, WhatDiffers_IsNamed) {
  const auto layout = [](std::vector<int64_t> shape, const char* granule, const char* name = "w") {
    return *BucketLayout::Create({{name, std::move(shape), "", *ParseGranule(granule), ""}}, Shards(2, 1));
  };
  const auto to = layout({16, 16}, "flat:64");
  EXPECT_THAT(CopiesInto(layout({16, 16}, "flat:64", "v"), to, 0), StatusIs(Code::kNotFound, HasSubstr("\"w\"")));
  EXPECT_THAT(CopiesInto(layout({8, 32}, "flat:64"), to, 0),
              StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("[8,32]"), HasSubstr("[16,16]"))));
  EXPECT_THAT(CheckReshard(layout({16, 16}, "flat:64", "v"), to), StatusIs(Code::kNotFound, HasSubstr("\"w\"")));
  EXPECT_THAT(CheckReshard(layout({8, 32}, "block:8"), to), StatusIs(Code::kInvalidArgument, HasSubstr("block:8")));
  EXPECT_OK(CheckReshard(layout({16, 16}, "block:8"), to));
  const auto bf16 = *BucketLayout::Create({{"w", {16, 16}, "bf16", {}, ""}}, Shards(2, 1));
  EXPECT_THAT(CopiesInto(bf16, to, 0), StatusIs(Code::kInvalidArgument, HasSubstr("is bf16 [16,16]")));
  EXPECT_THAT(CopiesInto(to, to, 2), StatusIs(Code::kOutOfRange, HasSubstr("0 to 1")));
  EXPECT_THAT(CopiesInto(to, to, -1), StatusIs(Code::kOutOfRange, HasSubstr("-1")));
}

TEST(CheckReshard, LaterTensorDiffers_IsNamed) {
  const auto layout = [](int64_t size) {
    return *BucketLayout::Create({{"v", {8}, "", {}, ""}, {"w", {size}, "", {}, ""}}, Shards(2, 1));
  };
  EXPECT_THAT(CheckReshard(layout(8), layout(9)), StatusIs(Code::kInvalidArgument, HasSubstr("\"w\"")));
}

// 32 rows of blocks; the last of one and the first of another lie side by side in both once.
TEST(CopiesInto, FromBlocks_ACopyForEachRowOfABlock) {
  const auto layout = [](const char* granule) {
    return *BucketLayout::Create({{"w", {16, 16}, "", *ParseGranule(granule), ""}}, Shards(1, 1));
  };
  EXPECT_EQ(CopiesInto(layout("block:8"), layout("rows:1"), 0)->size(), 31u);
  EXPECT_EQ(CopiesInto(layout("rows:1"), layout("block:8"), 0)->size(), 31u);
  EXPECT_EQ(CopiesInto(layout("block:8"), layout("block:16"), 0)->size(), 31u);
  EXPECT_EQ(CopiesInto(layout("block:16"), layout("flat:64"), 0)->size(), 1u) << "blocks as wide as the matrix";
}

// A hostile pair of layouts does not cost the memory that it asks for.
TEST(CopiesInto, CopiesAreBounded) {
  const auto layout = [](int64_t shards) {
    std::vector<LayoutTensor> tensors;
    for (const char* name : {"a", "b"}) {
      tensors.push_back({name, {int64_t{1} << 26}, "", *ParseGranule("flat:64"), ""});
    }
    return *BucketLayout::Create(tensors, Shards(shards, 1));
  };
  EXPECT_THAT(CopiesInto(layout(1 << 20), layout(1), 0), StatusIs(Code::kResourceExhausted, HasSubstr("1048576")));
}

}  // namespace
}  // namespace shardmesh
