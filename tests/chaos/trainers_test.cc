// Trainer processes that pull slots are killed and stopped at random, alone and together with workers: others take
// their slots, a killed one's replacement takes part, a stopped one that goes on is told that it was late and takes
// part again, no step is lost, and no bit differs.
//
// SHARDMESH_CHAOS_SECONDS: how long (25). SHARDMESH_SEED: which events.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <functional>
#include <map>
#include <random>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/pauses.h"
#include "tests/testing/system/process.h"
#include "tests/testing/training/rounds.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Commits;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::Pauses;
using ::shardmesh::testing::Process;
using JobStatus = v1::GetStatusReply::Job;

constexpr int kWorkers = 2, kTrainers = 3;
constexpr int kSlotTimeoutMillis = 500;
constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(20);  // a busy machine starts a process late
constexpr int kMaxQuietMillis = 200;                             // from the last recovery to the next event
constexpr absl::Duration kLong = absl::Seconds(60);

// What happens to some trainers, at the same moment as a worker is killed.
struct Kind {
  const char* text;
  int trainers;
  int min_stop, max_stop;  // ms; 0: they are killed
  bool worker;
  bool stops() const { return max_stop > 0; }
  bool late() const { return min_stop > kSlotTimeoutMillis; }
};
constexpr Kind kKinds[] = {{"trainer killed", 1, 0, 0, false},
                           {"two trainers killed", 2, 0, 0, false},
                           {"all trainers killed", kTrainers, 0, 0, false},
                           {"trainer stopped, not late", 1, 20, kSlotTimeoutMillis / 2, false},
                           {"trainer stopped, nearly late", 1, kSlotTimeoutMillis - 5, kSlotTimeoutMillis + 10, false},
                           {"trainer stopped, late", 1, kSlotTimeoutMillis + 100, 1500, false},
                           {"trainer, worker killed", 1, 0, 0, true},
                           {"all trainers, worker killed", kTrainers, 0, 0, true},
                           {"trainer stopped, worker killed", 1, kSlotTimeoutMillis + 100, 1500, true}};

struct Event {
  Kind kind;
  std::vector<int> trainers;
  std::string worker;  // that is killed; empty: none
  absl::Duration stop, quiet;
};

class Events {
 public:
  explicit Events(uint32_t seed) : kinds_({std::begin(kKinds), std::end(kKinds)}, seed) {}
  Event Next() {
    Event event = {kinds_.Next(), {}, "", absl::ZeroDuration(), absl::Milliseconds(kinds_.Below(kMaxQuietMillis))};
    const Kind& kind = event.kind;
    const int first = kinds_.Below(kTrainers);
    for (int i = 0; i < kind.trainers; ++i) event.trainers.push_back((first + i) % kTrainers);
    if (kind.worker) event.worker = absl::StrCat("w-", kinds_.Below(kWorkers));
    if (kind.stops()) event.stop = absl::Milliseconds(kind.min_stop + kinds_.Below(kind.max_stop - kind.min_stop));
    return event;
  }

 private:
  testing::Rounds<Kind> kinds_;
};

// What the workers say of a job, asked again and again. Commits are seen by any of them.
class Watch {
 public:
  explicit Watch(std::shared_ptr<Job> job) : job_(std::move(job)), thread_([this] { Run(); }) {}
  ~Watch() {
    stop_.store(true);
    thread_.join();
  }
  Commits& commits() { return commits_; }
  // What the first worker said last.
  JobStatus Newest() const {
    MutexLock lock(mu_);
    return newest_;
  }

 private:
  void Run() {
    while (!stop_.load()) {
      for (int r = 0; r < kWorkers; ++r) Ask(Rank(r));
      testing::Pause(absl::Milliseconds(1));
    }
  }
  void Ask(Rank rank) {
    const absl::StatusOr<v1::GetStatusReply> reply = job_->worker(rank).GetStatus(absl::Seconds(1));
    if (!reply.ok()) return;  // it was killed
    for (const JobStatus& status : reply->jobs()) {
      if (status.name() != job_->spec().name) continue;
      commits_.See(status.committed_step());
      MutexLock lock(mu_);
      if (rank.value() == 0) newest_ = status;
    }
  }

  const std::shared_ptr<Job> job_;
  Commits commits_;
  std::atomic<bool> stop_{false};
  mutable Mutex mu_;
  JobStatus newest_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

class TrainersChaos : public ::testing::Test {
 protected:
  void SetUp() override {
    ClusterOptions options;
    options.workers = kWorkers;
    options.retained = true;
    options.heartbeat_timeout = kHeartbeatTimeout;
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start(options));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
    JobSpec spec = testing::OddJob("job", "fsdp=2", 7);
    spec.slot_mode = SlotMode::kPulled;
    spec.num_trainers = kTrainers;
    spec.slot_timeout_ms = kSlotTimeoutMillis;
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(spec));
    ASSERT_OK(testing::Initialize(*job_));
    watch_ = std::make_unique<Watch>(job_);
    for (int t = 0; t < kTrainers; ++t) ASSERT_OK(StartTrainer(t));
  }
  void TearDown() override {
    for (int t = 0; t < kTrainers && HasFailure(); ++t) std::printf("--- trainer %d\n%s", t, Log(t).c_str());
  }

  std::string LogFile(int trainer) const { return cluster_->folder().File(absl::StrCat("trainer-", trainer, ".log")); }
  std::string Log(int trainer) const { return testing::ReadFile(LogFile(trainer)); }
  absl::Status StartTrainer(int trainer) {
    ASSIGN_OR_RETURN(
        trainers_[trainer],
        Process::Start({{"tests/testing/test_trainer", cluster_->coordinator_address(), "job", "1000000000", "pull"},
                        LogFile(trainer)}));
    return absl::OkStatus();
  }
  int64_t committed() { return watch_->commits().newest(); }

  // Aborted: a trainer ended that nobody killed.
  absl::Status Await(const std::string& what, const std::function<bool()>& there) {
    const absl::Time deadline = MonotonicNow() + kLong;
    while (!there()) {
      for (const auto& trainer : trainers_) {
        if (trainer != nullptr && !trainer->alive()) return absl::AbortedError("a trainer ended: " + trainer->Log());
      }
      if (MonotonicNow() > deadline) return absl::DeadlineExceededError(what);
      testing::Pause(absl::Milliseconds(1));
    }
    return absl::OkStatus();
  }
  // A step is committed that begins from now on.
  absl::Status AwaitStep() {
    const int64_t step = committed() + 1;
    return Await(absl::StrCat("no step after ", step), [&] { return committed() > step; });
  }
  // Results that counted, by trainers that are attached.
  std::map<int64_t, int64_t> Finished() const {
    std::map<int64_t, int64_t> finished;
    const JobStatus status = watch_->Newest();
    for (const JobStatus::Trainer& trainer : status.trainers()) {
      finished[trainer.pid()] = trainer.slots_finished();
    }
    return finished;
  }
  // Every trainer finishes a slot from now on.
  absl::Status AwaitAllTakePart() {
    std::map<int64_t, int64_t> before = Finished();
    return Await("a trainer finishes no slots", [&] {
      std::map<int64_t, int64_t> now = Finished();
      return std::all_of(std::begin(trainers_), std::end(trainers_), [&](const auto& trainer) {
        const pid_t pid = trainer->pid();
        if (before.count(pid) == 0 && now.count(pid) > 0) before[pid] = now[pid];
        return now.count(pid) > 0 && now[pid] > before[pid];
      });
    });
  }

  absl::Status Harm(const Event& event) {
    if (!event.worker.empty()) {
      const pid_t pid = cluster_->PidOf(event.worker);
      if (pid <= 0) return absl::NotFoundError(absl::StrCat(event.worker, " does not run"));
      kill(pid, SIGKILL);
    }
    for (const int t : event.trainers) trainers_[t]->Signal(event.kind.stops() ? SIGSTOP : SIGKILL);
    for (const int t : event.trainers) {
      if (!event.kind.stops()) trainers_[t].reset();
    }
    return absl::OkStatus();
  }
  // Those that are left take the slots of the others, at once or when they are late.
  absl::Status GoOnWithout(const Event& event) {
    const int64_t reopened = watch_->Newest().slots_reopened();
    const absl::Time until = MonotonicNow() + event.stop;
    RETURN_IF_ERROR(Harm(event));
    if (event.kind.trainers < kTrainers && (!event.kind.stops() || event.kind.late())) {
      RETURN_IF_ERROR(Annotate(AwaitStep(), "without the trainers"));
    }
    testing::Pause(until - MonotonicNow());
    if (event.kind.late() && event.worker.empty()) late_ += watch_->Newest().slots_reopened() - reopened;
    return absl::OkStatus();
  }
  // The event, until training goes on with everybody.
  absl::Status Live(const Event& event) {
    RETURN_IF_ERROR(Annotate(AwaitStep(), "before it"));
    testing::Pause(event.quiet);
    watch_->commits().WatchGaps();
    RETURN_IF_ERROR(GoOnWithout(event));
    for (const int t : event.trainers) {
      if (event.kind.stops()) trainers_[t]->Continue();
      if (!event.kind.stops()) RETURN_IF_ERROR(StartTrainer(t));
    }
    RETURN_IF_ERROR(AwaitAllTakePart());
    RETURN_IF_ERROR(AwaitStep());
    pauses_.Add(event.kind.text, watch_->commits().LongestGap().length);
    return absl::OkStatus();
  }

  // Trainers that were told that another one came first.
  int ToldLate() const {
    int told = 0;
    for (int t = 0; t < kTrainers; ++t) {
      for (const absl::string_view line : absl::StrSplit(Log(t), '\n')) told += absl::StartsWith(line, "late for slot");
    }
    return told;
  }

  // No trainer gave other gradients than another one for the same slot, and so many steps have the bits of an
  // undisturbed run.
  void ExpectAsUndisturbed() {
    for (auto& trainer : trainers_) trainer.reset();
    ASSERT_OK_AND_ASSIGN(const auto session, job_->AttachPulling());
    ASSERT_OK(session->AwaitWeights(kLong));
    const int64_t last = session->committed_step().value() + 5;
    ASSERT_OK(testing::PullTo(*session, last, kLong));
    ASSERT_OK_AND_ASSIGN(const v1::GetStatusReply status, job_->worker(Rank(0)).GetStatus(kLong));
    ASSERT_EQ(status.jobs_size(), 1);
    EXPECT_EQ(status.jobs(0).slots_differing(), 0);
    std::printf("%ld steps, %ld slots taken back, %d results too late\n", static_cast<long>(last),
                static_cast<long>(status.jobs(0).slots_reopened()), ToldLate());
    EXPECT_GE(ToldLate(), late_);
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job_, last));
    EXPECT_EQ(learnt.step, last);
    ASSERT_OK_AND_ASSIGN(const Learnt undisturbed, testing::Undisturbed(*client_, job_->spec(), last));
    EXPECT_EQ(learnt, undisturbed);
  }

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
  std::unique_ptr<Watch> watch_;
  std::unique_ptr<Process> trainers_[kTrainers];
  int64_t late_ = 0;  // slots that were taken back from a trainer that then went on
  Pauses pauses_;
};

TEST_F(TrainersChaos, OthersTakeTheSlots_AndTheBitsAreTheSame) {
  const absl::Duration length = absl::Seconds(testing::NumberOfEnvironment("SHARDMESH_CHAOS_SECONDS", 25));
  const auto seed = static_cast<uint32_t>(testing::NumberOfEnvironment("SHARDMESH_SEED", std::random_device()()));
  std::printf("SHARDMESH_SEED=%u SHARDMESH_CHAOS_SECONDS=%ld\n", seed, static_cast<long>(absl::ToInt64Seconds(length)));
  Events events(seed);
  const absl::Time begin = MonotonicNow();
  int count = 0;
  for (absl::Status lived; MonotonicNow() < begin + length && lived.ok(); ++count) {
    const Event event = events.Next();
    lived = Live(event);
    EXPECT_OK(lived) << "event " << count << ": " << event.kind.text << " " << event.worker;
  }
  std::printf("%s%d events in %s\n", pauses_.Table().c_str(), count,
              absl::FormatDuration(absl::Floor(MonotonicNow() - begin, absl::Seconds(1))).c_str());
  if (!HasFailure()) ExpectAsUndisturbed();
}

}  // namespace
}  // namespace shardmesh
