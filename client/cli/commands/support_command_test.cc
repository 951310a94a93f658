#include "client/cli/commands/support_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/shardctl.h"
#include "core/job/support.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

TEST(SupportCommand, Text_HasARowForEachFeature_WithOneWordForEachCell) {
  const CommandResult result = RunShardctl({"support"});
  ASSERT_EQ(result.code, kExitOk) << result.err;
  const std::vector<std::string> lines = absl::StrSplit(result.out, '\n');
  ASSERT_GT(lines.size(), kNumFeatures + 1u);
  EXPECT_THAT(lines[0], HasSubstr("CPU, several hosts"));
  for (int f = 0; f < kNumFeatures; ++f) {
    std::vector<std::string> expected;
    for (const absl::string_view test : kFeatures[f].tests) expected.emplace_back(test.empty() ? "no" : "yes");
    const std::string& line = lines[f + 1];
    EXPECT_EQ(line.substr(0, kFeatures[f].name.size()), kFeatures[f].name);
    EXPECT_EQ(std::vector<std::string>(absl::StrSplit(line.substr(kFeatures[f].name.size()), ' ', absl::SkipEmpty())),
              expected)
        << line;
    for (int k = 0; k < kNumTopologyKinds; ++k) {  // aligned
      EXPECT_EQ(line.substr(lines[0].find(std::string(kTopologyKinds[k].name)), expected[k].size()), expected[k])
          << line;
    }
  }
  for (const RefusedPair& pair : kRefusedPairs) EXPECT_THAT(result.out, HasSubstr(std::string(pair.because)));
  EXPECT_THAT(result.out, HasSubstr("slots of a job, CUDA"));
}

TEST(SupportCommand, Json_HasTheTestBehindEachSupportedCell) {
  const CommandResult result = RunShardctl({"support", "--json"});
  ASSERT_EQ(result.code, kExitOk) << result.err;
  const auto json = nlohmann::json::parse(result.out);
  ASSERT_EQ(json["features"].size(), static_cast<size_t>(kNumFeatures));
  for (int f = 0; f < kNumFeatures; ++f) {
    EXPECT_EQ(json["features"][f]["feature"], std::string(kFeatures[f].name));
    for (int k = 0; k < kNumTopologyKinds; ++k) {
      const auto& cell = json["features"][f]["cells"][k];
      EXPECT_EQ(cell["topology"], std::string(kTopologyKinds[k].name));
      EXPECT_EQ(cell["supported"], Works(static_cast<Feature>(f), static_cast<TopologyKind>(k)));
      EXPECT_EQ(cell["test"].is_null(), !cell["supported"].get<bool>());
      if (cell["supported"]) {
        EXPECT_EQ(cell["test"], std::string(kFeatures[f].tests[k]));
      }
    }
  }
  EXPECT_EQ(json["refused_pairs"].size(), std::size(kRefusedPairs));
  EXPECT_EQ(json["limits"].size(), std::size(kSupportLimits));
}

TEST(SupportCommand, UnknownFlag_IsUsage) { EXPECT_EQ(RunShardctl({"support", "--xml"}).code, kExitUsage); }

// docs/support.md shows what the program prints. To update it: shardctl support.
TEST(SupportCommand, Docs_ShowWhatTheProgramPrints) {
  std::ifstream file("docs/support.md");
  ASSERT_TRUE(file.is_open());
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_THAT(text.str(), HasSubstr(absl::StrCat("```text\n", SupportTables(), "```\n")));
}

}  // namespace
}  // namespace shardmesh
