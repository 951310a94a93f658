#include "client/cli/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

std::string Contents(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

TEST(SafetensorsTest, Head_IsLengthAndPaddedJson) {
  ASSERT_OK_AND_ASSIGN(
      const std::string head,
      SafetensorsHead({{"w", Format::kFp32, {2, 1}, "01234567"}, {"b", Format::kBf16Sr, {}, "89"}}, {{"step", "3"}}));
  const std::string json = R"({"__metadata__":{"step":"3"},"w":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
                           R"("b":{"dtype":"BF16","shape":[],"data_offsets":[8,10]}})";
  EXPECT_EQ(head.size() % 8, 0u);
  EXPECT_EQ(static_cast<unsigned char>(head[0]), head.size() - 8);
  EXPECT_EQ(head.substr(1, 7), std::string(7, '\0'));
  EXPECT_EQ(head.substr(8, json.size()), json);
  EXPECT_EQ(head.find_first_not_of(' ', 8 + json.size()), std::string::npos);
}

TEST(SafetensorsTest, Head_NamesMustBeUnique) {
  EXPECT_THAT(SafetensorsHead({{"__metadata__", Format::kFp32, {}, "0123"}}, {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("reserved")));
  EXPECT_THAT(SafetensorsHead({{"w", Format::kFp32, {}, "0123"}, {"w", Format::kFp32, {}, "0123"}}, {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"w\" twice")));
}

TEST(SafetensorsTest, Write_ReplacesTheFileAndLeavesNothingBeside) {
  const std::string folder = ::testing::TempDir() + "/safetensors";
  std::filesystem::create_directories(folder);
  const std::string path = folder + "/x.safetensors";
  std::ofstream(path) << "old";
  ASSERT_OK_AND_ASSIGN(const int64_t bytes, WriteSafetensors(path, {{"w", Format::kBf16, {2}, "abcd"}}, {}));
  const std::string contents = Contents(path);
  EXPECT_EQ(static_cast<int64_t>(contents.size()), bytes);
  EXPECT_EQ(contents.substr(contents.size() - 4), "abcd");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1);
}

TEST(SafetensorsTest, Write_Fails_SaysWhyAndLeavesNothing) {
  const std::string folder = ::testing::TempDir() + "/taken";
  std::filesystem::create_directories(folder + "/x.safetensors/full");  // cannot be replaced by a file
  EXPECT_THAT(WriteSafetensors(folder + "/x.safetensors", {}, {}),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("cannot rename to")));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1);
  EXPECT_THAT(WriteSafetensors(folder + "/none/x", {}, {}),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("No such file")));
}

}  // namespace
}  // namespace shardmesh
