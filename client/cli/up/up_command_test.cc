// `shardctl up` as a process: what happens when it, or one of its processes, ends.
#include "client/cli/up/up_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/shardctl.h"
#include "client/cli/testing/test_cluster.h"
#include "client/cpp/session.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// The temporary folder of a service, as its workers were told.
std::string FolderOf(const Cluster& cluster) {
  const std::string path = absl::StrCat("/proc/", cluster.processes()[1].pid(), "/cmdline");
  const std::vector<std::string> words = absl::StrSplit(Contents(path), '\0');
  const auto flag = std::find(words.begin(), words.end(), "--local-dir");
  return words.end() - flag < 2 ? "" : *(flag + 1);
}

TEST(UpCommandTest, KilledWorker_IsReported_StopEndsAll) {
  ASSERT_OK_AND_ASSIGN(const auto cluster,
                       Cluster::Start("stop", {"--no-keep", "--mesh", "fsdp=2", "--log-level", "warn",
                                               "--heartbeat-interval-ms", "100", "--heartbeat-timeout-ms", "500"}));
  ASSERT_EQ(cluster->processes().size(), 3u);
  ASSERT_OK(Train(cluster->address(), TinyJob("tiny")));
  const pid_t worker = cluster->PidOf("worker-1");
  kill(worker, SIGKILL);
  EXPECT_TRUE(cluster->Prints(absl::StrCat("ended worker-1 pid ", worker, " signal KILL\n"))) << cluster->output();
  EXPECT_TRUE(Eventually([&] {
    const std::string jobs = RunShardctl({"jobs", "--coordinator", cluster->address()}).out;
    return absl::StrContains(jobs, "failed") && absl::StrContains(jobs, "1/2");
  }));
  const CommandResult jobs = RunShardctl({"jobs", "tiny", "--json", "--coordinator", cluster->address()});
  EXPECT_THAT(jobs.out, AllOf(ContainsRegex("\"error\":\"[^\"]*worker-1 "), HasSubstr("\"waiting_for\":\"\"")));
  EXPECT_THAT(RunShardctl({"pull", "tiny", "--coordinator", cluster->address()}).out, HasSubstr("step 2\n"));
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
  for (const std::string keep : {"--keep", "--no-keep"}) {
    ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start("killed" + keep, {keep, "--log-level", "warn"}));
    ASSERT_EQ(cluster->processes().size(), keep == "--keep" ? 3u : 2u);
    cluster->up().Signal(SIGKILL);
    EXPECT_TRUE(cluster->AllEndSoon()) << keep;
  }
}

TEST(UpCommandTest, KilledSupervisor_ItsFolderIsRemovedByTheNext) {
  ASSERT_OK_AND_ASSIGN(const auto killed, Cluster::Start("first", {"--log-level", "warn"}));
  ASSERT_OK_AND_ASSIGN(const auto living, Cluster::Start("second", {"--log-level", "warn"}));
  const std::string left = FolderOf(*killed), in_use = FolderOf(*living);
  ASSERT_TRUE(std::filesystem::exists(left));
  killed->up().Signal(SIGKILL);
  ASSERT_TRUE(Eventually([&] { return killed->up().Ended().has_value(); }));
  ASSERT_TRUE(killed->AllEndSoon());
  ASSERT_OK_AND_ASSIGN(const auto next, Cluster::Start("third", {"--log-level", "warn"}));
  EXPECT_FALSE(std::filesystem::exists(left));
  EXPECT_TRUE(std::filesystem::exists(in_use + "/owner"));
}

TEST(UpCommandTest, KilledCoordinator_TrainingGoesOn) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start("headless", {"--log-level", "warn"}));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Train(cluster->address(), TinyJob("tiny")));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Session> session, job->Connect({Slot(0)}));
  ASSERT_OK(session->AwaitWeights(kLong));
  const pid_t coordinator = cluster->PidOf("coordinator");
  kill(coordinator, SIGKILL);
  EXPECT_TRUE(cluster->Prints(absl::StrCat("ended coordinator pid ", coordinator, " signal KILL\n")));
  for (int step = 0; step < 100; ++step) ASSERT_OK(session->Step());
  EXPECT_FALSE(cluster->up().Ended().has_value());
  kill(cluster->PidOf("worker-0"), SIGTERM);  // it leaves, and the node with its last worker
  ASSERT_TRUE(Eventually([&] { return cluster->up().Ended().has_value(); }));
  EXPECT_EQ(EndText(*cluster->up().Ended()), "status 1");
  EXPECT_THAT(cluster->output(), HasSubstr("every process of the service has ended"));
}

// Kills it, and waits for its next incarnation.
void KillAndAwaitNext(const Cluster& cluster, const std::string& name, const std::string& how = "signal KILL") {
  const pid_t before = cluster.PidOf(name);
  kill(before, SIGKILL);
  EXPECT_TRUE(cluster.Prints(absl::StrCat("ended ", name, " pid ", before, " ", how, "\n"))) << cluster.output();
  EXPECT_TRUE(Eventually([&] { return cluster.PidOf(name) != before; })) << cluster.output();
}

absl::Status TakeSteps(Session& session, int number) {
  StepOptions options;
  options.timeout = kLong;
  for (int step = 0; step < number; ++step) RETURN_IF_ERROR(session.Step(options).status());
  return absl::OkStatus();
}

// A training that has made two steps, and goes on by TakeSteps.
absl::StatusOr<std::unique_ptr<Session>> StartTraining(const Cluster& cluster) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, Train(cluster.address(), TinyJob("tiny")));
  ASSIGN_OR_RETURN(std::unique_ptr<Session> session, job->Connect({Slot(0)}));
  RETURN_IF_ERROR(session->AwaitWeights(kLong));
  return session;
}

TEST(UpCommandTest, KilledWorker_ComesBackWithItsJob) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start("kept", {"--mesh", "fsdp=2", "--log-level", "warn"}));
  ASSERT_EQ(cluster->processes().size(), 4u);
  ASSERT_OK_AND_ASSIGN(const auto session, StartTraining(*cluster));
  for (const std::string worker : {"worker-0", "worker-1", "worker-0"}) {
    KillAndAwaitNext(*cluster, worker);
    ASSERT_OK(TakeSteps(*session, 10)) << worker;
  }
  EXPECT_EQ(session->committed_step(), Step(32));
  EXPECT_THAT(RunShardctl({"jobs", "--coordinator", cluster->address()}).out, Not(HasSubstr("failed")));
  cluster->up().Signal(SIGTERM);
  EXPECT_TRUE(cluster->AllEndSoon());
  ASSERT_TRUE(Eventually([&] { return cluster->up().Ended().has_value(); }));
  EXPECT_EQ(EndText(*cluster->up().Ended()), "status 0") << cluster->output();
  EXPECT_THAT(cluster->output(), AllOf(ContainsRegex("ended worker-1 pid [0-9]+ status 0\n"),
                                       ContainsRegex("ended node pid [0-9]+ status 0\n")));
}

TEST(UpCommandTest, KilledNode_ItsNextIncarnationTakesTheWorkersOver) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start("node", {"--restart", "--mesh", "fsdp=2"}));
  ASSERT_OK_AND_ASSIGN(const auto session, StartTraining(*cluster));
  const std::string log = absl::StrCat(::testing::TempDir(), "/node-logs/worker-1.log");
  KillAndAwaitNext(*cluster, "node");
  ASSERT_TRUE(Eventually([&] { return absl::StrContains(Contents(log), "event=node_back"); }));
  // The other worker hears of it with a sign of life: several times per heartbeat time-out, which is 3 s.
  const absl::Time known = MonotonicNow() + absl::Seconds(3);
  while (MonotonicNow() < known) ASSERT_OK(TakeSteps(*session, 1));
  const Step before = session->committed_step();
  KillAndAwaitNext(*cluster, "worker-1", "status unknown");  // it was no child of this node
  ASSERT_OK(TakeSteps(*session, 10));
  EXPECT_EQ(session->committed_step(), Step(before.value() + 10));
}

TEST(UpCommandTest, KilledNode_NotRestarted_WorkersGoOn_AndEndWithTheService) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start("left", {"--workers", "3", "--mesh", "fsdp=2"}));
  ASSERT_OK_AND_ASSIGN(const auto session, StartTraining(*cluster));
  const pid_t node = cluster->PidOf("node"), worker = cluster->PidOf("worker-2");
  kill(node, SIGKILL);
  EXPECT_TRUE(cluster->Prints(absl::StrCat("ended node pid ", node, " signal KILL\n"))) << cluster->output();
  ASSERT_OK(TakeSteps(*session, 10));
  kill(worker, SIGKILL);
  EXPECT_TRUE(cluster->Prints(absl::StrCat("ended worker-2 pid ", worker, " status unknown\n"))) << cluster->output();
  cluster->up().Signal(SIGTERM);
  EXPECT_TRUE(cluster->AllEndSoon());
  ASSERT_TRUE(Eventually([&] { return cluster->up().Ended().has_value(); }));
  EXPECT_EQ(EndText(*cluster->up().Ended()), "status 0") << cluster->output();
}

TEST(UpCommandTest, KilledProcesses_AreStartedAgain) {
  const std::string state = absl::StrCat(::testing::TempDir(), "/restarted.db");
  ASSERT_OK_AND_ASSIGN(
      const auto cluster,
      Cluster::Start("restart", {"--restart", "--no-keep", "--mesh", "fsdp=2", "--state", state, "--log-level", "warn",
                                 "--heartbeat-interval-ms", "100", "--heartbeat-timeout-ms", "60000"}));
  ASSERT_OK(Train(cluster->address(), TinyJob("before")));
  KillAndAwaitNext(*cluster, "worker-1");
  ASSERT_TRUE(Eventually([&] {
    return absl::StrContains(RunShardctl({"jobs", "--coordinator", cluster->address()}).out, "failed");
  }));
  ASSERT_EQ(RunShardctl({"delete", "before", "--coordinator", cluster->address()}).code, kExitOk);
  // A job takes both workers: the new incarnation has joined, long before the old one was silent for the time-out.
  // Until then a job may get the old one.
  EXPECT_TRUE(Eventually([&] {
    if (Train(cluster->address(), TinyJob("after")).ok()) return true;
    EXPECT_EQ(RunShardctl({"delete", "after", "--coordinator", cluster->address()}).code, kExitOk);
    return false;
  }));
  // The coordinator comes back at its address, with its jobs, and is found by the workers.
  KillAndAwaitNext(*cluster, "coordinator");
  ASSERT_TRUE(Eventually([&] {
    return absl::StrContains(RunShardctl({"jobs", "--coordinator", cluster->address()}).out, "after");
  }));
  ASSERT_EQ(RunShardctl({"delete", "after", "--coordinator", cluster->address()}).code, kExitOk);
  ASSERT_OK(Train(cluster->address(), TinyJob("again")));
  cluster->up().Signal(SIGTERM);
  ASSERT_TRUE(Eventually([&] { return cluster->up().Ended().has_value(); }));
  EXPECT_EQ(EndText(*cluster->up().Ended()), "status 0") << cluster->output();
}

TEST(UpCommandTest, CoordinatorWithItsStateInMemory_IsNotStartedAgain) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start("forgets", {"--restart", "--log-level", "warn"}));
  const pid_t coordinator = cluster->PidOf("coordinator");
  kill(coordinator, SIGKILL);
  EXPECT_TRUE(cluster->Prints(absl::StrCat("ended coordinator pid ", coordinator, " signal KILL\n")));
  KillAndAwaitNext(*cluster, "node");  // which is looked at after the coordinator
  EXPECT_EQ(cluster->PidOf("coordinator"), coordinator);
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
  for (const char* device : {"gpu", "CPU", "", "cpu,", "cuda:0,cpu", "cuda:", "cuda:-1", "cuda:0,,cuda:1"}) {
    const CommandResult refused = up({"--device", device});
    EXPECT_EQ(refused.code, kExitUsage) << device;
    EXPECT_THAT(refused.err, HasSubstr(absl::StrCat("--device is \"", device, "\"; it is cpu, or CUDA devices")));
  }
  EXPECT_EQ(up({"--device", "cpu", "cpu"}).code, kExitUsage);
  EXPECT_THAT(up({"--device", "cuda:0,cuda:1", "--bin-dir", "/none"}).err,
              HasSubstr("no program shardmesh-coordinator"));
  const CommandResult failed = up({"--bin-dir", ".", "--log-level", "nonsense"});
  EXPECT_EQ(failed.code, kExitError);
  EXPECT_THAT(failed.err, AllOf(HasSubstr("coordinator (pid "), HasSubstr("ended with status 1 before it was ready")));
  for (const char* keep : {"--keep", "--no-keep"}) {
    EXPECT_THAT(up({"--bin-dir", ".", "--device", "cuda:9999", keep}).err,
                AllOf(HasSubstr("worker-0 (pid "), HasSubstr("ended with status 1 before it was ready")));
  }
}

}  // namespace
}  // namespace shardmesh
