// Workers that die, stop or leave before their job is READY: it is assigned anew, to whoever lives, and learns what an
// undisturbed one does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/fault_point.h"
#include "core/base/matchers.h"
#include "proto/convert.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;
using ::testing::HasSubstr;

constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(2);
constexpr absl::Duration kLong = absl::Seconds(30);
constexpr int64_t kSteps = 3;

struct Case {
  FaultPointInfo info;
  int rank;  // 0 is the lead
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const FaultPointInfo& info : kFaultPoints) {
    if (info.stage != FaultStage::kPreparing) continue;
    for (int rank : {0, 1}) cases.push_back({info, rank});
  }
  return cases;
}

class Preparing : public ::testing::TestWithParam<Case> {
 protected:
  void Start(const std::string& action, ClusterOptions options) {
    std::filesystem::remove(Once());
    setenv("SHARDMESH_FAULT_ONCE", Once().c_str(), 1);
    victim_ = absl::StrCat(options.retained ? "w-" : "w", GetParam().rank);
    setenv("SHARDMESH_FAULT", absl::StrCat(victim_, ":", GetParam().info.name, ":", action, ":1").c_str(), 1);
    options.worker_program = "tests/testing/faulty_worker";
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start(options));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
  }
  static JobSpec Spec() { return testing::OddJob("job", "fsdp=2", 1); }
  static std::string Once() { return (std::filesystem::path(::testing::TempDir()) / "once").string(); }

  absl::StatusOr<v1::JobDescription> Describe() const {
    v1::DescribeJobRequest request;
    request.set_job("job");
    return client_->coordinator().DescribeJob(request, kLong);
  }
  // What the coordinator says of the job once it waits for workers.
  std::string AwaitWaiting() const {
    const absl::Time deadline = MonotonicNow() + kLong;
    while (MonotonicNow() < deadline) {
      const absl::StatusOr<v1::JobDescription> job = Describe();
      if (job.ok() && job->state() == v1::JOB_STATE_FAILED) return "FAILED: " + job->error();
      if (job.ok() && job->state() == v1::JOB_STATE_WAITING) return job->waiting_for();
      testing::Pause(absl::Milliseconds(10));
    }
    return "it never waited";
  }
  // Of the job that was assigned anew.
  void ExpectTrains(Job& job) {
    ASSERT_TRUE(std::filesystem::exists(Once())) << "the point was not reached";
    ASSERT_OK_AND_ASSIGN(const v1::JobDescription described, Describe());
    EXPECT_GT(described.epoch(), 1);
    ASSERT_OK(testing::Initialize(job));
    ASSERT_OK_AND_ASSIGN(const auto session, job.Attach({Slot(0)}));
    ASSERT_OK(session->AwaitWeights(kLong));
    ASSERT_OK(testing::TrainTo(*session, kSteps));
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(job, kSteps));
    ASSERT_OK_AND_ASSIGN(const Learnt undisturbed, testing::Undisturbed(*client_, Spec(), kSteps));
    EXPECT_EQ(learnt, undisturbed);
  }
  bool IsMember(const Job& job, const std::string& worker) const {
    return std::any_of(job.members().begin(), job.members().end(),
                       [&](const v1::Member& member) { return member.worker() == worker; });
  }

  std::string victim_;
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
};

TEST_P(Preparing, Killed_AnotherWorkerTakesItsPlace) {
  ASSERT_NO_FATAL_FAILURE(Start("kill", {.workers = 3, .heartbeat_timeout = kHeartbeatTimeout}));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_->CreateJob(Spec()));
  EXPECT_FALSE(IsMember(*job, victim_));
  ASSERT_NO_FATAL_FAILURE(ExpectTrains(*job));
}

TEST_P(Preparing, Stopped_AnotherWorkerTakesItsPlace_AndItGoesOnWithoutTheJob) {
  ASSERT_NO_FATAL_FAILURE(Start("stop", {.workers = 3, .heartbeat_timeout = kHeartbeatTimeout}));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_->CreateJob(Spec()));
  EXPECT_FALSE(IsMember(*job, victim_));
  cluster_->worker(victim_).Continue();
  ASSERT_NO_FATAL_FAILURE(ExpectTrains(*job));
}

TEST_P(Preparing, Killed_NobodyElse_WaitsForAWorker_AndTakesTheNextIncarnation) {
  ASSERT_NO_FATAL_FAILURE(Start("kill", {.workers = 2, .heartbeat_timeout = kHeartbeatTimeout}));
  v1::CreateJobRequest request;
  *request.mutable_spec() = ToProto(Spec());
  ASSERT_OK(client_->coordinator().CreateJob(request, kLong));
  const std::string waiting_for = AwaitWaiting();
  EXPECT_THAT(waiting_for, HasSubstr("2 live workers on one host"));
  EXPECT_THAT(waiting_for, HasSubstr("has 1"));
  ASSERT_OK(cluster_->StartWorker(victim_));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_->CreateJob(Spec()));
  ASSERT_NO_FATAL_FAILURE(ExpectTrains(*job));
}

TEST_P(Preparing, KilledOfAJobOnTwoHosts_TheOtherHostTakesTheNextIncarnation) {
  ASSERT_NO_FATAL_FAILURE(Start("kill", {.workers = 2, .hosts = 2, .heartbeat_timeout = kHeartbeatTimeout}));
  v1::CreateJobRequest request;
  *request.mutable_spec() = ToProto(Spec());
  ASSERT_OK(client_->coordinator().CreateJob(request, kLong));
  EXPECT_THAT(AwaitWaiting(), HasSubstr("2 live workers on one host, or evenly on several"));
  ASSERT_OK(cluster_->StartWorker(victim_));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_->CreateJob(Spec()));
  ASSERT_NO_FATAL_FAILURE(ExpectTrains(*job));
}

TEST_P(Preparing, KilledUnderANode_ItsNextIncarnationTakesItsPlace) {
  ClusterOptions options{.workers = 2};
  options.retained = true;
  options.heartbeat_timeout = absl::Seconds(20);  // nobody waits for it
  ASSERT_NO_FATAL_FAILURE(Start("kill", options));
  const absl::Time begin = MonotonicNow();
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_->CreateJob(Spec()));
  EXPECT_LT(MonotonicNow() - begin, options.heartbeat_timeout);
  ASSERT_NO_FATAL_FAILURE(ExpectTrains(*job));
}

std::string NameOf(const ::testing::TestParamInfo<Case>& info) {
  std::string name = absl::StrCat(info.param.info.name, "_rank", info.param.rank);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(, Preparing, ::testing::ValuesIn(Cases()), NameOf);

}  // namespace
}  // namespace shardmesh
