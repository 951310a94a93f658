#include "checkpoint/folder_access.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "checkpoint/folder.h"
#include "checkpoint/manifest.h"
#include "core/base/matchers.h"
#include "core/mesh/mesh_spec.h"
#include "local/testing/temp_folder.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

class FolderAccessTest : public ::testing::Test {
 protected:
  FolderAccessTest() : root_(fs::canonical(temp_.path()) / "root") { fs::create_directories(root_); }

  // As one that is being saved.
  std::string Begun(const fs::path& folder, const std::string& secret) {
    fs::create_directories(folder);
    std::ofstream(folder / kSecretFile) << secret;
    return folder.string();
  }
  void WriteManifest(const fs::path& folder) {
    Manifest manifest;
    manifest.spec.name = "job";
    manifest.spec.mesh = *ParseMeshSpec("fsdp=1");
    manifest.spec.parameters = {{"w", {3}}};
    manifest.step = 7;
    manifest.saved = 2;
    manifest.digest = 0xfedcba9876543210;
    fs::create_directories(folder);
    std::ofstream(folder / kManifestFile) << ManifestText(manifest);
  }

  testing::TempFolder temp_;
  const fs::path root_;
  const std::string secret_ = NewSecret();
};

TEST_F(FolderAccessTest, Secrets_AreOfTheRightLength_AndNeverTheSame) {
  EXPECT_EQ(secret_.size(), kSecretBytes);
  EXPECT_NE(secret_, NewSecret());
}

TEST_F(FolderAccessTest, AFolderThatIsBeingSaved_IsOpened_ByItsSecretAlone) {
  const std::string folder = Begun(root_ / ".step-a", secret_);
  const FolderAccess any;
  ASSERT_OK_AND_ASSIGN(const UniqueFd fd, any.OpenToSave(folder, secret_));
  EXPECT_EQ(faccessat(fd.get(), kSecretFile, F_OK, 0), 0);
  for (const std::string& wrong : {std::string(), secret_.substr(1), secret_ + "0", std::string(kSecretBytes, '0')}) {
    EXPECT_THAT(any.OpenToSave(folder, wrong), StatusIs(Code::kPermissionDenied, HasSubstr("has not proved")));
  }
  const std::string shown = Begun(root_ / "step-a", secret_);
  EXPECT_THAT(any.OpenToSave(shown, secret_), StatusIs(Code::kPermissionDenied, ::testing::_));
  const std::string longer = Begun(root_ / ".step-b", secret_ + "\n");
  EXPECT_THAT(any.OpenToSave(longer, secret_), StatusIs(Code::kPermissionDenied, ::testing::_));
  fs::create_symlink("nowhere", fs::path(folder) / kManifestFile);
  EXPECT_THAT(any.OpenToSave(folder, secret_), StatusIs(Code::kPermissionDenied, ::testing::_));
  fs::remove(fs::path(folder) / kManifestFile);
  WriteManifest(folder);
  EXPECT_THAT(any.OpenToSave(folder, secret_), StatusIs(Code::kPermissionDenied, ::testing::_));
}

TEST_F(FolderAccessTest, ASecretThatIsALink_OrAFifo_ProvesNothing) {
  std::ofstream(root_ / "text") << secret_;
  const fs::path folder = root_ / ".step-a";
  fs::create_directories(folder);
  fs::create_symlink(root_ / "text", folder / kSecretFile);
  EXPECT_THAT(FolderAccess().OpenToSave(folder, secret_), StatusIs(Code::kPermissionDenied, ::testing::_));
  fs::remove(folder / kSecretFile);
  ASSERT_EQ(mkfifo((folder / kSecretFile).c_str(), 0600), 0);
  EXPECT_THAT(FolderAccess().OpenToSave(folder, secret_), StatusIs(Code::kPermissionDenied, ::testing::_));
}

TEST_F(FolderAccessTest, ACheckpoint_IsOpened_ByItsStepAndDigest) {
  WriteManifest(root_ / "step-7");
  const std::string folder = root_ / "step-7";
  EXPECT_OK(FolderAccess().OpenToLoad(folder, 7, 0xfedcba9876543210));
  for (const auto& [step, digest] : {std::pair(8, 0xfedcba9876543210), {7, 0xfedcba9876543211}}) {
    EXPECT_THAT(FolderAccess().OpenToLoad(folder, step, digest), StatusIs(Code::kPermissionDenied, ::testing::_));
  }
  fs::create_directory_symlink(folder, root_ / "latest");  // as people name it
  EXPECT_OK(FolderAccess().OpenToLoad(root_ / "latest", 7, 0xfedcba9876543210));
  // The same words where there is no manifest, and where there is nothing.
  const absl::Status wrong = FolderAccess().OpenToLoad(folder, 8, 0).status();
  fs::remove(root_ / "step-7" / kManifestFile);
  EXPECT_EQ(FolderAccess().OpenToLoad(folder, 8, 0).status(), wrong);
  fs::remove(folder);
  EXPECT_EQ(FolderAccess().OpenToLoad(folder, 8, 0).status(), wrong);
}

TEST_F(FolderAccessTest, WithRoots_NothingElse_AndNoLinkBelowThem) {
  const std::string inside = Begun(root_ / "a/.step-a", secret_);
  const std::string outside = Begun(root_.parent_path() / "rooted/.step-a", secret_);
  ASSERT_OK_AND_ASSIGN(const FolderAccess access,
                       FolderAccess::Create({(root_ / "b/..").lexically_normal(), root_.string() + "/a/"}));
  EXPECT_OK(access.OpenToSave(inside, secret_));
  EXPECT_OK(access.OpenToSave(absl::StrCat(root_.string(), "//a/.step-a/"), secret_));
  EXPECT_THAT(access.OpenToSave(outside, secret_),
              StatusIs(Code::kPermissionDenied, HasSubstr("below no --checkpoint-root of this worker (/")));
  for (const char* way : {"/../rooted/.step-a", "/a/../../rooted/.step-a", "/./a/.step-a"}) {
    EXPECT_THAT(access.OpenToSave(root_.string() + way, secret_), StatusIs(Code::kInvalidArgument, ::testing::_))
        << way;
  }
  fs::create_directory_symlink(root_.parent_path() / "rooted", root_ / "link");
  EXPECT_OK(FolderAccess().OpenToSave(root_ / "link/.step-a", secret_));
  EXPECT_THAT(access.OpenToSave(root_ / "link/.step-a", secret_), StatusIs(Code::kPermissionDenied, ::testing::_));
  WriteManifest(root_.parent_path() / "rooted");
  EXPECT_THAT(access.OpenToLoad(root_ / "link", 7, 0xfedcba9876543210),
              StatusIs(Code::kPermissionDenied, ::testing::_));
}

TEST_F(FolderAccessTest, RootsThatCannotBe_AreRefused) {
  EXPECT_THAT(FolderAccess::Create({""}), StatusIs(Code::kInvalidArgument, HasSubstr("empty")));
  EXPECT_THAT(FolderAccess::Create({root_ / "../root"}), StatusIs(Code::kInvalidArgument, ::testing::_));
  EXPECT_THAT(FolderAccess::Create({root_ / "none"}), StatusIs(Code::kNotFound, HasSubstr("none")));
  std::ofstream(root_ / "file") << "x";
  EXPECT_THAT(FolderAccess::Create({root_ / "file"}), StatusIs(Code::kNotFound, HasSubstr("file")));
}

}  // namespace
}  // namespace shardmesh
