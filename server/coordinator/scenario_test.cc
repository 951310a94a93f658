// Runs testdata/*.txt: commands, each followed by the text it printed. A "#" line is a comment.
// After a wanted change:  bazel run //server/coordinator:scenario_test -- --rewrite   and review the difference.
#include "server/coordinator/testing/scenario.h"

#include <dirent.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace shardmesh {
namespace {

bool rewrite = false;

std::string Folder() {
  const char* workspace = getenv("BUILD_WORKSPACE_DIRECTORY");
  return rewrite && workspace != nullptr ? absl::StrCat(workspace, "/server/coordinator/testdata")
                                         : "server/coordinator/testdata";
}

std::vector<std::string> Scenarios() {
  std::vector<std::string> names;
  DIR* folder = opendir(Folder().c_str());
  if (folder == nullptr) return names;
  for (dirent* entry = readdir(folder); entry != nullptr; entry = readdir(folder)) {
    if (absl::EndsWith(entry->d_name, ".txt")) names.push_back(entry->d_name);
  }
  closedir(folder);
  std::sort(names.begin(), names.end());
  return names;
}

// The file as it should be: comments and commands ("> ...") as they are, and under each command what it prints.
std::string Replay(const std::string& path) {
  std::ifstream file(path);
  ScenarioRunner runner;
  std::string out;
  for (std::string line; std::getline(file, line);) {
    if (absl::StartsWith(line, "#") || line.empty()) absl::StrAppend(&out, line, "\n");
    if (absl::StartsWith(line, "> ")) absl::StrAppend(&out, line, "\n", runner.Run(line.substr(2)));
  }
  return out;
}

TEST(Scenario, EveryFile_PrintsWhatItSays) {
  const std::vector<std::string> names = Scenarios();
  ASSERT_GE(names.size(), 5u) << "no scenarios in " << Folder();
  for (const std::string& name : names) {
    const std::string path = absl::StrCat(Folder(), "/", name);
    const std::string got = Replay(path);
    std::ifstream file(path);
    const std::string wanted(std::istreambuf_iterator<char>(file), {});
    if (rewrite) {
      std::ofstream(path) << got;
    } else {
      EXPECT_EQ(got, wanted) << path;
    }
  }
}

}  // namespace
}  // namespace shardmesh

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) shardmesh::rewrite |= std::string(argv[i]) == "--rewrite";
  return RUN_ALL_TESTS();
}
