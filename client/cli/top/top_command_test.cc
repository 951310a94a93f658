// `shardctl top` against a real service: two workers and a job of two trainers.
#include "client/cli/top/top_command.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/shardctl.h"
#include "client/cli/testing/test_cluster.h"
#include "client/cpp/session.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Json = nlohmann::json;

// `shardctl top` as a process that is read while it runs.
class TopProcess {
 public:
  TopProcess(const Cluster& cluster, const std::string& name, std::vector<std::string> args, std::string output = "")
      : output_(output.empty() ? absl::StrCat(::testing::TempDir(), "/", name, ".top") : output) {
    std::remove(output_.c_str());
    args.insert(args.begin(), "top");
    args.insert(args.end(), {"--coordinator", cluster.address()});
    absl::StatusOr<std::unique_ptr<ChildProcess>> process =
        ChildProcess::Start({"top", "client/cli/shardctl", args, output_});
    EXPECT_OK(process);
    if (process.ok()) process_ = *std::move(process);
  }

  std::string output() const { return Contents(output_); }
  void Signal(int signal) { process_->Signal(signal); }

  // The whole lines of JSON so far.
  std::vector<Json> Lines() const {
    std::vector<std::string> lines = absl::StrSplit(output(), '\n');
    lines.pop_back();
    std::vector<Json> list;
    for (const std::string& line : lines) list.push_back(Json::parse(line, nullptr, false));
    return list;
  }
  // True soon: the newest line is such a one.
  bool Shows(const std::function<bool(const Json&)>& condition) const {
    return Eventually([&] {
      const std::vector<Json> lines = Lines();
      return !lines.empty() && lines.back().is_object() && condition(lines.back());
    });
  }
  // "status 0", "signal INT"; "" when it does not end soon.
  std::string End() {
    return process_ != nullptr && Eventually([&] { return process_->Ended().has_value(); })
               ? EndText(*process_->Ended())
               : "";
  }

 private:
  const std::string output_;
  std::unique_ptr<ChildProcess> process_;
};

void ExpectBothWork(const Json& job) {
  ASSERT_EQ(job["workers"].size(), 2u);
  for (const Json& worker : job["workers"]) {
    EXPECT_EQ(worker["answered"], true);
    EXPECT_EQ(worker["device"], "cpu");
    EXPECT_EQ(worker["error"], "");
    EXPECT_GT(worker["busy_share"], 0);
    EXPECT_GT(worker["waiting_share"], 0);
  }
}

class TopCommandTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    ASSERT_OK_AND_ASSIGN(cluster_,
                         Cluster::Start("top-" + name, {"--workers", "2", "--no-keep", "--log-level", "warn"}));
  }

  // The job and its two trainers, before their first step.
  void Prepare() {
    JobSpec spec = TinyJob("tiny");
    spec.num_slots = 2;
    ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(cluster_->address()));
    ASSERT_OK_AND_ASSIGN(job_, client.CreateJob(spec));
    ASSERT_OK(job_->Initialize({{"embed", std::vector<float>(80, 1.0f)},
                                {"norm", std::vector<float>(7, -2.0f)},
                                {"w", std::vector<float>(15, 0.5f)}},
                               kLong));
    for (const int slot : {0, 1}) {
      ASSERT_OK_AND_ASSIGN(trainers_.emplace_back(), job_->Connect({Slot(slot)}));
      ASSERT_OK(trainers_.back()->AwaitWeights(kLong));
    }
  }

  // Slot 0 declares a step; slot 1 does once `top` shows that, and once it shows that slot 1 is waited for.
  void StepAfterSlot0(const TopProcess& top) {
    StepOptions options;
    options.timeout = 3 * kLong;
    const int64_t step = trainers_[0]->committed_step().value() + 1;
    absl::StatusOr<v1::StepReply> first;
    std::thread early([&] { first = trainers_[0]->Step(options); });
    EXPECT_TRUE(top.Shows([&](const Json& line) {
      const Json& slots = line["jobs"][0]["slots"];
      return slots[0]["last_step"] == step && slots[1]["last_step"] < step && slots[1]["waited_for"] == true;
    })) << top.output();
    EXPECT_OK(trainers_[1]->Step(options));
    early.join();
    EXPECT_OK(first);
  }

  std::unique_ptr<Cluster> cluster_;
  std::shared_ptr<Job> job_;
  std::vector<std::unique_ptr<Session>> trainers_;
};

TEST_F(TopCommandTest, Json_StepsWorkersAndTheTrainerThatOthersWaitFor_UntilStopped) {
  Prepare();
  TopProcess top(*cluster_, "json", {"tiny", "--json", "--interval", "0.02"});
  for (int step = 0; step < 3; ++step) StepAfterSlot0(top);
  EXPECT_TRUE(top.Shows([](const Json& line) { return line["jobs"][0]["committed_step"] == 3; })) << top.output();
  TopProcess text(*cluster_, "text", {"tiny", "--count", "1"});
  EXPECT_EQ(text.End(), "status 0");
  EXPECT_THAT(text.output(), AllOf(ContainsRegex("\ntiny +ready +1 +3 +- +[0-9.]+ +[0-9.]+ +[0-9.]+ +[0-9]+ +-\n"),
                                   ContainsRegex("\ntiny +0 +3 +[0-9.]+% +-\n"),
                                   ContainsRegex("\ntiny +1 +3 +[0-9.]+% +by the others\n")));
  top.Signal(SIGINT);
  ASSERT_EQ(top.End(), "status 0") << top.output();

  const std::vector<Json> lines = top.Lines();
  EXPECT_TRUE(lines[0]["jobs"][0]["steps_per_second"].is_null());
  bool stepped = false;
  for (const Json& line : lines) {
    const Json& rate = line["jobs"][0]["steps_per_second"];
    stepped = stepped || (rate.is_number() && rate > 0);
  }
  EXPECT_TRUE(stepped);
  const Json job = lines.back()["jobs"][0];
  EXPECT_EQ(job["name"], "tiny");
  EXPECT_EQ(job["epoch"], 1);
  EXPECT_EQ(job["periods"], 2);
  EXPECT_GT(job["median_period_seconds"], 0);
  EXPECT_GE(job["longest_period_seconds"], job["longest_pause_seconds"]);
  EXPECT_GT(job["longest_pause_seconds"], 0);
  ExpectBothWork(job);
  ASSERT_EQ(job["slots"].size(), 2u);
  EXPECT_GT(job["slots"][0]["idle_share"], job["slots"][1]["idle_share"]);
  EXPECT_EQ(job["slots"][0]["waited_for"], false);
  EXPECT_EQ(job["slots"][1]["waited_for"], true);
}

TEST_F(TopCommandTest, KilledWorkerAndCoordinator_TheViewGoesOn) {
  Prepare();
  TopProcess lines(*cluster_, "going-on", {"--json", "--interval", "0.02", "--timeout", "1"});
  EXPECT_TRUE(lines.Shows([](const Json& line) { return line["jobs"][0]["workers"][1]["answered"] == true; }));
  kill(cluster_->PidOf("worker-1"), SIGKILL);
  const auto answers = [](const Json& line) {
    int number = 0;
    for (const Json& worker : line["jobs"][0]["workers"]) number += worker["answered"] == true;
    return number;
  };
  EXPECT_TRUE(lines.Shows([&](const Json& line) { return answers(line) == 1; })) << lines.output();
  TopProcess text(*cluster_, "no-answer", {"--interval", "0.02", "--count", "2"});
  EXPECT_EQ(text.End(), "status 0");
  EXPECT_THAT(text.output(),
              AllOf(ContainsRegex("^[-0-9]+T[:0-9]+Z\njob +state "), ContainsRegex("\n\n[-0-9]+T[:0-9]+Z\njob +state "),
                    ContainsRegex("tiny +worker-1 +[01] +[0-9]+( +-){7} +no answer\n"),
                    ContainsRegex("tiny +worker-0 +[01] +[0-9]+ +cpu +- +1 ")));
  EXPECT_THAT(text.output(), testing::Not(HasSubstr("\x1b")));
  kill(cluster_->PidOf("coordinator"), SIGKILL);
  EXPECT_TRUE(lines.Shows([&](const Json& line) { return line["coordinator_error"] != "" && answers(line) == 1; }))
      << lines.output();
  lines.Signal(SIGTERM);
  EXPECT_EQ(lines.End(), "status 0");
}

TEST_F(TopCommandTest, Waiting_EndsAtASignal_Terminal_IsRedrawnInPlace) {
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  ASSERT_GE(terminal, 0);
  ASSERT_EQ(grantpt(terminal), 0);
  ASSERT_EQ(unlockpt(terminal), 0);
  TopProcess top(*cluster_, "", {"--interval", "86400"}, ptsname(terminal));
  std::string shown;
  pollfd ready = {terminal, POLLIN, 0};
  while (!absl::StrContains(shown, "no jobs") && poll(&ready, 1, absl::ToInt64Milliseconds(kLong)) == 1) {
    char buffer[4096];
    const ssize_t bytes = read(terminal, buffer, sizeof(buffer));
    if (bytes <= 0) break;
    shown.append(buffer, bytes);
  }
  EXPECT_THAT(shown, AllOf(StartsWith("\x1b[H\x1b[2J"), HasSubstr("no jobs")));
  top.Signal(SIGTERM);
  EXPECT_EQ(top.End(), "status 0");
  close(terminal);
}

TEST_F(TopCommandTest, JobThatIsDeleted_EndsItsView) {
  Prepare();
  TopProcess top(*cluster_, "deleted", {"tiny", "--interval", "0.02"});
  EXPECT_TRUE(Eventually([&] { return absl::StrContains(top.output(), "tiny"); }));
  EXPECT_EQ(RunShardctl({"delete", "tiny", "--coordinator", cluster_->address()}).code, kExitOk);
  EXPECT_EQ(top.End(), "status 1");
  EXPECT_THAT(top.output(), HasSubstr("shardctl: NOT_FOUND: "));
}

TEST_F(TopCommandTest, Errors) {
  const auto error = [&](std::vector<std::string> args, int code) {
    args.insert(args.begin(), "top");
    args.insert(args.end(), {"--coordinator", cluster_->address()});
    const CommandResult result = RunShardctl(args);
    EXPECT_EQ(result.code, code);
    return result.err;
  };
  EXPECT_THAT(error({"nobody"}, kExitError), AllOf(HasSubstr("NOT_FOUND"), HasSubstr("nobody")));
  EXPECT_THAT(error({"--interval", "0"}, kExitUsage), HasSubstr("\"0\" is no number of seconds from 0.001 to 86400"));
  EXPECT_THAT(error({"--count", "-1"}, kExitUsage), AllOf(HasSubstr("--count"), HasSubstr("-1")));
  EXPECT_EQ(RunShardctl({"top", "--coordinator", "127.0.0.1:1", "--timeout", "1"}).code, kExitError);
}

}  // namespace
}  // namespace shardmesh
