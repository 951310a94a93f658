#include "client/cli/commands/faults_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "client/cli/shardctl.h"
#include "core/base/fault_point.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

CommandResult WithFaults(const std::vector<std::string>& args) { return RunShardctl(args, AddFaultsCommand); }

TEST(FaultsCommandTest, Text_EveryPointIsARowOfAnAlignedTable) {
  const CommandResult result = WithFaults({"faults"});
  EXPECT_EQ(result.code, kExitOk) << result.err;
  const std::vector<std::string> lines = absl::StrSplit(result.out, '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), 1 + std::size(kFaultPoints));
  const size_t what = lines[0].find("what is the case");
  ASSERT_NE(what, std::string::npos);
  for (size_t i = 0; i < std::size(kFaultPoints); ++i) {
    EXPECT_THAT(lines[i + 1], StartsWith(kFaultPoints[i].name));
    EXPECT_EQ(lines[i + 1].substr(what), kFaultPoints[i].what);
  }
  EXPECT_THAT(result.out, HasSubstr("\nmessage-taken     stepping   lead        kill stop delay error  a trainer's"));
  EXPECT_THAT(result.out, HasSubstr("\nprepared          preparing  any member  kill stop delay error  it has"));
  EXPECT_THAT(result.out, HasSubstr("\nchunk-stepped     stepping   any member  kill stop delay        a chunk"));
}

TEST(FaultsCommandTest, Json_SaysTheSame) {
  const CommandResult result = WithFaults({"faults", "--json"});
  const nlohmann::json points = nlohmann::json::parse(result.out)["points"];
  ASSERT_EQ(points.size(), std::size(kFaultPoints));
  std::set<std::string> names;
  for (size_t i = 0; i < points.size(); ++i) {
    EXPECT_EQ(points[i]["name"], kFaultPoints[i].name);
    EXPECT_EQ(points[i]["lead_only"], kFaultPoints[i].lead);
    EXPECT_EQ(points[i]["actions"].size(), kFaultPoints[i].can_fail ? 4u : 3u);
    EXPECT_EQ(points[i]["what"], kFaultPoints[i].what);
    names.insert(kFaultPoints[i].name);
  }
  EXPECT_EQ(names.size(), points.size()) << "a name stands for two points";
  EXPECT_EQ(points[0]["stage"], "preparing");
}

TEST(FaultsCommandTest, TheProduct_HasItNot) {
  const CommandResult result = RunShardctl({"faults"});
  EXPECT_EQ(result.code, kExitUsage);
  EXPECT_THAT(result.err, HasSubstr("no command \"faults\""));
}

TEST(FaultsCommandTest, TheProgramOfTests_HasIt) {
  FILE* const program = popen("client/cli/shardctl_with_faults faults", "r");
  ASSERT_NE(program, nullptr);
  std::string out(1 << 16, '\0');
  out.resize(fread(out.data(), 1, out.size(), program));
  EXPECT_EQ(pclose(program), 0);
  EXPECT_EQ(out, WithFaults({"faults"}).out);
}

}  // namespace
}  // namespace shardmesh
