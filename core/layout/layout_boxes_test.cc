#include "core/layout/layout_boxes.h"

#include <cstdlib>
#include <map>
#include <random>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "core/layout/element_order_model.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

LayoutOptions Shards(int64_t n, int64_t bucket_elements = 1 << 20) {
  LayoutOptions options;
  options.num_shards = n;
  options.bucket_elements = bucket_elements;
  return options;
}

// Calls visit(coordinates, place) for every element of a box.
template <typename Visit>
void ForEachElement(const LocalBox& local, Visit visit) {
  for (int64_t i = 0; i < local.box.NumElements(); ++i) {
    int64_t rest = i, place = local.offset;
    std::vector<int64_t> at(local.box.sizes.size());
    for (size_t d = at.size(); d-- > 0;) {
      at[d] = local.box.offsets[d] + rest % local.box.sizes[d];
      place += rest % local.box.sizes[d] * local.strides[d];
      rest /= local.box.sizes[d];
    }
    visit(at, place);
  }
}

TEST(BoxesOfShard, RandomModels_EveryElementOnceAndWhereTheStretchesSay) {
  uint64_t seed = std::random_device()();
  if (const char* given = std::getenv("SHARDMESH_TEST_SEED"); given != nullptr) {
    ASSERT_TRUE(absl::SimpleAtoi(given, &seed));
  }
  SCOPED_TRACE(absl::StrCat("SHARDMESH_TEST_SEED=", seed));
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t n) { return static_cast<int64_t>(random() % n); };
  const char* const granules[] = {"flat:64", "rows:1", "block:8", "block:16", "whole"};
  for (int round = 0; round < 40 && !HasFailure(); ++round) {
    std::vector<LayoutTensor> tensors;
    for (int64_t i = 1 + below(6); i-- > 0;) {
      LayoutTensor tensor{absl::StrCat("t", i), {1 + below(20), below(20)}, "", *ParseGranule(granules[below(5)]), ""};
      if (below(2) == 0) tensor.shape.insert(tensor.shape.begin(), 1 + below(3));
      tensors.push_back(tensor);
    }
    const auto layout = *BucketLayout::Create(tensors, Shards(1 + below(5), 1 + below(2000)));
    // (tensor, coordinates) -> (bucket, shard, place), by boxes and by stretches.
    std::map<std::pair<int, std::vector<int64_t>>, std::tuple<int, int64_t, int64_t>> by_boxes, by_stretches;
    for (int64_t shard = 0; shard < layout.num_shards(); ++shard) {
      const std::vector<ShardBox> boxes = *BoxesOfShard(layout, shard);
      for (const ShardBox& box : boxes) {
        ForEachElement(box.local, [&](const std::vector<int64_t>& at, int64_t place) {
          ASSERT_TRUE(by_boxes.emplace(std::pair(box.tensor, at), std::tuple(box.bucket, shard, place)).second);
        });
      }
      for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
        for (const Stretch& s : layout.StretchesOf(b, shard)) {
          for (int64_t i = 0; i < s.num_elements; ++i) {
            const std::vector<int64_t> at = CoordinatesAt(tensors[s.tensor], s.first_element + i);
            if (!at.empty()) by_stretches.emplace(std::pair(s.tensor, at), std::tuple(b, shard, s.shard_offset + i));
          }
        }
      }
    }
    EXPECT_EQ(by_boxes, by_stretches);
  }
}

TEST(BoxesOfShard, ABlockAtTheEdge_KeepsTheRowsOfAWholeOne) {
  const auto layout = *BucketLayout::Create({{"w", {10, 12}, "", *ParseGranule("block:8"), ""}}, Shards(1));
  const std::vector<ShardBox> boxes = *BoxesOfShard(layout, 0);
  ASSERT_EQ(boxes.size(), 4u);
  EXPECT_EQ(boxes[3].local.box.ToString(), "[8:10, 8:12]");
  EXPECT_EQ(boxes[3].local.offset, 3 * 64);
  EXPECT_EQ(boxes[3].local.strides, (Dims{8, 1}));
}

TEST(BoxesOfShard, BlocksAreBounded) {
  const auto layout = [](int64_t shards) {
    return *BucketLayout::Create({{"w", {8 << 10, 8 << 11}, "", *ParseGranule("block:8"), ""}}, Shards(shards));
  };
  EXPECT_THAT(BoxesOfShard(layout(1), 0), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("2097152 blocks")));
  EXPECT_EQ(BoxesOfShard(layout(2), 0)->size(), static_cast<size_t>(kMaxShardBoxes));
}

TEST(BoxesOfShard, Scalar_AndNoSuchShard) {
  const auto layout = *BucketLayout::Create({{"s", {}, "", {}, ""}}, Shards(2));
  EXPECT_EQ(BoxesOfShard(layout, 0)->size(), 1u);
  EXPECT_TRUE(BoxesOfShard(layout, 1)->empty());
  EXPECT_THAT(BoxesOfShard(layout, 2), StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("0 to 1")));
}

}  // namespace
}  // namespace shardmesh
