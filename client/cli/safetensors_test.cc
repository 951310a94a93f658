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

TEST(SafetensorsTest, CannotWrite_SaysWhyAndLeavesNothing) {
  const std::string folder = ::testing::TempDir() + "/taken";
  std::filesystem::create_directories(folder + "/sub");
  std::ofstream(folder + "/file") << "old";
  const auto files = [&] { return std::distance(std::filesystem::directory_iterator(folder), {}); };
  const auto expect = [&](const std::string& path, absl::StatusCode code, const std::string& message) {
    EXPECT_THAT(CheckCanWrite(path), StatusIs(code, HasSubstr(message)));
    EXPECT_THAT(WriteSafetensors(path, {}, {}), StatusIs(code, HasSubstr(message)));
    EXPECT_EQ(files(), 2);
  };
  expect(folder + "/none/x", absl::StatusCode::kNotFound, "there is no folder " + folder + "/none");
  expect(folder + "/sub", absl::StatusCode::kInvalidArgument, folder + "/sub: it is a folder; name a file");
  expect(folder + "/file/x", absl::StatusCode::kInvalidArgument, folder + "/file is no folder");
  expect("/sys/x", absl::StatusCode::kPermissionDenied, "in folder /sys");  // nobody makes files there
  EXPECT_OK(CheckCanWrite(folder + "/new"));
  EXPECT_OK(CheckCanWrite(folder + "/file"));
  EXPECT_EQ(files(), 2);
  EXPECT_EQ(Contents(folder + "/file"), "old");
}

}  // namespace
}  // namespace shardmesh
