#include "client/cli/files/whole_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "core/base/matchers.h"
#include "local/testing/temp_folder.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The largest file that this process may have takes the place of a disk that is full.
TEST(WholeFileTest, NoRoom_IsResourceExhausted_AndTheOldFileStays) {
  const testing::TempFolder folder;
  const std::string path = folder.File("out");
  ASSERT_EQ(WriteWholeFile(path, {"old"}).value_or(0), 3);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small = {1000, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto written = WriteWholeFile(path, {std::string(4096, 'x')});
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_THAT(written, StatusIs(absl::StatusCode::kResourceExhausted, AllOf(HasSubstr("cannot write"), HasSubstr(path))));
  std::string text;
  std::ifstream(path) >> text;
  EXPECT_EQ(text, "old");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(std::filesystem::path(path).parent_path()), {}), 1);
}

}  // namespace
}  // namespace shardmesh
