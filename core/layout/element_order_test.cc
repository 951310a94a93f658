#include "core/layout/element_order.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "core/layout/element_order_model.h"

namespace shardmesh {
namespace {

constexpr int64_t kChecked = 40;  // of a run, behind each element

int64_t RowMajorIndex(const std::vector<int64_t>& shape, const std::vector<int64_t>& at) {
  int64_t index = 0;
  for (size_t d = 0; d < shape.size(); ++d) index = index * shape[d] + at[d];
  return index;
}

// Every element of every run, both ways, against the definition.
void CheckTensor(const LayoutTensor& tensor) {
  SCOPED_TRACE(absl::StrCat(tensor.granule.ToString(), " of ", ::testing::PrintToString(tensor.shape)));
  const auto layout = *BucketLayout::Create({tensor}, {});
  const TensorPlace& place = layout.places()[0];
  const ElementOrder order(tensor);
  std::vector<int64_t> stored_at(place.num_elements, -1);
  for (int64_t stored = 0; stored < place.padded_elements; ++stored) {
    const std::vector<int64_t> at = CoordinatesAt(tensor, stored);
    const ElementOrder::Run run = order.AtStored(stored);
    ASSERT_GT(run.num_elements, 0) << stored;
    if (at.empty()) {
      ASSERT_EQ(run.at, ElementOrder::kPadding) << stored;
    } else {
      ASSERT_EQ(run.at, RowMajorIndex(tensor.shape, at)) << stored;
      stored_at[run.at] = stored;
    }
    for (int64_t i = 1; i < std::min({run.num_elements, place.padded_elements - stored, kChecked}); ++i) {
      const std::vector<int64_t> behind = CoordinatesAt(tensor, stored + i);
      ASSERT_EQ(behind.empty(), at.empty()) << stored << " + " << i;
      if (at.empty()) continue;
      ASSERT_EQ(RowMajorIndex(tensor.shape, behind), run.at + i) << stored << " + " << i;
    }
  }
  for (int64_t i = 0; i < place.num_elements; ++i) {
    const ElementOrder::Run run = order.AtRowMajor(i);
    ASSERT_GT(run.num_elements, 0) << i;
    ASSERT_LE(run.num_elements, place.num_elements - i) << i;
    for (int64_t j = 0; j < std::min(run.num_elements, kChecked); ++j)
      ASSERT_EQ(stored_at[i + j], run.at + j) << i << " + " << j;
  }
}

TEST(ElementOrder, IsTheDefinition) {
  for (const char* granule : {"flat:64", "rows:2", "block:8", "block:16", "whole"}) {
    for (const std::vector<int64_t>& shape :
         {std::vector<int64_t>{8, 8}, {17, 8}, {8, 17}, {20, 33}, {1, 1}, {3, 9, 10}, {2, 2, 5, 8}, {2, 16, 16}}) {
      CheckTensor({"w", shape, "", *ParseGranule(granule), ""});
    }
  }
  CheckTensor({"v", {100}, "", {}, ""});
  const ElementOrder scalar({"s", {}, "", {}, ""});
  EXPECT_EQ(scalar.AtStored(0).at, 0);
  EXPECT_EQ(scalar.AtStored(0).num_elements, 1);
  EXPECT_EQ(scalar.AtStored(1).at, ElementOrder::kPadding);
}

// What needs one step for each row would never end here.
TEST(ElementOrder, RowsAsWideAsABlock_AreOneRun) {
  const ElementOrder order({"w", {int64_t{1} << 33, 128}, "", *ParseGranule("block:128"), ""});
  EXPECT_EQ(order.AtStored(5).num_elements, (int64_t{1} << 40) - 5);
  EXPECT_EQ(order.AtRowMajor(5).num_elements, (int64_t{1} << 40) - 5);
}

}  // namespace
}  // namespace shardmesh
