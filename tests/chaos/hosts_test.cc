// Three hosts as network namespaces, two workers on each under a node, and jobs that train all the time: workers,
// leads and whole hosts are killed and stopped, links are cut, slowed down and made to lose packets, the coordinator is
// killed, and two of these at once. Replicas are on different hosts, so both jobs go on: no acknowledged step is lost.
// A third job has no replicas, but copies=2: when it loses a shard it goes back to the newest step that the other hosts
// have as a whole. A fourth has neither, and is saved all the time: it goes back to its newest checkpoint, and to no
// older one. All learn the bits of one process. Prints how long they paused, by what was done.
//
// SHARDMESH_CHAOS_HOSTS_SECONDS: how long (90; a soak: 900). SHARDMESH_SEED: in which order. SHARDMESH_CHAOS_HOSTS_ONLY:
// what alone is done, as "host killed"; all logs are printed then. Events go to chaos.jsonl among the test's outputs;
// plot_chaos.py draws it. Needs root and the right to make namespaces.
#include "tests/testing/hosts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "checkpoint/folder.h"
#include "client/cpp/checkpoint/checkpoint.h"
#include "client/cpp/checkpoint/reshard.h"
#include "client/cpp/client.h"
#include "client/cpp/pulling_session.h"
#include "client/cpp/session.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "core/base/sync.h"
#include "core/mesh/mesh_spec.h"
#include "local/testing/temp_folder.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/pauses.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/rounds.h"
#include "tests/testing/training/training.h"
#include "tests/testing/two_hosts.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Commits;
using ::shardmesh::testing::Hosts;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::Pauses;
using ::shardmesh::testing::Process;
using ::shardmesh::testing::Rounds;
using ::shardmesh::testing::TempFolder;

constexpr int kHosts = 3, kPerHost = 2;
constexpr char kMesh[] = "ddp=3,fsdp=2";
constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(2), kLong = absl::Seconds(60);
constexpr absl::Duration kShortHarm = absl::Milliseconds(600), kLongHarm = absl::Seconds(4);

// The coordinator, beside the hosts, and a node with its workers on each.
class Fleet {
 public:
  Fleet() : hosts_(kHosts) {}
  ~Fleet() {
    for (const auto& [host, node] : nodes_) KillHost(host);  // workers outlive a node that is killed
  }

  // PermissionDenied, Internal: there are no namespaces here.
  absl::Status CreateHosts() { return hosts_.Create(); }
  absl::Status Start() {
    RETURN_IF_ERROR(testing::MakeCertificate(folder_, "good", hosts_.addresses()));
    RETURN_IF_ERROR(StartCoordinator("0"));
    for (int h = 0; h < kHosts; ++h) RETURN_IF_ERROR(StartHost(h));
    return absl::OkStatus();
  }
  absl::StatusOr<Client> Connect() const {
    ClientOptions options;
    options.tls.cert_file = folder_.File("good.pem");
    options.tls.key_file = folder_.File("good.key");
    options.tls.ca_file = folder_.File("good.ca");
    return Client::Connect(coordinator_address_, options);
  }

  absl::Status KillCoordinator() {
    coordinator_->Kill9();
    return StartCoordinator(coordinator_address_.substr(coordinator_address_.find(':') + 1));
  }
  absl::Status StartHost(int host) {
    std::vector<std::string> command = {"worker/shardmesh-node",
                                        "--coordinator",
                                        coordinator_address_,
                                        "--workers",
                                        absl::StrCat(kPerHost),
                                        "--name",
                                        absl::StrCat("h", host),
                                        "--worker-binary",
                                        "worker/shardmesh-worker",
                                        "--local-dir",
                                        folder_.File(absl::StrCat("s", host)),
                                        "--",
                                        "--listen",
                                        absl::StrCat(hosts_.address(host), ":0"),
                                        "--group-address",
                                        hosts_.address(host)};
    AddTls(command);
    ASSIGN_OR_RETURN(nodes_[host], testing::StartOn(hosts_.name(host), std::move(command), LogOf(host)));
    return absl::OkStatus();
  }
  // 0: there is none now.
  pid_t PidOf(int host, int worker) const {
    const std::string log = testing::ReadFile(LogOf(host));
    const std::string mark = absl::StrCat("started worker=h", host, "-", worker, " pid=");  // or restarted
    const size_t at = log.rfind(mark);
    const pid_t pid = at == std::string::npos ? 0 : std::atoi(log.c_str() + at + mark.size());
    return pid > 0 && kill(pid, 0) == 0 ? pid : 0;
  }
  void Signal(int host, int worker, int signal) const {
    if (const pid_t pid = PidOf(host, worker); pid > 0) kill(pid, signal);
  }
  // All of it: what a power failure does.
  void KillHost(int host) {
    std::vector<pid_t> pids;
    for (int w = 0; w < kPerHost; ++w) pids.push_back(PidOf(host, w));
    nodes_[host]->Kill9();
    for (const pid_t pid : pids) {
      if (pid > 0) kill(pid, SIGKILL);
    }
  }
  Hosts& hosts() { return hosts_; }
  std::string Checkpoints() const { return folder_.File("checkpoints"); }
  void PrintLogs() const {
    std::printf("--- coordinator\n%s", testing::ReadFile(folder_.File("coordinator.log")).c_str());
    for (int h = 0; h < kHosts; ++h) std::printf("--- host %d\n%s", h, testing::ReadFile(LogOf(h)).c_str());
  }

 private:
  std::string LogOf(int host) const { return folder_.File(absl::StrCat("host", host, ".log")); }
  void AddTls(std::vector<std::string>& command) const {
    const std::vector<std::string> tls = testing::TlsFlags(folder_);
    command.insert(command.end(), tls.begin(), tls.end());
  }
  absl::Status StartCoordinator(const std::string& port) {
    const std::string address_file = folder_.File(absl::StrCat("coordinator.address", ++coordinators_));
    std::vector<std::string> command = {"server/shardmesh-coordinator",
                                        "--listen",
                                        absl::StrCat(Hosts::kHere, ":", port),
                                        "--state",
                                        folder_.File("state.db"),
                                        "--heartbeat-interval-ms",
                                        "100",
                                        "--heartbeat-timeout-ms",
                                        absl::StrCat(absl::ToInt64Milliseconds(kHeartbeatTimeout)),
                                        "--address-file",
                                        address_file};
    AddTls(command);
    ASSIGN_OR_RETURN(coordinator_, Process::Start({std::move(command), folder_.File("coordinator.log")}));
    ASSIGN_OR_RETURN(coordinator_address_, testing::AwaitLine(address_file, *coordinator_, kLong));
    return absl::OkStatus();
  }

  Hosts hosts_;
  const TempFolder folder_;
  int coordinators_ = 0;
  std::string coordinator_address_;
  std::unique_ptr<Process> coordinator_;
  std::map<int, std::unique_ptr<Process>> nodes_;
};

// Saves a job all the time, at whatever epoch it is.
class Saver {
 public:
  Saver(Client& client, std::string job, std::string root)
      : client_(client), job_(std::move(job)), root_(std::move(root)), thread_([this] { Run(); }) {}
  ~Saver() { End(); }

  void End() {
    stop_.store(true);
    if (thread_.joinable()) thread_.join();
  }
  // After End. By the epoch at which the job was: the newest step that was saved and recorded.
  const std::map<int64_t, int64_t>& saved() const { return saved_; }

 private:
  void Run() {
    for (; !stop_.load(); testing::Pause(absl::Milliseconds(300))) {
      const absl::StatusOr<std::shared_ptr<Job>> job = client_.OpenJob(job_);
      if (!job.ok()) continue;
      SaveOptions options;
      options.timeout = absl::Seconds(10);
      const absl::StatusOr<SavedCheckpoint> saved = SaveCheckpoint(**job, root_, options);
      if (!saved.ok() || !saved->recorded.ok()) continue;
      saved_[(*job)->epoch().value()] = saved->step;
      EXPECT_OK(Prune(root_, {3, 0}));
    }
  }

  Client& client_;
  const std::string job_, root_;
  std::map<int64_t, int64_t> saved_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// Two trainers of one job, beside the hosts, that step until they are told to end, at whatever epoch the job is.
class Training {
 public:
  Training(Client& client, std::shared_ptr<Job> job) : client_(client), job_(std::move(job)), spec_(job_->spec()) {
    for (int i = 0; i < 2; ++i) threads_[i] = std::thread([this, i] { statuses_[i] = Train(i); });
  }
  ~Training() { End().IgnoreError(); }

  const JobSpec& spec() const { return spec_; }
  Commits& commits() { return commits_; }
  absl::Status AwaitBeyond(int64_t step) const {
    const absl::Time deadline = MonotonicNow() + kLong;
    while (commits_.newest() <= step) {
      if (failed_.load()) return absl::AbortedError("a trainer ended");
      if (MonotonicNow() > deadline) return absl::DeadlineExceededError(absl::StrCat("step ", step, " is the last"));
      testing::Pause(absl::Milliseconds(5));
    }
    return absl::OkStatus();
  }
  // Where the job went back to a checkpoint: its step, by the first epoch after that.
  std::map<int64_t, int64_t> gone_back() {
    MutexLock lock(mu_);
    return gone_back_;
  }
  // Some steps more; returns the last one.
  absl::StatusOr<int64_t> End() {
    int64_t still = std::numeric_limits<int64_t>::max();
    last_.compare_exchange_strong(still, commits_.newest() + 5);
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
    for (const absl::Status& status : statuses_) RETURN_IF_ERROR(status);
    return last_.load();
  }

 private:
  // By which epoch of the job.
  struct Acknowledged {
    int64_t step = 0;
    Epoch epoch;
  };
  absl::Status Train(int trainer) {
    absl::Time deadline = MonotonicNow() + kLong;
    std::shared_ptr<Job> job = job_;
    Acknowledged acknowledged;
    while (true) {
      const int64_t before = acknowledged.step;
      const absl::Status status = spec_.pulled() ? Pull(*job, acknowledged) : Step(*job, trainer, acknowledged);
      if (status.ok()) return status;
      if (acknowledged.step != before) deadline = MonotonicNow() + kLong;
      const bool away = absl::IsUnavailable(status) || absl::IsNotFound(status) || absl::IsAborted(status) ||
                        absl::IsDeadlineExceeded(status);
      if (!away || MonotonicNow() > deadline) {
        failed_.store(true);
        return Annotate(status, absl::StrCat("trainer ", trainer, " of ", spec_.name));
      }
      if (std::getenv("SHARDMESH_CHAOS_HOSTS_ONLY") != nullptr) {
        std::printf("%.3f s: trainer %d of %s at step %ld: %s\n",
                    absl::ToDoubleSeconds(MonotonicNow() - absl::UnixEpoch()), trainer, spec_.name.c_str(),
                    static_cast<long>(acknowledged.step), status.ToString().c_str());
      }
      absl::StatusOr<std::shared_ptr<Job>> next = client_.OpenJob(spec_.name);
      if (next.ok()) job = *std::move(next);
      testing::Pause(absl::Milliseconds(10));
    }
  }
  // What was acknowledged is there, unless the job says that it went back.
  absl::Status CheckKeeps(const Job& job, int64_t committed, Acknowledged& acknowledged) {
    const std::optional<v1::GoneBack> back = job.WentBackSince(acknowledged.epoch);
    if (back.has_value()) {
      MutexLock lock(mu_);
      gone_back_[back->epoch()] = back->checkpoint().step();
    }
    const int64_t least = back.has_value() ? back->checkpoint().step() : acknowledged.step;
    if (committed < least) {
      return absl::DataLossError(absl::StrCat("step ", least, " was acknowledged; the job is at ", committed));
    }
    acknowledged = {std::min(acknowledged.step, committed), job.epoch()};
    return absl::OkStatus();
  }
  absl::Status Step(Job& job, int trainer, Acknowledged& acknowledged) {
    ASSIGN_OR_RETURN(const auto session, job.Connect({Slot(trainer)}));
    RETURN_IF_ERROR(session->AwaitWeights(kStep));
    RETURN_IF_ERROR(CheckKeeps(job, session->committed_step().value(), acknowledged));
    while (session->committed_step().value() < last_.load()) {
      RETURN_IF_ERROR(testing::TrainTo(*session, session->committed_step().value() + 1, kStep));
      acknowledged.step = session->committed_step().value();
      commits_.See(acknowledged.step);
    }
    return absl::OkStatus();
  }
  absl::Status Pull(Job& job, Acknowledged& acknowledged) {
    ASSIGN_OR_RETURN(const auto session, job.ConnectPulling());
    RETURN_IF_ERROR(session->AwaitWeights(kStep));
    RETURN_IF_ERROR(CheckKeeps(job, session->committed_step().value(), acknowledged));
    while (session->committed_step().value() < last_.load()) {
      RETURN_IF_ERROR(testing::PullTo(*session, session->committed_step().value() + 1, kStep));
      acknowledged.step = session->committed_step().value();
      commits_.See(acknowledged.step);
    }
    return absl::OkStatus();
  }

  static constexpr absl::Duration kStep = absl::Seconds(20);

  Client& client_;
  const std::shared_ptr<Job> job_;
  const JobSpec spec_;
  Commits commits_;
  std::atomic<int64_t> last_{std::numeric_limits<int64_t>::max()};
  std::atomic<bool> failed_{false};
  absl::Status statuses_[2];
  Mutex mu_;
  std::map<int64_t, int64_t> gone_back_ ABSL_GUARDED_BY(mu_);
  std::thread threads_[2];
};

struct Harm {
  const char* kind;
  std::function<absl::Status(Fleet&, int host)> begin;
  absl::Duration lasts = absl::ZeroDuration();
  std::function<absl::Status(Fleet&, int host)> end = nullptr;
};

absl::Status Done(const std::function<void()>& harm) {
  harm();
  return absl::OkStatus();
}

std::vector<Harm> Harms() {
  const auto kill_worker = [](int worker) {
    return [worker](Fleet& fleet, int host) { return Done([&] { fleet.Signal(host, worker, SIGKILL); }); };
  };
  const auto signal_lead = [](int signal) {
    return [signal](Fleet& fleet, int host) { return Done([&] { fleet.Signal(host, 0, signal); }); };
  };
  const auto kill_host = [](Fleet& fleet, int host) { return Done([&] { fleet.KillHost(host); }); };
  const auto start_host = [](Fleet& fleet, int host) { return fleet.StartHost(host); };
  const auto heal = [](Fleet& fleet, int) { return fleet.hosts().Heal(); };
  const auto cut = [](Fleet& fleet, int host) { return fleet.hosts().Cut(host); };
  const auto coordinator = [](Fleet& fleet, int) { return fleet.KillCoordinator(); };
  return {
      {"member killed", kill_worker(1)},
      {"lead killed", kill_worker(0)},
      {"host killed", kill_host, kShortHarm, start_host},
      {"lead stopped, short", signal_lead(SIGSTOP), kShortHarm, signal_lead(SIGCONT)},
      {"lead stopped, long", signal_lead(SIGSTOP), kLongHarm, signal_lead(SIGCONT)},
      {"host cut off, short", cut, kShortHarm, heal},
      {"host cut off, long", cut, kLongHarm, heal},
      {"link cut one way, long",
       [](Fleet& fleet, int host) { return fleet.hosts().CutOneWay(host, (host + 1) % kHosts); }, kLongHarm, heal},
      {"30 % of packets lost", [](Fleet& fleet, int host) { return fleet.hosts().Lose(host, 30); }, kLongHarm, heal},
      {"link at 1 MB/s", [](Fleet& fleet, int host) { return fleet.hosts().Slow(host, 1000); }, kLongHarm, heal},
      {"coordinator killed", coordinator},
      {"host and coordinator killed",
       [=](Fleet& fleet, int host) {
         fleet.KillHost(host);
         return fleet.KillCoordinator();
       },
       kShortHarm, start_host},
      {"two leads killed",
       [](Fleet& fleet, int host) {
         fleet.Signal(host, 0, SIGKILL);
         fleet.Signal((host + 1) % kHosts, 0, SIGKILL);
         return absl::OkStatus();
       }},
  };
}

class Report {
 public:
  Report() {
    if (const char* const folder = std::getenv("TEST_UNDECLARED_OUTPUTS_DIR")) {
      file_.open(absl::StrCat(folder, "/chaos.jsonl"));
    }
  }
  void Add(const Harm& harm, int host, absl::Time at, const std::vector<std::unique_ptr<Training>>& jobs) {
    nlohmann::json of_jobs = nlohmann::json::array();
    absl::Duration longest;
    for (const auto& job : jobs) {
      const Commits::Gap gap = job->commits().LongestGap();
      if (job->spec().on_loss == OnLoss::kCheckpoint) {
        of_saved_.Add(harm.kind, gap.length);
      } else if (job->spec().copies > 1) {
        of_copied_.Add(harm.kind, gap.length);
      } else {
        longest = std::max(longest, gap.length);
      }
      of_jobs.push_back({{"mesh", job->spec().name},
                         {"step", job->commits().newest()},
                         {"at_ms", Millis(gap.begin - begin_)},
                         {"pause_ms", Millis(gap.length)}});
    }
    pauses_.Add(harm.kind, longest);
    file_ << nlohmann::json({{"kind", harm.kind},
                             {"workers", {absl::StrCat("host ", host)}},
                             {"at_ms", Millis(at - begin_)},
                             {"stop_ms", Millis(harm.lasts)},
                             {"pause_ms", Millis(longest)},
                             {"jobs", of_jobs}})
                 .dump()
          << std::endl;
  }
  void Print() const {
    std::printf(
        "jobs with replicas:\n%sthe job with copies=2, until it is beyond the step that it had:\n%sthe job that "
        "is saved, the same:\n%s",
        pauses_.Table().c_str(), of_copied_.Table().c_str(), of_saved_.Table().c_str());
  }

 private:
  static double Millis(absl::Duration duration) { return absl::ToDoubleMilliseconds(duration); }

  const absl::Time begin_ = MonotonicNow();
  std::ofstream file_;
  Pauses pauses_, of_copied_, of_saved_;
};

// Back to all hosts, once their workers are there.
absl::Status MakeWhole(Client& client, const JobSpec& job) {
  const absl::Time deadline = MonotonicNow() + kLong;
  while (true) {
    ReshardOptions options;
    options.timeout = absl::Seconds(20);
    const absl::Status status = ReshardJob(client, job.name, job.mesh, options).status();
    if (status.ok() || MonotonicNow() > deadline) return Annotate(status, absl::StrCat("reshard of ", job.name));
    testing::Pause(absl::Milliseconds(50));
  }
}

JobSpec Assigned() {
  JobSpec spec = testing::OddJob("assigned-full", kMesh, 2);
  spec.clip_norm = 0.5;
  spec.parameters[1].gather = GatherFormat::kFp8Row;
  return spec;
}

JobSpec Pulled() {
  JobSpec spec = testing::OddJob("pulled-bucket", kMesh, 5);
  spec.residency = Residency::kBucket;
  spec.slot_mode = SlotMode::kPulled;
  spec.num_trainers = 2;
  return spec;
}

// Four of its members are on the hosts that a loss leaves.
JobSpec Saved() {
  JobSpec spec = testing::OddJob("saved", "fsdp=6", 2);
  spec.on_loss = OnLoss::kCheckpoint;
  return spec;
}

JobSpec Copied() {
  JobSpec spec = testing::OddJob("copied", "fsdp=6", 2);
  spec.copies = 2;
  return spec;
}

TEST(HostsChaos, WhateverHappensToAHost_NoStepIsLost_AndTheBitsAreTheSame) {
  std::random_device device;
  const auto seed = static_cast<uint32_t>(testing::NumberOfEnvironment("SHARDMESH_SEED", device()));
  const int64_t seconds = testing::NumberOfEnvironment("SHARDMESH_CHAOS_HOSTS_SECONDS", 90);
  std::printf("SHARDMESH_SEED=%u SHARDMESH_CHAOS_HOSTS_SECONDS=%d\n", seed, static_cast<int>(seconds));
  Fleet fleet;
  if (const absl::Status created = fleet.CreateHosts(); !created.ok()) {
    GTEST_SKIP() << "SKIPPED: no network namespaces here: " << created.message();
  }
  ASSERT_OK(fleet.Start());
  ASSERT_OK_AND_ASSIGN(Client client, fleet.Connect());
  std::vector<std::unique_ptr<Training>> jobs;
  for (const JobSpec& spec : {Assigned(), Pulled(), Copied(), Saved()}) {
    ASSERT_OK_AND_ASSIGN(std::shared_ptr<Job> job, client.CreateJob(spec));
    ASSERT_OK(testing::Initialize(*job));
    jobs.push_back(std::make_unique<Training>(client, std::move(job)));
  }

  Training &saved = *jobs[3], &copied = *jobs[2];
  Saver saver(client, saved.spec().name, fleet.Checkpoints());
  const char* const only = std::getenv("SHARDMESH_CHAOS_HOSTS_ONLY");
  const std::vector<Harm> harms = Harms();
  std::vector<int> all;
  for (size_t i = 0; i < harms.size(); ++i) {
    if (only == nullptr || absl::string_view(harms[i].kind) == only) all.push_back(static_cast<int>(i));
  }
  ASSERT_FALSE(all.empty()) << "SHARDMESH_CHAOS_HOSTS_ONLY=" << only << " is not a kind of harm";
  Rounds<int> kinds(all, seed);
  Report report;
  int events = 0;
  const absl::Time end = MonotonicNow() + absl::Seconds(seconds);
  while (MonotonicNow() < end && !::testing::Test::HasFailure()) {
    const Harm& harm = harms[kinds.Next()];
    const int host = kinds.Below(kHosts);
    for (const auto& job : jobs) {
      ASSERT_OK(job->AwaitBeyond(job->commits().newest() + 3)) << "before " << harm.kind << " of host " << host;
      job->commits().WatchGaps();
    }
    const absl::Time at = MonotonicNow();
    EXPECT_OK(harm.begin(fleet, host)) << harm.kind;
    if (harm.lasts > absl::ZeroDuration()) testing::Pause(harm.lasts);
    if (harm.end != nullptr) {
      EXPECT_OK(harm.end(fleet, host)) << harm.kind;
    }
    ++events;
    for (const auto& job : jobs) {
      EXPECT_OK(job->AwaitBeyond(job->commits().newest() + 3)) << "after " << harm.kind << " of host " << host;
    }
    report.Add(harm, host, at, jobs);
    for (const auto& job : jobs) {
      EXPECT_OK(MakeWhole(client, job->spec())) << "after " << harm.kind << " of host " << host;
    }
  }
  report.Print();
  for (const auto& job : jobs) {
    const absl::StatusOr<int64_t> last = job->End();
    EXPECT_OK(last);
    if (!last.ok()) continue;
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> now, client.OpenJob(job->spec().name));
    std::printf("%s: %d steps, epoch %d\n", job->spec().name.c_str(), static_cast<int>(*last),
                static_cast<int>(now->epoch().value()));
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*now, *last));
    EXPECT_EQ(learnt, testing::ReferenceOf(job->spec(), *last));
  }
  saver.End();
  for (const auto& [epoch, step] : saved.gone_back()) {
    for (const auto& [saved_at, newest] : saver.saved()) {
      EXPECT_TRUE(saved_at >= epoch || newest <= step) << "saved at epoch " << saved_at << ", back for epoch " << epoch;
    }
  }
  std::printf("%d events; job saved went back to a checkpoint %d times, job copied to copies %d times\n", events,
              static_cast<int>(saved.gone_back().size()), static_cast<int>(copied.gone_back().size()));
  if (::testing::Test::HasFailure() || only != nullptr) fleet.PrintLogs();
}

}  // namespace
}  // namespace shardmesh
