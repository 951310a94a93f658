#include "client/cli/files/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "client/cli/files/whole_file.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

std::string Contents(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
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

TEST(SafetensorsTest, SymbolicLink_StaysAndItsFileIsWritten) {
  const std::string folder = ::testing::TempDir() + "/links";
  std::filesystem::create_directories(folder + "/there");
  std::filesystem::create_symlink("there/new", folder + "/to_nothing");
  std::filesystem::create_symlink(folder + "/to_nothing", folder + "/to_link");
  for (int time = 0; time < 2; ++time) {  // made, then replaced
    ASSERT_OK(CheckCanWrite(folder + "/to_link"));
    ASSERT_OK(WriteSafetensors(folder + "/to_link", {{"w", Format::kBf16, {2}, "abcd"}}, {}));
    EXPECT_TRUE(std::filesystem::is_symlink(folder + "/to_link"));
    EXPECT_TRUE(std::filesystem::is_symlink(folder + "/to_nothing"));
    EXPECT_THAT(Contents(folder + "/there/new"), EndsWith("abcd"));
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder + "/there"), {}), 1);
  }
}

TEST(SafetensorsTest, NoRegularFile_IsNamedAndLeftAsItIs) {
  const std::string folder = ::testing::TempDir() + "/special";
  std::filesystem::create_directories(folder);
  ASSERT_EQ(mkfifo((folder + "/fifo").c_str(), 0600), 0);
  std::filesystem::create_symlink(folder + "/fifo", folder + "/to_fifo");
  std::filesystem::create_symlink("/dev/null", folder + "/to_device");
  std::filesystem::create_symlink("round", folder + "/round");
  const std::pair<const char*, const char*> cases[] = {{"fifo", "it is a FIFO; name a file"},
                                                       {"to_fifo", "it is a FIFO; name a file"},
                                                       {"to_device", "it is a device; name a file"},
                                                       {"round", "its symbolic links never end"}};
  for (const auto& [name, message] : cases) {
    const std::string path = folder + "/" + name;
    EXPECT_THAT(CheckCanWrite(path), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message)));
    EXPECT_THAT(WriteSafetensors(path, {}, {}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message)));
  }
  EXPECT_TRUE(std::filesystem::is_fifo(folder + "/fifo"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 4);
}

// Whoever may write in the folder cannot have another file written by leaving a link there.
TEST(SafetensorsTest, PartIsThere_IsNeitherFollowedNorRemoved) {
  const std::string folder = ::testing::TempDir() + "/part";
  std::filesystem::create_directories(folder);
  const std::string part = folder + "/x." + std::to_string(getpid()) + ".part";
  std::filesystem::create_symlink(folder + "/victim", part);
  EXPECT_THAT(WriteSafetensors(folder + "/x", {}, {}),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr(part + ": it is in the way; remove it")));
  EXPECT_TRUE(std::filesystem::is_symlink(part));
  EXPECT_FALSE(std::filesystem::exists(folder + "/victim"));
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
