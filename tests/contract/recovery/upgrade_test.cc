// Contract: the upgrade as docs/operations.md writes it keeps a job. Its commands are read from that page.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/process.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr absl::Duration kLong = absl::Seconds(30);

// The lines of the section's code blocks.
std::vector<std::string> Commands() {
  const std::string page = testing::ReadFile("docs/operations.md");
  const size_t begin = page.find("\n## Upgrading\n"), end = page.find("\n## ", begin + 1);
  std::vector<std::string> commands;
  bool code = false;
  for (absl::string_view line : absl::StrSplit(page.substr(begin, end - begin), '\n')) {
    line = absl::StripAsciiWhitespace(line);
    if (line == "```") {
      code = !code;
    } else if (code) {
      commands.emplace_back(line);
    }
  }
  return commands;
}

TEST(Upgrade, AsItIsWritten_KeepsTheJob) {
  const std::vector<std::string> commands = Commands();
  ASSERT_THAT(commands, ElementsAre(StartsWith("shardctl checkpoint llama "), "shardctl delete llama",
                                    StartsWith("shardctl restore ")));
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 2, .retained = true}));
  const auto run = [&](const std::string& command) {
    std::vector<std::string> words = absl::StrSplit(command, ' ');
    words[0] = "client/cli/shardctl";
    for (std::string& word : words) word = absl::StrReplaceAll(word, {{"/data/", cluster->folder().File("data-")}});
    words.insert(words.end(), {"--coordinator", cluster->coordinator_address()});
    return testing::RunCommand(words);
  };
  const JobSpec spec = testing::OddJob("llama", "fsdp=2", 1);
  uint64_t digest = 0;
  {
    ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
    ASSERT_OK(testing::Initialize(*job));
    ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0)}));
    ASSERT_OK(session->AwaitWeights(kLong));
    ASSERT_OK(testing::TrainTo(*session, 5));
    ASSERT_OK_AND_ASSIGN(const v1::DigestReply saved, job->Digest(kLong));
    digest = saved.digest();
  }
  ASSERT_OK(run(commands[0]));
  for (testing::Process* process : {&cluster->node(), &cluster->coordinator()}) {
    process->Signal(SIGTERM);
    ASSERT_OK_AND_ASSIGN(const int status, process->Wait(kLong));
    EXPECT_EQ(status, 0);
  }
  ASSERT_OK(cluster->RestartCoordinator());
  ASSERT_OK(cluster->StartNode());
  ASSERT_OK_AND_ASSIGN(const std::string jobs, run("shardctl jobs"));
  EXPECT_THAT(jobs, HasSubstr("failed"));
  ASSERT_OK(run(commands[1]));
  ASSERT_OK(run(commands[2]));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.OpenJob("llama"));
  ASSERT_OK_AND_ASSIGN(const v1::DigestReply restored, job->Digest(kLong));
  EXPECT_EQ(restored.step(), 5);
  EXPECT_EQ(restored.digest(), digest);
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0)}));
  ASSERT_OK(session->AwaitWeights(kLong));
  EXPECT_OK(testing::TrainTo(*session, 7));
}

}  // namespace
}  // namespace shardmesh
