#include "checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

TEST(SafetensorsTest, Head_IsLengthAndPaddedJson) {
  ASSERT_OK_AND_ASSIGN(const std::string head,
                       SafetensorsHead({{"w", "F32", {2, 1}, 8}, {"b", "BF16", {}, 2}}, {{"step", "3"}}));
  const std::string json = R"({"__metadata__":{"step":"3"},"w":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
                           R"("b":{"dtype":"BF16","shape":[],"data_offsets":[8,10]}})";
  EXPECT_EQ(head.size() % 8, 0u);
  EXPECT_EQ(static_cast<unsigned char>(head[0]), head.size() - 8);
  EXPECT_EQ(head.substr(1, 7), std::string(7, '\0'));
  EXPECT_EQ(head.substr(8, json.size()), json);
  EXPECT_EQ(head.find_first_not_of(' ', 8 + json.size()), std::string::npos);
}

TEST(SafetensorsTest, Head_NamesMustBeUnique) {
  EXPECT_THAT(SafetensorsHead({{"__metadata__", "F32", {}, 4}}, {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("reserved")));
  EXPECT_THAT(SafetensorsHead({{"w", "F32", {}, 4}, {"w", "F32", {}, 4}}, {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"w\" twice")));
  EXPECT_THAT(SafetensorsHead({{"a\xff", "F32", {}, 4}, {"a\xfe", "F32", {}, 4}}, {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not UTF-8")));
  EXPECT_THAT(SafetensorsHead({}, {{"key", "\xc3"}}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not UTF-8")));
}

}  // namespace
}  // namespace shardmesh
