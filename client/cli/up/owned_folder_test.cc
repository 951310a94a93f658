#include "client/cli/up/owned_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;

class OwnedFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(base_);
    fs::create_directories(base_);
  }
  absl::StatusOr<std::unique_ptr<OwnedFolder>> Create() { return OwnedFolder::Create(base_, "run"); }
  // Of a folder as its owner made it, with files in it, after the owner was killed.
  std::string KilledOwners() {
    const pid_t pid = fork();
    if (pid == 0) {
      const auto folder = Create();
      fs::create_directories((*folder)->path() + "/deep/er");
      std::ofstream((*folder)->path() + "/deep/er/file") << "text";
      fs::rename((*folder)->path(), base_ + "/run-killed");
      raise(SIGKILL);
    }
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_TRUE(WIFSIGNALED(status));
    return base_ + "/run-killed";
  }

  const std::string base_ = ::testing::TempDir() + "/base";
};

TEST_F(OwnedFolderTest, Removed_WithItsObject) {
  ASSERT_OK_AND_ASSIGN(auto folder, Create());
  const std::string path = folder->path();
  EXPECT_EQ(fs::status(path).permissions(), fs::perms::owner_all);
  std::ofstream(path + "/file") << "text";
  folder.reset();
  EXPECT_FALSE(fs::exists(path));
}

TEST_F(OwnedFolderTest, OwnerKilled_TheNextRemovesIt) {
  const std::string left = KilledOwners();
  ASSERT_TRUE(fs::exists(left + "/deep/er/file"));
  ASSERT_OK(Create());
  EXPECT_FALSE(fs::exists(left));
}

TEST_F(OwnedFolderTest, LivingOwners_FoldersWithoutAnOwner_AndOthers_AreLeft) {
  ASSERT_OK_AND_ASSIGN(const auto living, Create());
  fs::create_directories(base_ + "/run-without");  // one that is being made
  fs::create_directories(base_ + "/other-1");
  std::ofstream(base_ + "/other-1/owner") << "";
  ASSERT_OK(Create());
  EXPECT_TRUE(fs::exists(living->path() + "/owner"));
  EXPECT_TRUE(fs::exists(base_ + "/run-without"));
  EXPECT_TRUE(fs::exists(base_ + "/other-1"));
}

TEST_F(OwnedFolderTest, NoBase_IsNotFound) {
  EXPECT_THAT(OwnedFolder::Create("/none", "run"),
              StatusIs(absl::StatusCode::kNotFound, ::testing::HasSubstr("/none/run-")));
}

}  // namespace
}  // namespace shardmesh
