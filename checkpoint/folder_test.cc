#include "checkpoint/folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/base/fault_point.h"
#include "core/base/matchers.h"
#include "core/mesh/mesh_spec.h"
#include "local/testing/temp_folder.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

Manifest Of(int64_t step) {
  Manifest manifest;
  manifest.spec.name = "job";
  manifest.spec.mesh = *ParseMeshSpec("fsdp=1");
  manifest.spec.parameters = {{"w", {3}}};
  manifest.step = step;
  manifest.files = {{"model.safetensors", 100}};
  return manifest;
}

absl::StatusOr<std::string> Write(const std::string& root, int64_t step) {
  auto checkpoint = NewCheckpoint::Begin(root);
  if (!checkpoint.ok()) return checkpoint.status();
  if (const auto added = (*checkpoint)->AddFile("model.safetensors", "head", 100); !added.ok()) return added;
  const auto finished = (*checkpoint)->Finish(Of(step));
  if (!finished.ok()) return finished.status();
  return finished->path;
}

std::vector<int64_t> StepsIn(const std::string& root) {
  std::vector<int64_t> steps;
  const auto found = ListCheckpoints(root);
  EXPECT_OK(found);
  for (const FoundCheckpoint& each : found.value_or(std::vector<FoundCheckpoint>())) steps.push_back(each.step);
  return steps;
}

int EntriesIn(const std::string& root) { return std::distance(fs::directory_iterator(root), {}); }

class FolderTest : public ::testing::Test {
 protected:
  testing::TempFolder temp_;
  const std::string root_ = temp_.File("root");
};

TEST_F(FolderTest, AFinishedCheckpoint_IsThere_WithItsBytes) {
  ASSERT_OK_AND_ASSIGN(const std::string path, Write(root_, 7));
  EXPECT_EQ(path, root_ + "/step-0000000000007");
  ASSERT_OK_AND_ASSIGN(const OpenedCheckpoint opened, OpenCheckpoint(path));
  EXPECT_EQ(opened.manifest.step, 7);
  std::ifstream file(path + "/model.safetensors", std::ios::binary);
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  EXPECT_EQ(bytes, "head" + std::string(96, '\0'));
  EXPECT_EQ(EntriesIn(root_), 1);
  EXPECT_EQ(EntriesIn(path), 2);
}

TEST_F(FolderTest, TheNewestOfAFolder_IsOpened) {
  for (const int64_t step : {9, 120, 30}) ASSERT_OK(Write(root_, step));
  fs::create_directories(root_ + "/step-0000000000999");  // no manifest
  fs::create_directories(root_ + "/step-5");
  std::ofstream(root_ + "/step-0000000000998") << "no folder";
  EXPECT_THAT(StepsIn(root_), ElementsAre(9, 120, 30));
  ASSERT_OK_AND_ASSIGN(const OpenedCheckpoint opened, OpenCheckpoint(root_));
  EXPECT_EQ(opened.manifest.step, 30);
}

TEST_F(FolderTest, TheCheckpointThatWasSavedLast_IsTheNewest_WhateverItsStep) {
  for (const int64_t step : {3, 8, 5}) ASSERT_OK(Write(root_, step));  // the job went back from 8 to 3
  ASSERT_OK_AND_ASSIGN(const std::vector<int64_t> removed, Prune(root_, {2, 0}));
  EXPECT_THAT(removed, ElementsAre(3));
  EXPECT_THAT(StepsIn(root_), ElementsAre(8, 5));

  ASSERT_OK(Write(root_, 8));  // again, with the same bits
  EXPECT_THAT(StepsIn(root_), ElementsAre(5, 8));
  ASSERT_OK_AND_ASSIGN(const OpenedCheckpoint opened, OpenCheckpoint(root_));
  EXPECT_EQ(opened.manifest.step, 8);
  EXPECT_EQ(opened.manifest.saved, 4);
  ASSERT_OK(Write(root_, 8));  // the newest already
  ASSERT_OK_AND_ASSIGN(const OpenedCheckpoint same, OpenCheckpoint(root_));
  EXPECT_EQ(same.manifest.saved, 4);
  EXPECT_EQ(EntriesIn(root_), 2);
  EXPECT_EQ(EntriesIn(opened.path), 2);
}

TEST_F(FolderTest, CheckpointsOfBeforeTheyWereCounted_AreOlder_AndOrderedByStep) {
  for (const int64_t step : {9, 30}) {
    ASSERT_OK_AND_ASSIGN(const std::string path, Write(root_, step));
    std::ofstream(path + "/manifest.json") << ManifestText(Of(step));
  }
  EXPECT_THAT(StepsIn(root_), ElementsAre(9, 30));
  ASSERT_OK(Write(root_, 5));
  EXPECT_THAT(StepsIn(root_), ElementsAre(9, 30, 5));
}

TEST_F(FolderTest, AManifestWhoseHeadIsDamaged_IsNotPassedOver) {
  for (const int64_t step : {1, 2}) ASSERT_OK(Write(root_, step));
  std::ofstream(root_ + "/step-0000000000001/manifest.json") << "{";
  EXPECT_THAT(OpenCheckpoint(root_), StatusIs(Code::kDataLoss, HasSubstr("step-0000000000001")));
  ASSERT_OK(Write(root_, 3));
  EXPECT_THAT(StepsIn(root_), ElementsAre(2, 3, 1));
}

TEST_F(FolderTest, WhatIsNotFinished_LeavesNothing) {
  {
    ASSERT_OK_AND_ASSIGN(const auto checkpoint, NewCheckpoint::Begin(root_));
    ASSERT_OK(checkpoint->AddFile("model.safetensors", "", 10));
    EXPECT_THAT(StepsIn(root_), ElementsAre());
    EXPECT_THAT(OpenCheckpoint(root_), StatusIs(Code::kNotFound, HasSubstr("is no checkpoint")));
  }
  EXPECT_EQ(EntriesIn(root_), 0);
}

TEST_F(FolderTest, AStepThatIsThere_StaysAsItIs) {
  ASSERT_OK(Write(root_, 7));
  const auto again = [&](const Manifest& manifest) {
    auto checkpoint = NewCheckpoint::Begin(root_);
    EXPECT_OK((*checkpoint)->AddFile("model.safetensors", "head", 100));
    return (*checkpoint)->Finish(manifest);
  };
  ASSERT_OK_AND_ASSIGN(const NewCheckpoint::Finished same, again(Of(7)));
  EXPECT_TRUE(same.already_there);
  EXPECT_EQ(same.path, root_ + "/step-0000000000007");
  Manifest other = Of(7);
  other.digest = 1;
  EXPECT_THAT(again(other), StatusIs(Code::kAlreadyExists, HasSubstr("with other weights or states")));
  other = Of(7);
  other.buffers = {{{"mean", "F32", {2}, 8}, std::string(32, '0')}};
  EXPECT_THAT(again(other), StatusIs(Code::kAlreadyExists, HasSubstr("with other buffers")));
  EXPECT_EQ(EntriesIn(root_), 1);
  EXPECT_OK(OpenCheckpoint(root_));
}

TEST_F(FolderTest, AStepThatIsThere_WithChangedBytes_IsNoSuccess) {
  ASSERT_OK_AND_ASSIGN(const std::string path, Write(root_, 7));
  std::fstream(path + "/model.safetensors", std::ios::in | std::ios::out | std::ios::binary).seekp(99).put('x');
  EXPECT_THAT(Write(root_, 7),
              StatusIs(Code::kDataLoss, AllOf(HasSubstr(path + "/model.safetensors is not what was saved"),
                                              HasSubstr("remove " + path + " and save again"))));
  fs::remove_all(path);
  EXPECT_OK(Write(root_, 7));
}

TEST_F(FolderTest, WritersThatLive_DoNotDisturbEachOther) {
  ASSERT_OK_AND_ASSIGN(const auto first, NewCheckpoint::Begin(root_));
  ASSERT_OK(Write(root_, 2));
  ASSERT_OK(first->AddFile("model.safetensors", "", 100));
  ASSERT_OK(first->Finish(Of(1)));
  EXPECT_THAT(StepsIn(root_), ElementsAre(2, 1));
}

TEST_F(FolderTest, ChangedFiles_AreNamed) {
  ASSERT_OK_AND_ASSIGN(const std::string path, Write(root_, 7));
  const std::string file = path + "/model.safetensors";
  fs::resize_file(file, 99);
  EXPECT_THAT(OpenCheckpoint(path),
              StatusIs(Code::kDataLoss, HasSubstr(file + " has 99 bytes; it was saved with 100")));
  fs::rename(file, path + "/elsewhere");
  EXPECT_THAT(OpenCheckpoint(path), StatusIs(Code::kDataLoss, HasSubstr("is missing")));
  fs::create_symlink("elsewhere", file);
  EXPECT_THAT(OpenCheckpoint(path), StatusIs(Code::kDataLoss, HasSubstr("is no regular file")));
  fs::remove(file);
  ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
  EXPECT_THAT(OpenCheckpoint(path), StatusIs(Code::kDataLoss, HasSubstr("is no regular file")));
  std::ofstream(path + "/manifest.json") << "{}";
  EXPECT_THAT(OpenCheckpoint(path), StatusIs(Code::kInvalidArgument, HasSubstr(path + "/manifest.json")));
  ASSERT_EQ(truncate((path + "/manifest.json").c_str(), kMaxManifestBytes + 1), 0);
  EXPECT_THAT(OpenCheckpoint(path), StatusIs(Code::kDataLoss, HasSubstr("is no file of at most")));
}

TEST_F(FolderTest, Links_AreNoCheckpoints_ButMayLeadToOne) {
  ASSERT_OK_AND_ASSIGN(const std::string path, Write(root_, 7));
  const std::string elsewhere = temp_.File("elsewhere");
  ASSERT_OK_AND_ASSIGN(const std::string other, Write(elsewhere, 9));
  fs::create_directory_symlink(other, root_ + "/step-0000000000009");
  fs::create_directory_symlink(elsewhere, root_ + "/.removed-step-0000000000003");
  fs::create_directory_symlink(elsewhere, root_ + "/.step-abcdef");
  EXPECT_THAT(StepsIn(root_), ElementsAre(7));
  ASSERT_OK(Write(root_, 8));
  ASSERT_OK_AND_ASSIGN(const auto removed, Prune(root_, {1, 0}));
  EXPECT_THAT(removed, ElementsAre(7));
  EXPECT_OK(OpenCheckpoint(other));
  fs::create_directory_symlink(elsewhere, temp_.File("link"));
  ASSERT_OK_AND_ASSIGN(const OpenedCheckpoint opened, OpenCheckpoint(temp_.File("link")));
  EXPECT_EQ(opened.manifest.step, 9);
  fs::rename(other + "/manifest.json", other + "/real");
  fs::create_symlink("real", other + "/manifest.json");
  EXPECT_THAT(OpenCheckpoint(other), StatusIs(Code::kNotFound, HasSubstr("is no checkpoint")));
}

TEST_F(FolderTest, FoldersThatCannotBe_AreNamed) {
  EXPECT_OK(Write(temp_.File("runs/one/root/"), 1));
  EXPECT_THAT(ListCheckpoints(root_), StatusIs(Code::kNotFound, HasSubstr(root_)));
  std::ofstream(temp_.File("file")) << "x";
  EXPECT_THAT(Write(temp_.File("file"), 1), StatusIs(Code::kNotFound, HasSubstr("file")));
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, NewCheckpoint::Begin(root_));
  const absl::Status huge = checkpoint->AddFile("huge", "", int64_t{1} << 60);
  EXPECT_THAT(std::string(huge.message()), HasSubstr("1152921504606846976 bytes are needed"));
}

TEST_F(FolderTest, Prune_KeepsTheNewestAndTheRounds) {
  for (const int64_t step : {10, 15, 20, 25, 30, 35}) ASSERT_OK(Write(root_, step));
  ASSERT_OK_AND_ASSIGN(const auto none, Prune(root_, {}));
  EXPECT_THAT(none, ElementsAre());
  ASSERT_OK_AND_ASSIGN(const auto removed, Prune(root_, {2, 20}));
  EXPECT_THAT(removed, ElementsAre(10, 15, 25));
  EXPECT_THAT(StepsIn(root_), ElementsAre(20, 30, 35));
  ASSERT_OK(Prune(root_, {1, 0}));
  EXPECT_THAT(StepsIn(root_), ElementsAre(35));
  EXPECT_EQ(EntriesIn(root_), 1);
}

// Runs `act` in a child that dies at its n-th change of the file system. False: it came to its end.
int left = 0;
template <class Act>
bool DiesAt(int n, const Act& act) {
  const pid_t child = fork();
  if (child == 0) {
    left = n;
    fault_hook = [](FaultPoint point) {
      if (point == FaultPoint::kFileChange && left-- == 0) _exit(1);
      return absl::OkStatus();
    };
    _exit(act() ? 0 : 2);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_NE(WEXITSTATUS(status), 2);
  return WEXITSTATUS(status) == 1;
}

TEST_F(FolderTest, WhoDiesAtAnyChange_LeavesTheOldOne_OrTheNewOneWhole) {
  ASSERT_OK(Write(root_, 1));
  int deaths = 0, old = 0;
  for (; DiesAt(deaths, [&] { return Write(root_, 2).ok(); }); ++deaths) {
    SCOPED_TRACE(deaths);
    ASSERT_OK_AND_ASSIGN(const OpenedCheckpoint opened, OpenCheckpoint(root_));
    old += opened.manifest.step == 1 ? 1 : 0;
    EXPECT_EQ(old, opened.manifest.step == 1 ? deaths + 1 : old) << "once it is there it stays";
    ASSERT_OK(NewCheckpoint::Begin(root_));
    EXPECT_EQ(EntriesIn(root_), opened.manifest.step) << "what the dead left is gone";
    fs::remove_all(root_ + "/step-0000000000002");
  }
  EXPECT_EQ(deaths, 12) << "folder; make, room, write of two files; three syncs; rename; sync of the root; whole";
  EXPECT_EQ(old, 11);
}

TEST_F(FolderTest, WhoDiesMakingTheFirstOne_IsNoHindrance) {
  int deaths = 0;
  for (; DiesAt(deaths, [&] { return Write(root_ + "/", 1).ok(); }); ++deaths) {
    SCOPED_TRACE(deaths);
    const auto opened = OpenCheckpoint(root_);
    if (!opened.ok()) {
      EXPECT_THAT(opened, StatusIs(Code::kNotFound, ::testing::_));
      ASSERT_OK(Write(root_, 1));
    }
    EXPECT_OK(OpenCheckpoint(root_));
    fs::remove_all(root_);
  }
  EXPECT_EQ(deaths, 14) << "and the sync of the folder that the root is in";
}

TEST_F(FolderTest, WhoDiesRemovingLeftovers_LeavesThemToTheNext) {
  int deaths = 0;
  const auto litter = [&] { return DiesAt(8, [&] { return Write(root_, 1).ok(); }); };
  ASSERT_OK(Write(root_, 0));
  for (bool died = true; died; ++deaths) {
    SCOPED_TRACE(deaths);
    ASSERT_TRUE(litter());
    died = DiesAt(deaths, [&] { return NewCheckpoint::Begin(root_).ok(); });
    EXPECT_THAT(StepsIn(root_), ElementsAre(0));
    ASSERT_OK(NewCheckpoint::Begin(root_));
    EXPECT_EQ(EntriesIn(root_), 1);
  }
  EXPECT_EQ(deaths, 6) << "two files and their folder; new folder and its removal; whole";
}

// The same with an error in place of death.
TEST_F(FolderTest, AnErrorAtAnyChange_IsTyped_AndTheOldOneStays) {
  ASSERT_OK(Write(root_, 1));
  int errors = 0;
  for (bool failed = true; failed && errors < 50; ++errors) {
    SCOPED_TRACE(errors);
    left = errors;
    fault_hook = [](FaultPoint point) {
      if (point != FaultPoint::kFileChange || left-- != 0) return absl::OkStatus();
      return absl::ResourceExhaustedError("the disk is full");
    };
    const auto written = Write(root_, 2);
    fault_hook = nullptr;
    failed = !written.ok();
    if (failed) {
      EXPECT_THAT(written, StatusIs(Code::kResourceExhausted, HasSubstr("the disk is full")));
    }
    const bool there = errors >= 11;  // only the sync of the root failed
    EXPECT_THAT(StepsIn(root_), ElementsAreArray(there ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{1}));
    EXPECT_EQ(EntriesIn(root_), there ? 2 : 1);
    fs::remove_all(root_ + "/step-0000000000002");
  }
  EXPECT_EQ(errors, 13);
}

TEST_F(FolderTest, WhoDiesWhilePruning_LeavesWholeCheckpoints) {
  for (int n = 0;; ++n) {
    for (const int64_t step : {1, 2, 3}) {
      const absl::Status written = Write(root_, step).status();
      ASSERT_TRUE(written.ok() || absl::IsAlreadyExists(written)) << written;
    }
    const bool died = DiesAt(n, [&] { return Prune(root_, {1, 0}).ok(); });
    ASSERT_OK_AND_ASSIGN(const std::vector<FoundCheckpoint> found, ListCheckpoints(root_));
    for (const FoundCheckpoint& each : found) EXPECT_OK(OpenCheckpoint(each.path));
    ASSERT_FALSE(found.empty());
    EXPECT_EQ(found.back().step, 3);
    if (!died) break;
    EXPECT_LT(n, 20);
  }
  EXPECT_EQ(EntriesIn(root_), 1);
}

}  // namespace
}  // namespace shardmesh
