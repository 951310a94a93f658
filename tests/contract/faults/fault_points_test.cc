// Workers killed at every named point of the step, the commit and the protocol (core/base/fault_point.h): every trainer
// gets an error that names the worker, in time, and no step that a trainer was told of is unknown to the workers that
// live. A worker that is late at any of these points costs time, and no bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/cpp/version_reader.h"
#include "core/base/clock.h"
#include "core/base/fault_point.h"
#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;
using ::testing::HasSubstr;

constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(2);
constexpr int64_t kSteps = 12;
constexpr int kNth = 5;  // of coming to a point: after some steps, and before all

struct Case {
  FaultPointInfo info;
  std::string worker;  // w0 is the lead
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const FaultPointInfo& info : kFaultPoints) {
    if (info.stage != FaultStage::kStepping) continue;  // no worker comes to others so often
    cases.push_back({info, "w0"});
    if (!info.lead) cases.push_back({info, "w1"});
  }
  return cases;
}

class FaultPoints : public ::testing::TestWithParam<Case> {
 protected:
  void Start(const std::string& action) {
    const std::string fault = absl::StrCat(GetParam().worker, ":", GetParam().info.name, ":", action, ":", kNth);
    setenv("SHARDMESH_FAULT", fault.c_str(), 1);
    ClusterOptions options;
    options.workers = 2;
    options.heartbeat_timeout = kHeartbeatTimeout;
    options.worker_program = "tests/testing/faulty_worker";
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start(options));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(Spec()));
    ASSERT_EQ(job_->members()[0].worker(), "w0");
    ASSERT_OK(testing::Initialize(*job_));
    ASSERT_OK_AND_ASSIGN(attached_, job_->Attach({Slot(0)}));
    ASSERT_OK_AND_ASSIGN(connected_, job_->Connect({Slot(1)}));
    for (Session* session : {attached_.get(), connected_.get()}) {
      ASSERT_OK(session->AwaitWeights(absl::Seconds(20)));
    }
  }
  static JobSpec Spec() {
    JobSpec spec = testing::OddJob("job", "fsdp=2", 2);
    spec.clip_norm = 0.5;
    return spec;
  }
  // Both trainers at once, until a step fails or all are done.
  void Train(absl::Status& of_attached, absl::Status& of_connected) {
    std::thread other([&] { of_connected = testing::TrainTo(*connected_, kSteps); });
    of_attached = testing::TrainTo(*attached_, kSteps);
    other.join();
  }

  void ExpectToldInTime();

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
  std::unique_ptr<Session> attached_, connected_;
};

// Trains until somebody dies or stands still: both trainers name the worker, in time, and what they were told of is
// known to the other worker.
void FaultPoints::ExpectToldInTime() {
  absl::Status of_attached, of_connected;
  const absl::Time begin = MonotonicNow();
  Train(of_attached, of_connected);
  // A moment for the steps; twice the heartbeat time-out until it is known.
  EXPECT_LT(MonotonicNow() - begin, 2 * kHeartbeatTimeout + absl::Seconds(6));
  for (const absl::Status& status : {of_attached, of_connected}) {
    EXPECT_THAT(status,
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr(absl::StrCat("worker ", GetParam().worker))));
  }
  const Rank other(GetParam().worker == "w0" ? 1 : 0);
  ASSERT_OK_AND_ASSIGN(const v1::GetStatusReply status, job_->worker(other).GetStatus(absl::Seconds(5)));
  ASSERT_EQ(status.jobs_size(), 1);
  for (Session* session : {attached_.get(), connected_.get()}) {
    EXPECT_LE(session->committed_step().value(), status.jobs(0).committed_step());
  }
  EXPECT_LT(status.jobs(0).committed_step(), kSteps) << "the point was not reached";
}

TEST_P(FaultPoints, Killed_EveryTrainerIsToldInTime_AndNoStepIsForgotten) {
  ASSERT_NO_FATAL_FAILURE(Start("kill"));
  ASSERT_NO_FATAL_FAILURE(ExpectToldInTime());
  ASSERT_OK_AND_ASSIGN(const int ended, cluster_->worker(GetParam().worker).Wait(absl::Seconds(5)));
  EXPECT_EQ(ended, 128 + SIGKILL);
}

class StoppedAtFaultPoints : public FaultPoints {};

TEST_P(StoppedAtFaultPoints, EveryTrainerIsToldInTime_AndNoStepIsForgotten) {
  ASSERT_NO_FATAL_FAILURE(Start("stop"));
  ASSERT_NO_FATAL_FAILURE(ExpectToldInTime());
  cluster_->worker(GetParam().worker).Continue();
}

TEST_P(FaultPoints, Late_NoBitIsLost) {
  ASSERT_NO_FATAL_FAILURE(Start("delay"));
  absl::Status of_attached, of_connected;
  const absl::Time begin = MonotonicNow();
  Train(of_attached, of_connected);
  ASSERT_OK(of_attached);
  ASSERT_OK(of_connected);
  EXPECT_GT(MonotonicNow() - begin, absl::Milliseconds(250)) << "the point was not reached";
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job_, kSteps));
  static const Learnt undisturbed = [this] {
    unsetenv("SHARDMESH_FAULT");
    JobSpec spec = Spec();
    spec.name = "undisturbed";
    return testing::Undisturbed(*client_, spec, kSteps).value();
  }();
  EXPECT_EQ(learnt, undisturbed);
}

std::string NameOf(const ::testing::TestParamInfo<Case>& info) {
  std::string name = absl::StrCat(info.param.info.name, "_", info.param.worker);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

// Those that wait for a heartbeat time-out: where a stop looks different from a kill.
std::vector<Case> StoppedCases() {
  std::vector<Case> cases;
  for (const Case& each : Cases()) {
    const FaultPoint point = each.info.point;
    if (point == FaultPoint::kDecided || point == FaultPoint::kOutcomeOpen || point == FaultPoint::kChunkStepped) {
      cases.push_back(each);
    }
  }
  return cases;
}

// One worker, w0, with this fault.
absl::StatusOr<std::unique_ptr<Cluster>> StartFaulty(const char* fault) {
  setenv("SHARDMESH_FAULT", fault, 1);
  ClusterOptions options;
  options.workers = 1;
  options.heartbeat_timeout = kHeartbeatTimeout;
  options.worker_program = "tests/testing/faulty_worker";
  return Cluster::Start(options);
}

class StoppedWhileAttaching : public ::testing::TestWithParam<bool> {};  // a reader, or else a trainer

// The call that grants it was answered, so that only silence over the socket tells.
TEST_P(StoppedWhileAttaching, IsToldInTime) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, StartFaulty("w0:attaching:stop:1"));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const auto job, client.CreateJob(testing::OddJob("job", "fsdp=1", 1)));
  ReaderOptions reader;
  reader.way = ReaderOptions::Way::kAttached;
  const absl::Time begin = MonotonicNow();
  EXPECT_THAT(GetParam() ? VersionReader::Open(client, "job", reader).status() : job->Attach({Slot(0)}).status(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("worker w0")));
  EXPECT_LT(MonotonicNow() - begin, 2 * kHeartbeatTimeout);
  EXPECT_TRUE(cluster->worker("w0").AwaitStopped(absl::Seconds(5))) << "the point was not reached";
  cluster->worker("w0").Continue();
}

// Its welcome comes later than a worker may be silent, and it answers other calls.
TEST(LateWhileAttaching, ATrainerWaits) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, StartFaulty("w0:attaching:delay:1"));
  ClientOptions impatient;
  impatient.peer_timeout = absl::Milliseconds(150);  // the delay is longer
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(cluster->coordinator_address(), impatient));
  ASSERT_OK_AND_ASSIGN(const auto job, client.CreateJob(testing::OddJob("job", "fsdp=1", 1)));
  const absl::Time begin = MonotonicNow();
  EXPECT_OK(job->Attach({Slot(0)}).status());
  EXPECT_GT(MonotonicNow() - begin, impatient.peer_timeout) << "the point was not reached";
}

INSTANTIATE_TEST_SUITE_P(, StoppedWhileAttaching, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Reader" : "Trainer"; });
INSTANTIATE_TEST_SUITE_P(, FaultPoints, ::testing::ValuesIn(Cases()), NameOf);
INSTANTIATE_TEST_SUITE_P(, StoppedAtFaultPoints, ::testing::ValuesIn(StoppedCases()), NameOf);

}  // namespace
}  // namespace shardmesh
