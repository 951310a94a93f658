// Workers whose memory a node has, killed at every named point of the step, the commit and the protocol
// (core/base/fault_point.h), of a job on one host and on two: trainers, attached and connected, only see a pause; no step
// is lost, and no bit differs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/fault_point.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;

constexpr int64_t kSteps = 12;
constexpr absl::Duration kLong = absl::Seconds(60);
constexpr int kNth = 5;  // of coming to a point: after some steps, and before all

struct Case {
  FaultPointInfo info;
  int rank;  // 0 is the lead
  bool pulled = false;
  bool bucketed = false;
  bool hosts = false;  // two of them, with one worker each
};

// Which the attached trainer sends the lead of one host.
bool OfMessages(FaultPoint point) {
  return point == FaultPoint::kMessageTaken || point == FaultPoint::kMessageDeclared || point == FaultPoint::kAnswering;
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const FaultPointInfo& info : kFaultPoints) {
    const bool attaching = info.point == FaultPoint::kAttaching;
    const bool of_steps = info.stage == FaultStage::kStepping || info.stage == FaultStage::kPulled;
    if (!of_steps && !attaching) continue;
    for (const bool pulled : {false, true}) {
      if (pulled ? info.point == FaultPoint::kGradientShardReceived : info.stage == FaultStage::kPulled) continue;
      cases.push_back({info, 0, pulled});
      if (!info.lead && !attaching) cases.push_back({info, 1, pulled});
      if (!attaching) cases.push_back({info, 0, pulled, /*bucketed=*/false, /*hosts=*/true});
      if (!attaching && (pulled || !OfMessages(info.point))) {
        cases.push_back({info, 1, pulled, /*bucketed=*/false, /*hosts=*/true});
      }
      if (pulled) continue;
      cases.push_back({info, 0, pulled, /*bucketed=*/true});
      if (!info.lead && !attaching) cases.push_back({info, 1, pulled, /*bucketed=*/true});
    }
  }
  return cases;
}

class RestartAtPoints : public ::testing::TestWithParam<Case> {
 protected:
  void Start() {
    ClusterOptions options;
    options.workers = 2;
    options.retained = true;
    options.hosts = GetParam().hosts ? 2 : 1;
    options.heartbeat_timeout = absl::Seconds(20);  // a busy machine starts a process late
    options.worker_program = "tests/testing/faulty_worker";
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start(options));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
  }
  // Of a job that clips: each step has two commands.
  JobSpec Spec(const std::string& name) {
    JobSpec spec = testing::OddJob(name, "fsdp=2", 2);
    spec.clip_norm = 0.5;
    if (GetParam().bucketed) spec.residency = Residency::kBucket;
    if (!GetParam().pulled) return spec;
    spec.num_slots = 5;
    spec.slot_mode = SlotMode::kPulled;
    spec.num_trainers = 2;
    return spec;
  }
  // By an attached trainer and a connected one.
  static absl::Status TrainAssigned(Job& job) {
    ASSIGN_OR_RETURN(const std::unique_ptr<Session> attached, job.Attach({Slot(0)}));
    ASSIGN_OR_RETURN(const std::unique_ptr<Session> connected, job.Connect({Slot(1)}));
    for (Session* session : {attached.get(), connected.get()}) RETURN_IF_ERROR(session->AwaitWeights(kLong));
    absl::Status of_connected;
    std::thread other([&] { of_connected = testing::TrainTo(*connected, kSteps, kLong); });
    absl::Status of_both = testing::TrainTo(*attached, kSteps, kLong);
    other.join();
    of_both.Update(of_connected);
    return of_both;
  }
  static absl::Status Pull(Job& job) {
    absl::Status status[2];
    std::vector<std::thread> trainers;
    for (absl::Status& of_one : status) {
      trainers.emplace_back([&job, &of_one] {
        const auto session = job.AttachPulling();
        of_one = session.ok() ? (*session)->AwaitWeights(kLong) : session.status();
        if (of_one.ok()) of_one = testing::PullTo(**session, kSteps, kLong);
      });
    }
    for (std::thread& trainer : trainers) trainer.join();
    status[0].Update(status[1]);
    return status[0];
  }
  std::string Once() const { return (std::filesystem::path(::testing::TempDir()) / "once").string(); }

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
};

TEST_P(RestartAtPoints, TrainersSeeAPause_AndTheBitsAreThoseOfOneProcess) {
  std::filesystem::remove(Once());
  setenv("SHARDMESH_FAULT_ONCE", Once().c_str(), 1);
  const int nth = GetParam().info.stage == FaultStage::kCalling ? 1 : kNth;
  const std::string of_host = absl::StrCat("w", GetParam().rank, "-0"), of_rank = absl::StrCat("w-", GetParam().rank);
  const std::string fault =
      absl::StrCat(GetParam().hosts ? of_host : of_rank, ":", GetParam().info.name, ":kill:", nth);
  setenv("SHARDMESH_FAULT", fault.c_str(), 1);
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_->CreateJob(Spec("job")));
  ASSERT_EQ(job->members()[0].worker(), GetParam().hosts ? "w0-0" : "w-0");
  ASSERT_TRUE(job->members()[0].kept());
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK(GetParam().pulled ? Pull(*job) : TrainAssigned(*job));
  ASSERT_TRUE(std::filesystem::exists(Once())) << "the point was not reached";
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, kSteps));
  EXPECT_EQ(learnt, testing::ReferenceOf(job->spec(), kSteps));
}

std::string NameOf(const ::testing::TestParamInfo<Case>& info) {
  std::string name = absl::StrCat(info.param.info.name, "_rank", info.param.rank, info.param.pulled ? "_pulled" : "",
                                  info.param.bucketed ? "_bucketed" : "", info.param.hosts ? "_hosts" : "");
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(, RestartAtPoints, ::testing::ValuesIn(Cases()), NameOf);

}  // namespace
}  // namespace shardmesh
