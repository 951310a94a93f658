// Contract: nothing depends on the wall clock. Somebody sets it back or forward by a minute while a job trains and
// workers are killed: no job is lost, and no bit differs. The clock is that of every program, or of the workers' host
// alone; processes and their waits are real (tests/testing/system/altered_system.h).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <csignal>
#include <filesystem>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "local/testing/temp_folder.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/altered_system.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::AlteredSystem;
using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Process;
using ::shardmesh::testing::TempFolder;

constexpr absl::Duration kMinute = absl::Minutes(1), kLong = absl::Seconds(60);
// A step, a sign of life or a restart that waited for the moved clock would be later than this.
constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(4);
constexpr int64_t kStepsBetween = 20;
// More than are trained until the last kill; the trainers rest after each.
constexpr int64_t kLastStep = 1600;
constexpr char kRest[] = "SHARDMESH_TEST_REST_MS=20";

// The words of the last line that begins with `word` and a space; empty: there is none.
std::string LastOf(const std::string& log, absl::string_view word) {
  std::string last;
  for (absl::string_view line : absl::StrSplit(log, '\n')) {
    if (absl::ConsumePrefix(&line, absl::StrCat(word, " "))) last = std::string(line);
  }
  return last;
}

struct ClockMoves : ::testing::TestWithParam<bool> {
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(system, AlteredSystem::Make(folder.File("system")));
  }
  std::vector<std::string> Moved() const { return system->Environment(); }
  std::unique_ptr<Process> StartTrainer(const std::string& way, const std::string& slot, bool moved) {
    std::vector<std::string> environment = {kRest};
    for (const std::string& variable : moved ? Moved() : std::vector<std::string>()) environment.push_back(variable);
    auto trainer = Process::Start({{"tests/testing/test_trainer", cluster->coordinator_address(), "job",
                                    absl::StrCat(kLastStep), way, slot},
                                   folder.File("trainer-" + slot), 0, environment});
    EXPECT_OK(trainer.status());
    return *std::move(trainer);
  }
  int64_t CommittedStep() const {
    int64_t step = -1;
    return absl::SimpleAtoi(LastOf(testing::ReadFile(folder.File("trainer-1")), "step"), &step) ? step : -1;
  }
  // Trains on for at least that long. `after`: of what is seen to be survived.
  void Train(const std::string& after, absl::Duration time = absl::ZeroDuration()) {
    for (const absl::Time over = MonotonicNow() + time; MonotonicNow() < over;) poll(nullptr, 0, 10);
    const int64_t end = CommittedStep() + kStepsBetween;
    ASSERT_LT(end, kLastStep) << "the trainers are done before the test is";
    const absl::Time deadline = MonotonicNow() + kLong;
    while (CommittedStep() < end && MonotonicNow() < deadline) poll(nullptr, 0, 10);
    ASSERT_GE(CommittedStep(), end) << "after " << after;
  }
  void Kill(const std::string& worker) {
    const pid_t pid = cluster->PidOf(worker);
    ASSERT_GT(pid, 0) << worker;
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    ASSERT_GT(cluster->AwaitNextIncarnation(worker, pid, kLong), 0) << worker;
  }

  TempFolder folder;
  std::unique_ptr<AlteredSystem> system;
  std::unique_ptr<Cluster> cluster;
};

TEST_P(ClockMoves, AndWorkersAreKilled_NoJobIsLost_AndTheBitsAreTheSame) {
  const bool everywhere = GetParam();
  ClusterOptions options;
  options.workers = 2;
  options.retained = true;
  options.heartbeat_timeout = kHeartbeatTimeout;
  options.worker_environment = Moved();
  if (everywhere) options.coordinator_environment = Moved();
  ASSERT_OK_AND_ASSIGN(cluster, Cluster::Start(options));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  {
    ASSERT_OK_AND_ASSIGN(const auto created, client.CreateJob(testing::OddJob("job", "fsdp=2", 2)));
    ASSERT_OK(testing::Initialize(*created));
  }
  const auto first = StartTrainer("attach", "1", everywhere);
  const auto second = StartTrainer("attach", "0", everywhere);
  ASSERT_NO_FATAL_FAILURE(Train("the start"));
  int kills = 0;
  for (const absl::Duration clock : {-kMinute, absl::ZeroDuration(), kMinute, absl::ZeroDuration()}) {
    system->MoveClock(clock);
    const std::string moved = absl::StrCat("the clock was set ", absl::FormatDuration(clock), " from the true time");
    ASSERT_NO_FATAL_FAILURE(Train(moved));
    const std::string worker = absl::StrCat("w-", kills++ % 2);
    ASSERT_NO_FATAL_FAILURE(Kill(worker));
    // Were the next incarnation refused, the coordinator would give the worker up meanwhile.
    ASSERT_NO_FATAL_FAILURE(
        Train(absl::StrCat(moved, " and ", worker, " was killed"), kHeartbeatTimeout + absl::Seconds(1)));
  }
  for (Process* const trainer : {first.get(), second.get()}) {
    ASSERT_OK_AND_ASSIGN(const int status, trainer->Wait(kLong));
    ASSERT_EQ(status, 0) << trainer->Log();
  }
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.OpenJob("job"));
  ASSERT_OK_AND_ASSIGN(const testing::Learnt learnt, testing::Learn(*job, kLastStep));
  EXPECT_EQ(job->epoch().value(), 1) << "the job was never lost, and never re-formed";
  ASSERT_OK(testing::Delete(client, "job"));
  ASSERT_OK_AND_ASSIGN(const testing::Learnt undisturbed,
                       testing::Undisturbed(client, testing::OddJob("undisturbed", "fsdp=2", 2), kLastStep));
  EXPECT_EQ(learnt, undisturbed);
}

INSTANTIATE_TEST_SUITE_P(Clocks, ClockMoves, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "OfEverybody" : "OfTheWorkers"; });

struct ClockMovesWithoutNode : ClockMoves {
  void Start(int workers) {
    ClusterOptions options;
    options.workers = workers;
    options.heartbeat_timeout = absl::Seconds(3);
    options.worker_environment = Moved();
    ASSERT_OK_AND_ASSIGN(cluster, Cluster::Start(options));
  }
  void TrainNewJob(const std::string& name) {
    ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
    EXPECT_OK(testing::Undisturbed(client, testing::TinyJob(name, "fsdp=1", 1), 2));
  }
};

TEST_F(ClockMovesWithoutNode, Back_ARestartedWorkerTakesItsNameAgain) {
  ASSERT_NO_FATAL_FAILURE(Start(1));
  system->MoveClock(-kMinute);
  for (int incarnation = 0; incarnation < 2; ++incarnation) {
    cluster->worker("w0").Kill9();
    ASSERT_OK(cluster->StartWorker("w0"));
  }
  ASSERT_NO_FATAL_FAILURE(TrainNewJob("again"));
}

// Nothing on its host says that it ever lived: the coordinator tells it which incarnation it may have.
TEST_F(ClockMovesWithoutNode, Back_AndNoTraceOfTheLastIncarnation_ARestartedWorkerTakesItsNameAgain) {
  ASSERT_NO_FATAL_FAILURE(Start(1));
  system->MoveClock(-kMinute);
  cluster->worker("w0").Kill9();
  std::filesystem::remove_all(cluster->folder().File("s"));
  ASSERT_OK(cluster->StartWorker("w0"));
  ASSERT_NO_FATAL_FAILURE(TrainNewJob("again"));
}

// A battery was empty, or somebody mistyped the year: the number would block the name for years when it is right again.
TEST_F(ClockMovesWithoutNode, FarAhead_AWorkerJoinsWithANumberOfTheCoordinators) {
  system->MoveClock(absl::Hours(24 * 365 * 30));
  ASSERT_NO_FATAL_FAILURE(Start(1));
  ASSERT_NO_FATAL_FAILURE(TrainNewJob("ahead"));
  system->MoveClock(absl::ZeroDuration());
  cluster->worker("w0").Kill9();
  ASSERT_OK(cluster->StartWorker("w0"));
  ASSERT_NO_FATAL_FAILURE(TrainNewJob("right"));
}

}  // namespace
}  // namespace shardmesh
