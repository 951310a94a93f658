// Contract 3: a killed or stopped worker becomes a typed error that names it, in every other process, within twice the
// heartbeat time-out. Each rank in turn, killed and stopped, while trainers step and a reader follows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <iostream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;
using ::testing::HasSubstr;

constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(3);
constexpr absl::Duration kGiveUp = absl::Seconds(25);
constexpr char kMesh[] = "fsdp=4";  // no copies: the job is over

// Somebody who uses the job until it fails: in a thread of its own; `use` is called again and again.
class Observer {
 public:
  Observer(std::string name, std::function<absl::Status()> use) : name_(std::move(name)) {
    thread_ = std::thread([this, use = std::move(use)] {
      const absl::Time deadline = MonotonicNow() + kGiveUp;
      while (status_.ok() && MonotonicNow() < deadline) {
        status_ = use();
        ++calls_;
      }
      ended_ = MonotonicNow();
    });
  }
  ~Observer() {
    if (thread_.joinable()) thread_.join();
  }

  int calls() const { return calls_.load(); }
  // Joins. The error must be UNAVAILABLE, name `worker`, and have come within twice the heartbeat time-out.
  void ExpectNamed(const std::string& worker, absl::Time since) {
    thread_.join();
    std::cout << "  " << name_ << ": " << absl::FormatDuration(ended_ - since) << " " << status_.message() << "\n";
    EXPECT_THAT(status_, StatusIs(absl::StatusCode::kUnavailable, HasSubstr(absl::StrCat("worker ", worker)))) << name_;
    EXPECT_LT(ended_ - since, 2 * kHeartbeatTimeout) << name_;
  }

 private:
  const std::string name_;
  std::atomic<int> calls_{0};
  absl::Status status_;
  absl::Time ended_;
  std::thread thread_;
};

std::function<absl::Status()> Trainer(std::shared_ptr<Session> session) {
  return [session] { return testing::TrainTo(*session, session->committed_step().value() + 1); };
}

std::function<absl::Status()> Reader(std::shared_ptr<Job> job) {
  auto next = std::make_shared<int64_t>(0);
  return [job, next]() -> absl::Status {
    ASSIGN_OR_RETURN(const Version version, job->Pull({VersionChoice::kAtLeast, Step(*next)}, absl::Seconds(20)));
    *next = version.step().value() + 1;
    return absl::OkStatus();
  };
}

std::function<absl::Status()> WorkerStatus(std::shared_ptr<Job> job, Rank rank) {
  return [job, rank]() -> absl::Status {
    ASSIGN_OR_RETURN(const v1::GetStatusReply reply, job->worker(rank).GetStatus(absl::Seconds(5)));
    testing::Pause(absl::Milliseconds(20));
    if (reply.jobs_size() != 1) return absl::InternalError(absl::StrCat(reply.jobs_size(), " jobs"));
    return reply.jobs(0).error().empty() ? absl::OkStatus() : absl::UnavailableError(reply.jobs(0).error());
  };
}

std::function<absl::Status()> CoordinatorView(Client& client, const std::string& job) {
  return [&client, job]() -> absl::Status {
    v1::DescribeJobRequest request;
    request.set_job(job);
    ASSIGN_OR_RETURN(const v1::JobDescription reply, client.coordinator().DescribeJob(request, absl::Seconds(5)));
    testing::Pause(absl::Milliseconds(20));
    return reply.state() == v1::JOB_STATE_READY ? absl::OkStatus() : absl::UnavailableError(reply.error());
  };
}

void AwaitDead(Client& client, const std::string& job, int rank) {
  v1::DescribeJobRequest request;
  request.set_job(job);
  const absl::Time deadline = MonotonicNow() + absl::Seconds(10);
  while (MonotonicNow() < deadline) {
    const auto reply = client.coordinator().DescribeJob(request, absl::Seconds(5));
    if (reply.ok() && !reply->members(rank).alive()) return;
    testing::Pause(absl::Milliseconds(20));
  }
  FAIL() << "the coordinator holds rank " << rank << " for alive";
}

void ExpectTrains(Client& client, const JobSpec& spec) {
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0)}));
  ASSERT_OK(session->AwaitWeights(absl::Seconds(20)));
  ASSERT_OK(testing::TrainTo(*session, 3));
}

struct Blow {
  int signal;
  int rank;
};

class NoHang : public ::testing::TestWithParam<Blow> {};

TEST_P(NoHang, EveryProcessNamesTheWorker) {
  const auto [signal, rank] = GetParam();
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 4, .heartbeat_timeout = kHeartbeatTimeout}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(testing::OddJob("job", kMesh, 3)));
  ASSERT_OK(testing::Initialize(*job));
  std::vector<std::unique_ptr<Observer>> observers;
  for (int slot = 0; slot < 3; ++slot) {
    const bool attached = slot < 2;
    ASSERT_OK_AND_ASSIGN(std::shared_ptr<Session> session,
                         attached ? job->Attach({Slot(slot)}) : job->Connect({Slot(slot)}));
    ASSERT_OK(session->AwaitWeights(absl::Seconds(20)));
    const std::string name = absl::StrCat(attached ? "attached" : "connected", " trainer of rank ", slot);
    observers.push_back(std::make_unique<Observer>(name, Trainer(std::move(session))));
  }
  observers.push_back(std::make_unique<Observer>("reader of rank 3", Reader(job)));
  for (int other = 0; other < 4; ++other) {
    if (other == rank) continue;
    observers.push_back(
        std::make_unique<Observer>(absl::StrCat("worker of rank ", other), WorkerStatus(job, Rank(other))));
  }
  observers.push_back(std::make_unique<Observer>("coordinator", CoordinatorView(client, "job")));
  const absl::Time start = MonotonicNow();
  while (observers[0]->calls() < 10 && MonotonicNow() - start < absl::Seconds(10)) testing::Pause(absl::Milliseconds(5));

  const std::string worker = job->members()[rank].worker();
  std::cout << (signal == SIGKILL ? "killed" : "stopped") << " worker " << worker << " (rank " << rank << ")\n";
  cluster->worker(worker).Signal(signal);
  const absl::Time since = MonotonicNow();
  for (const auto& observer : observers) observer->ExpectNamed(worker, since);

  // The others serve a new job; the stopped one comes back.
  AwaitDead(client, "job", rank);
  ASSERT_OK(testing::Delete(client, "job"));
  ExpectTrains(client, testing::TinyJob("job", "fsdp=3", 1));
  if (signal == SIGSTOP) {
    cluster->worker(worker).Continue();
  } else {
    ASSERT_OK(cluster->StartWorker(worker));
  }
  ExpectTrains(client, testing::TinyJob("again", "fsdp=4", 1));
}

std::string NameOf(const ::testing::TestParamInfo<Blow>& info) {
  return absl::StrCat(info.param.signal == SIGKILL ? "Killed" : "Stopped", "Rank", info.param.rank);
}

INSTANTIATE_TEST_SUITE_P(, NoHang,
                         ::testing::Values(Blow{SIGKILL, 0}, Blow{SIGKILL, 1}, Blow{SIGKILL, 2}, Blow{SIGKILL, 3},
                                           Blow{SIGSTOP, 0}, Blow{SIGSTOP, 1}, Blow{SIGSTOP, 2}, Blow{SIGSTOP, 3}),
                         NameOf);

// The whole machine stands still for longer than the heartbeat time-out, and one worker runs again before the others.
// It takes nobody for dead: the job is as it was.
TEST(NoHangAfterAStall, WhoRunsAgainFirst_BlamesNobody) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 2, .heartbeat_timeout = kHeartbeatTimeout}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(testing::TinyJob("job", "fsdp=2", 1)));
  ASSERT_OK(testing::Initialize(*job));
  for (const int first : {0, 1}) {
    testing::Process& early = cluster->worker(job->members()[first].worker());
    testing::Process& late = cluster->worker(job->members()[1 - first].worker());
    for (testing::Process* const process : {&cluster->coordinator(), &early, &late}) {
      process->Stop();
      ASSERT_TRUE(process->AwaitStopped(absl::Seconds(20)));
    }
    const absl::Time again = MonotonicNow() + 1.5 * kHeartbeatTimeout;
    while (MonotonicNow() < again) testing::Pause(absl::Milliseconds(20));
    early.Continue();
    const std::function<absl::Status()> status = WorkerStatus(job, Rank(first));
    const absl::Time over = MonotonicNow() + kHeartbeatTimeout / 3;  // of its rounds there are many meanwhile
    do {
      ASSERT_OK(status());
    } while (MonotonicNow() < over);
    for (testing::Process* const process : {&late, &cluster->coordinator()}) process->Continue();
    ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0)}));
    ASSERT_OK(session->AwaitWeights(absl::Seconds(20)));
    ASSERT_OK(testing::TrainTo(*session, session->committed_step().value() + 1));
  }
}

// Its slot is free at once, another trainer goes on, and no step is lost or doubled.
void KillTrainers(bool attach) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 2}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  const JobSpec spec = testing::OddJob("job", "fsdp=2", 2);
  constexpr int64_t kSteps = 400;
  ASSERT_OK_AND_ASSIGN(const Learnt undisturbed, testing::Undisturbed(client, spec, kSteps));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job));
  const auto start = [&](const std::string& last, const std::string& log) {
    return testing::Process::Start({{"tests/testing/test_trainer", cluster->coordinator_address(), "job", last,
                                     attach ? "attach" : "connect", "0"},
                                    cluster->folder().File(log)});
  };
  absl::Status steady;
  std::thread other([&] {
    steady = [&]() -> absl::Status {
      ASSIGN_OR_RETURN(const auto session, job->Attach({Slot(1)}));
      RETURN_IF_ERROR(session->AwaitWeights(absl::Seconds(20)));
      while (session->committed_step().value() < kSteps) {
        RETURN_IF_ERROR(testing::TrainTo(*session, session->committed_step().value() + 1));
        testing::Pause(absl::Milliseconds(5));  // all incarnations of the other fit into the run
      }
      return absl::OkStatus();
    }();
  });
  for (int incarnation = 0; incarnation < 4; ++incarnation) {
    const std::string log = absl::StrCat("trainer-", incarnation);
    auto trainer = start("1000000", log);
    if (!trainer.ok()) break;
    const absl::StatusOr<std::string> line =
        testing::AwaitLine(cluster->folder().File(log), **trainer, absl::Seconds(20));
    EXPECT_OK(line);
    EXPECT_THAT(line.ok() ? *line : "", HasSubstr("step "));
    (*trainer)->Kill9();
  }
  auto last = start(absl::StrCat(kSteps), "trainer-last");
  EXPECT_OK(last);
  if (last.ok()) {
    EXPECT_EQ((*last)->Wait(absl::Seconds(40)).value_or(-1), 0) << (*last)->Log();
  }
  other.join();
  ASSERT_OK(steady);
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, kSteps));
  EXPECT_EQ(learnt, undisturbed);
}

TEST(NoHangTrainer, AttachedKilled_AnotherGoesOn) { KillTrainers(true); }
TEST(NoHangTrainer, ConnectedKilled_AnotherGoesOn) { KillTrainers(false); }

TEST(NoHangTrainer, StepThatWaitsInVain_NamesWhatIsMissing_AndCanBeRepeated) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 1}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(testing::TinyJob("job", "fsdp=1", 2)));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto waits, job->Attach({Slot(0)}));
  ASSERT_OK_AND_ASSIGN(const auto late, job->Attach({Slot(1)}));
  StepOptions options;
  options.timeout = absl::Seconds(3);
  EXPECT_THAT(
      waits->Step(options),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               absl::StrCat("step 1 was not committed within 3s; missing slots: 1 (trainer pid ", getpid(), ")")));
  std::thread other([&] { EXPECT_OK(late->Step()); });
  EXPECT_OK(waits->Step());
  other.join();
}

}  // namespace
}  // namespace shardmesh
