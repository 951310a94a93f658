// Every subcommand that needs a service, against a real one: `shardctl up` as a child process, with its coordinator and
// workers, and a tiny job that has taken two steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/cli/child_process.h"
#include "client/cli/shardctl.h"
#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "core/matchers.h"
#include "local/fd.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using Json = nlohmann::json;

constexpr absl::Duration kLong = absl::Seconds(10);

std::string Contents(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

// True as soon as `condition` is, looked at every 20 ms; false after `kLong`.
bool Eventually(const std::function<bool()>& condition) {
  const absl::Time deadline = absl::Now() + kLong;
  while (!condition()) {
    if (absl::Now() > deadline) return false;
    poll(nullptr, 0, 20);
  }
  return true;
}

// A process that is no child of this one.
class Watched {
 public:
  explicit Watched(pid_t pid) : pid_(pid), fd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {}
  pid_t pid() const { return pid_; }
  bool EndsSoon() const {
    pollfd ended = {fd_.get(), POLLIN, 0};
    return fd_.valid() && poll(&ended, 1, static_cast<int>(absl::ToInt64Milliseconds(kLong))) == 1;
  }

 private:
  pid_t pid_;
  UniqueFd fd_;
};

// `shardctl up` as a child process; its output is a file.
class Cluster {
 public:
  static absl::StatusOr<std::unique_ptr<Cluster>> Start(const std::string& name, std::vector<std::string> args) {
    std::unique_ptr<Cluster> cluster(new Cluster);
    cluster->output_ = absl::StrCat(::testing::TempDir(), "/", name, ".out");
    args.insert(args.begin(), {"up", "--listen", "127.0.0.1:0", "--bin-dir", ".", "--log-dir",
                               absl::StrCat(::testing::TempDir(), "/", name, "-logs")});
    ASSIGN_OR_RETURN(cluster->up_, ChildProcess::Start({"up", "client/cli/shardctl", args, cluster->output_}));
    if (!cluster->Prints("ready ")) return absl::DeadlineExceededError(cluster->output());
    for (const absl::string_view line : absl::StrSplit(cluster->output(), '\n')) {
      const std::vector<std::string> words = absl::StrSplit(line, ' ');
      int pid = 0;
      if (words[0] == "ready") cluster->address_ = words[1];
      if (words[0] == "started" && absl::SimpleAtoi(words[3], &pid)) cluster->processes_.emplace_back(pid);
    }
    return cluster;
  }

  std::string output() const { return Contents(output_); }
  bool Prints(const std::string& text) const {
    return Eventually([&] { return absl::StrContains(output(), text) || up_->Ended().has_value(); }) &&
           absl::StrContains(output(), text);
  }
  const std::string& address() const { return address_; }
  ChildProcess& up() { return *up_; }
  const std::vector<Watched>& processes() const { return processes_; }  // the coordinator first
  bool AllEndSoon() const {
    bool all = true;
    for (const Watched& process : processes_) all = process.EndsSoon() && all;
    return all;
  }

 private:
  std::string output_, address_;
  std::unique_ptr<ChildProcess> up_;
  std::vector<Watched> processes_;
};

JobSpec TinyJob(const std::string& name) {
  JobSpec spec;
  spec.name = name;
  spec.parameters = {{"embed", {10, 8}, Format::kFp32, ""},
                     {"head", {10, 8}, Format::kFp32, "embed"},
                     {"norm", {7}, Format::kBf16, ""},
                     {"w", {3, 5}, Format::kBf16Sr, ""}};
  spec.optimizer.lr = 0.01;
  return spec;
}

// Creates the job, gives it weights, and takes two steps.
absl::StatusOr<std::shared_ptr<Job>> Train(const std::string& coordinator, const JobSpec& spec) {
  ASSIGN_OR_RETURN(Client client, Client::Connect(coordinator));
  ASSIGN_OR_RETURN(std::shared_ptr<Job> job, client.CreateJob(spec));
  RETURN_IF_ERROR(job->Initialize({{"embed", std::vector<float>(80, 1.0f)},
                                   {"norm", std::vector<float>(7, -2.0f)},
                                   {"w", std::vector<float>(15, 0.5f)}},
                                  kLong));
  ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, job->Connect({Slot(0)}));
  RETURN_IF_ERROR(session->AwaitWeights(kLong));
  StepOptions options;
  options.timeout = kLong;
  for (int step = 0; step < 2; ++step) RETURN_IF_ERROR(session->Step(options).status());
  return job;
}

class ClusterCommandTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    absl::StatusOr<std::unique_ptr<Cluster>> cluster =
        Cluster::Start("shared", {"--workers", "2", "--log-level", "warn"});
    ASSERT_OK(cluster);
    cluster_ = cluster->release();
    absl::StatusOr<std::shared_ptr<Job>> job = Train(cluster_->address(), TinyJob("tiny"));
    ASSERT_OK(job);
    job_ = new std::shared_ptr<Job>(*job);
    ASSERT_TRUE(Eventually([] { return RunJson({"versions", "tiny"})["committed_step"] == 2; }));  // by a heartbeat
  }
  static void TearDownTestSuite() {
    delete job_;
    delete cluster_;
  }
  void SetUp() override { ASSERT_NE(job_, nullptr); }

  static CommandResult Run(std::vector<std::string> args) {
    args.insert(args.end(), {"--coordinator", cluster_->address()});
    return RunShardctl(args);
  }
  static std::string Out(const std::vector<std::string>& args) {
    const CommandResult result = Run(args);
    EXPECT_EQ(result.code, kExitOk) << result.err;
    EXPECT_EQ(result.err, "");
    return result.out;
  }
  static Json RunJson(std::vector<std::string> args) {
    args.push_back("--json");
    const Json json = Json::parse(Out(args), nullptr, false);
    EXPECT_FALSE(json.is_discarded());
    return json;
  }
  static std::string Error(const std::vector<std::string>& args, int code = kExitError) {
    const CommandResult result = Run(args);
    EXPECT_EQ(result.code, code) << result.out;
    EXPECT_EQ(result.out, "");
    return result.err;
  }

  static Cluster* cluster_;
  static std::shared_ptr<Job>* job_;
};
Cluster* ClusterCommandTest::cluster_ = nullptr;
std::shared_ptr<Job>* ClusterCommandTest::job_ = nullptr;

TEST_F(ClusterCommandTest, Jobs) {
  EXPECT_THAT(Out({"jobs"}), AllOf(ContainsRegex("name +state +epoch +mesh +slots +parameters"),
                                   ContainsRegex("\ntiny +ready +1 +fsdp=2 +1 +4 +2 +[0-9,]*2 +2/2 +-\n")));
  EXPECT_THAT(Out({"jobs", "tiny"}),
              AllOf(HasSubstr("\n\nrank"), ContainsRegex("\n +1 +worker-[01] +yes +yes +[0-9]+")));
  const Json list = RunJson({"jobs"});
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0]["name"], "tiny");
  EXPECT_EQ(list[0]["state"], "ready");
  EXPECT_EQ(list[0]["parameters"], 4);
  EXPECT_EQ(list[0]["workers_alive"], 2);
  EXPECT_EQ(RunJson({"jobs", "tiny"})["members"][1]["rank"], 1);
}

TEST_F(ClusterCommandTest, Plan) {
  EXPECT_THAT(Out({"plan", "tiny"}), AllOf(HasSubstr("plan " + (*job_)->plan().hash() + " of mesh fsdp=2"),
                                           ContainsRegex("\nhead +a +\\[10,8\\] +0 +0 +80 +embed"),
                                           ContainsRegex("shard 1 +\\|a\\| +1 +48\n")));
  const Json json = RunJson({"plan", "tiny"});
  EXPECT_EQ(json["hash"], (*job_)->plan().hash());
  EXPECT_EQ(json["shards"], 2);
  EXPECT_EQ(json["placements"][3]["name"], "w");
}

TEST_F(ClusterCommandTest, VersionsAndDigest) {
  EXPECT_THAT(Out({"versions", "tiny"}), ContainsRegex("^committed +published\n +2 +[0-9,]*2\n$"));
  EXPECT_EQ(RunJson({"versions", "tiny"})["published_steps"].back(), 2);
  ASSERT_OK_AND_ASSIGN(const v1::DigestReply digest, (*job_)->Digest(kLong));
  const std::string hex = absl::StrFormat("%016x", digest.digest());
  EXPECT_EQ(Out({"digest", "tiny"}), absl::StrCat("step 2 digest ", hex, "\n"));
  EXPECT_EQ(RunJson({"digest", "tiny"})["digest"], hex);
}

TEST_F(ClusterCommandTest, Status) {
  const std::string table = Out({"status"});
  EXPECT_THAT(table, AllOf(HasSubstr("publications"), ContainsRegex("worker-0 +[0-9]+ +tiny +[01] +1 +2 +[0-9,]*2 ")));
  const Json workers = RunJson({"status", "tiny"});
  ASSERT_EQ(workers.size(), 2u);
  for (const Json& worker : workers) {
    EXPECT_EQ(worker["answered"], true);
    EXPECT_EQ(worker["jobs"][0]["committed_step"], 2);
    EXPECT_GT(worker["jobs"][0]["shard_bytes"], 0);
    EXPECT_GE(worker["jobs"][0]["window_bytes"], (*job_)->plan().version_bytes());
  }
}

TEST_F(ClusterCommandTest, Pull_Table) {
  const std::string table = Out({"pull", "tiny"});
  EXPECT_THAT(table, AllOf(HasSubstr("step 2\n"), ContainsRegex("\nhead +fp32 +\\[10,8\\] +80 +0.99[0-9]* +0.99"),
                           ContainsRegex("\nw +bf16_sr +\\[3,5\\] +15 +0.[45]")));
  EXPECT_EQ(Out({"pull", "tiny", "--at-least", "2"}), table);
  const Json one = RunJson({"pull", "tiny", "--exact", "2", "--name", "norm"});
  EXPECT_EQ(one["step"], 2);
  ASSERT_EQ(one["parameters"].size(), 1u);
  EXPECT_EQ(one["parameters"][0]["elements"], 7);
  EXPECT_NEAR(one["parameters"][0]["mean"], -2, 0.02);
}

TEST_F(ClusterCommandTest, Pull_Output_IsSafetensors) {
  const std::string file = ::testing::TempDir() + "/tiny.safetensors";
  EXPECT_THAT(Out({"pull", "tiny", "--output", file}), HasSubstr("step 2: 4 parameters, "));
  const std::string bytes = Contents(file);
  uint64_t length = 0;
  ASSERT_GT(bytes.size(), sizeof(length));
  std::memcpy(&length, bytes.data(), sizeof(length));
  ASSERT_LT(length, bytes.size() - 8);
  const Json header = Json::parse(bytes.substr(8, length), nullptr, false);
  EXPECT_EQ(header["__metadata__"]["job"], "tiny");
  EXPECT_EQ(header["__metadata__"]["step"], "2");
  EXPECT_EQ(header["w"]["dtype"], "BF16");
  ASSERT_OK_AND_ASSIGN(const Version version, (*job_)->Pull({VersionChoice::kExact, Step(2)}, kLong));
  size_t total = 0;
  for (const char* name : {"embed", "head", "norm", "w"}) {
    ASSERT_OK_AND_ASSIGN(const ConstTensorView view, version.parameter(name));
    const size_t begin = header[name]["data_offsets"][0], end = header[name]["data_offsets"][1];
    ASSERT_EQ(static_cast<int64_t>(end - begin), view.num_elements * BytesPerElement(view.format)) << name;
    EXPECT_EQ(std::memcmp(bytes.data() + 8 + length + begin, view.data, end - begin), 0) << name;
    total += end - begin;
  }
  EXPECT_EQ(bytes.size(), 8 + length + total);
}

TEST_F(ClusterCommandTest, Errors_AreOneLine) {
  for (const char* command : {"jobs", "plan", "versions", "digest", "status", "pull", "delete"}) {
    EXPECT_THAT(Error({command, "nobody"}),
                AllOf(HasSubstr("shardctl: NOT_FOUND: "), HasSubstr("tiny"), ContainsRegex("^[^\n]*\n$")))
        << command;
  }
  EXPECT_THAT(Error({"pull", "tiny", "--exact", "77"}), HasSubstr("OUT_OF_RANGE"));
  EXPECT_THAT(Error({"pull", "tiny", "--at-least", "77", "--timeout", "0.3"}), HasSubstr("DEADLINE_EXCEEDED"));
  EXPECT_THAT(Error({"pull", "tiny", "--name", "nothing"}), HasSubstr("no parameter \"nothing\""));
  EXPECT_THAT(Error({"pull", "tiny", "--output", "/none/x"}), HasSubstr("No such file"));
  EXPECT_THAT(Error({"pull", "tiny", "--exact", "1", "--at-least", "1"}, kExitUsage), HasSubstr("excludes"));
  EXPECT_THAT(Error({"pull", "tiny", "--exact", "-1"}, kExitUsage), HasSubstr("--exact"));
  EXPECT_THAT(Error({"jobs", "--timeout", "nan"}, kExitUsage), HasSubstr("no number of seconds"));
  EXPECT_THAT(Error({"digest"}, kExitUsage), HasSubstr("JOB is required"));
}

TEST_F(ClusterCommandTest, Coordinator_IsTakenFromTheEnvironment) {
  setenv("SHARDMESH_COORDINATOR", cluster_->address().c_str(), 1);
  EXPECT_THAT(RunShardctl({"jobs"}).out, HasSubstr("tiny"));
  setenv("SHARDMESH_COORDINATOR", "127.0.0.1:1", 1);
  const CommandResult result = RunShardctl({"jobs", "--timeout", "2"});
  EXPECT_EQ(result.code, kExitError);
  EXPECT_THAT(result.err, AllOf(HasSubstr("127.0.0.1:1"), ContainsRegex("^[^\n]*\n$")));
  unsetenv("SHARDMESH_COORDINATOR");
}

TEST_F(ClusterCommandTest, Delete) {
  ASSERT_OK(Train(cluster_->address(), TinyJob("gone")));
  EXPECT_EQ(Out({"delete", "gone"}), "deleted gone\n");
  EXPECT_THAT(Error({"jobs", "gone"}), HasSubstr("NOT_FOUND"));
}

TEST(UpCommandTest, KilledWorker_IsReported_StopEndsAll) {
  ASSERT_OK_AND_ASSIGN(const auto cluster,
                       Cluster::Start("stop", {"--mesh", "fsdp=2", "--log-level", "warn", "--heartbeat-interval-ms",
                                               "100", "--heartbeat-timeout-ms", "500"}));
  ASSERT_EQ(cluster->processes().size(), 3u);
  ASSERT_OK(Train(cluster->address(), TinyJob("tiny")));
  const pid_t worker = cluster->processes()[2].pid();
  kill(worker, SIGKILL);
  EXPECT_TRUE(cluster->Prints(absl::StrCat("ended worker-1 pid ", worker, " signal KILL\n"))) << cluster->output();
  EXPECT_TRUE(Eventually([&] {
    const std::string jobs = RunShardctl({"jobs", "--coordinator", cluster->address()}).out;
    return absl::StrContains(jobs, "failed") && absl::StrContains(jobs, "1/2");
  }));
  const CommandResult status = RunShardctl({"status", "--coordinator", cluster->address(), "--timeout", "2"});
  EXPECT_EQ(status.code, kExitError);
  EXPECT_THAT(status.err, HasSubstr("1 of 2 workers did not answer: worker worker-1"));
  EXPECT_THAT(status.out, AllOf(HasSubstr("worker-0"), HasSubstr("no answer")));
  cluster->up().Signal(SIGTERM);
  EXPECT_TRUE(cluster->AllEndSoon());
  ASSERT_TRUE(Eventually([&] { return cluster->up().Ended().has_value(); }));
  EXPECT_EQ(EndText(*cluster->up().Ended()), "status 0") << cluster->output();
  EXPECT_THAT(cluster->output(), AllOf(ContainsRegex("ended worker-0 pid [0-9]+ status 0\n"),
                                       ContainsRegex("ended coordinator pid [0-9]+ status 0\n")));
}

TEST(UpCommandTest, KilledSupervisor_TakesItsProcessesAlong) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start("killed", {"--log-level", "warn"}));
  ASSERT_EQ(cluster->processes().size(), 2u);
  cluster->up().Signal(SIGKILL);
  EXPECT_TRUE(cluster->AllEndSoon());
}

TEST(UpCommandTest, Errors) {
  const auto up = [](std::vector<std::string> args) {
    args.insert(args.begin(), {"up", "--listen", "127.0.0.1:0"});
    return RunShardctl(args);
  };
  EXPECT_THAT(up({"--bin-dir", "/none"}).err, HasSubstr("no program shardmesh-coordinator in /none"));
  EXPECT_THAT(up({"--mesh", "ddp=2,fsdp=2", "--workers", "3"}).err, HasSubstr("has 4 ranks, --workers is 3"));
  EXPECT_EQ(up({"--mesh", "ddp=2,fsdp=2", "--workers", "3"}).code, kExitUsage);
  EXPECT_EQ(up({"--mesh", "ddp"}).code, kExitUsage);
  EXPECT_EQ(up({"--workers", "0"}).code, kExitUsage);
  const CommandResult failed = up({"--bin-dir", ".", "--log-level", "nonsense"});
  EXPECT_EQ(failed.code, kExitError);
  EXPECT_THAT(failed.err, AllOf(HasSubstr("coordinator (pid "), HasSubstr("ended with status 1 before it was ready")));
}

}  // namespace
}  // namespace shardmesh
