// Jobs on several hosts that lose a worker or a whole host for good go on with what the other hosts have, and are
// brought to other meshes on other hosts while they train. They learn the bits of one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/cpp/checkpoint/reshard.h"
#include "core/base/clock.h"
#include "core/base/fault_point.h"
#include "core/base/matchers.h"
#include "core/mesh/mesh_spec.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"
#include "tests/testing/training/two_trainers.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;
using ::testing::HasSubstr;

constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(2), kLong = absl::Seconds(30);

enum class Kind { kFull, kBucket, kPulled, kEverything };

JobSpec SpecOf(Kind kind, const std::string& mesh) {
  JobSpec spec = kind == Kind::kEverything ? testing::EverythingJob("job", mesh) : testing::OddJob("job", mesh, 2);
  spec.clip_norm = 0.5;
  spec.parameters[1].gather = GatherFormat::kFp8Row;
  if (kind == Kind::kBucket) spec.residency = Residency::kBucket;
  if (kind == Kind::kPulled) {
    spec.num_slots = 5;
    spec.slot_mode = SlotMode::kPulled;
    spec.num_trainers = 2;
  }
  return spec;
}

class OnHosts : public ::testing::Test {
 protected:
  void Start(int hosts, int per_host, const std::string& faults = "") {
    setenv("SHARDMESH_FAULT", faults.c_str(), 1);
    if (faults.empty()) unsetenv("SHARDMESH_FAULT");
    ClusterOptions options;
    options.workers = hosts * per_host;
    options.hosts = hosts;
    options.heartbeat_timeout = kHeartbeatTimeout;
    options.worker_program = "tests/testing/faulty_worker";
    per_host_ = per_host;
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start(options));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
  }
  void Create(const JobSpec& spec) {
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(spec));
    created_ = job_->spec();
    ASSERT_OK(testing::Initialize(*job_));
  }
  void Train(int64_t steps) {
    step_ += steps;
    ASSERT_OK_AND_ASSIGN(job_, client_->OpenJob("job"));
    testing::TrainByTwo(*client_, job_, step_);
  }
  void ExpectLearnt(const std::string& mesh) {
    ASSERT_OK_AND_ASSIGN(job_, client_->OpenJob("job"));
    EXPECT_EQ(job_->spec().mesh.ToString(), mesh);
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job_, step_));
    EXPECT_EQ(learnt, testing::ReferenceOf(created_, step_));
  }
  void KillHost(int host) {
    for (int w = host * per_host_; w < (host + 1) * per_host_; ++w) cluster_->worker(absl::StrCat("w", w)).Kill9();
  }
  absl::Status To(const std::string& mesh) {
    ReshardOptions options;
    options.timeout = kLong;
    return ReshardJob(*client_, "job", ParseMeshSpec(mesh).value(), options).status();
  }
  // To the mesh, while two trainers train all the time.
  absl::Status ToWhileItTrains(const std::string& mesh) {
    absl::Status status;
    std::atomic<bool> done{false};
    std::thread resharding([&] {
      status = To(mesh);
      done.store(true);
    });
    while (!done.load()) Train(2);
    resharding.join();
    return status;
  }

  int per_host_ = 0;
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
  JobSpec created_;
  int64_t step_ = 0;
};

struct Loss {
  const char* name;
  int hosts, per_host;
  const char *before, *after;
  int lost;  // host
  Kind kind = Kind::kFull;
};

class LossOfAHost : public OnHosts, public ::testing::WithParamInterface<Loss> {};

TEST_P(LossOfAHost, TheOthersGoOn_WithTheBitsOfOneProcess) {
  const Loss& loss = GetParam();
  ASSERT_NO_FATAL_FAILURE(Start(loss.hosts, loss.per_host));
  ASSERT_NO_FATAL_FAILURE(Create(SpecOf(loss.kind, loss.before)));
  ASSERT_NO_FATAL_FAILURE(Train(3));
  std::thread training([this] { Train(6); });
  KillHost(loss.lost);
  training.join();
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt(loss.after));
  EXPECT_GT(job_->epoch(), Epoch(1));
}

INSTANTIATE_TEST_SUITE_P(
    , LossOfAHost,
    ::testing::Values(Loss{"FirstOfTwo", 2, 2, "ddp=2,fsdp=2", "ddp=1,fsdp=2", 0},
                      Loss{"SecondOfTwo", 2, 2, "ddp=2,fsdp=2", "ddp=1,fsdp=2", 1},
                      Loss{"Everything", 2, 2, "ddp=2,fsdp=2", "ddp=1,fsdp=2", 0, Kind::kEverything},
                      Loss{"Bucket", 2, 2, "ddp=2,fsdp=2", "ddp=1,fsdp=2", 0, Kind::kBucket},
                      Loss{"Pulled", 2, 2, "ddp=2,fsdp=2", "ddp=1,fsdp=2", 1, Kind::kPulled},
                      Loss{"OneOfThree", 3, 2, "ddp=3,fsdp=2", "ddp=2,fsdp=2", 1},
                      // Each of four hosts has half of a replica: two keep their replicas apart.
                      Loss{"QuarterOfAll", 4, 1, "ddp=2,fsdp=2", "ddp=2,fsdp=1", 2},
                      Loss{"FirstOfThree_Everything", 3, 1, "ddp=3", "ddp=2", 0, Kind::kEverything}),
    [](const auto& info) { return info.param.name; });

// A spare host takes its place.
TEST_F(OnHosts, ALostHost_IsReplacedByAFreeOne) {
  ASSERT_NO_FATAL_FAILURE(Start(3, 2));
  ASSERT_NO_FATAL_FAILURE(Create(SpecOf(Kind::kFull, "ddp=2,fsdp=2")));
  ASSERT_NO_FATAL_FAILURE(Train(3));
  for (const int rank : {0, 1}) cluster_->worker(job_->members()[rank].worker()).Kill9();
  ASSERT_NO_FATAL_FAILURE(Train(6));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=2,fsdp=2"));
}

TEST_F(OnHosts, AMemberIsLost_ItsHostGoesOnWithTheRest) {
  ASSERT_NO_FATAL_FAILURE(Start(2, 2));
  ASSERT_NO_FATAL_FAILURE(Create(SpecOf(Kind::kFull, "ddp=2,fsdp=2")));
  ASSERT_NO_FATAL_FAILURE(Train(3));
  cluster_->worker("w3").Kill9();
  ASSERT_NO_FATAL_FAILURE(Train(6));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=2,fsdp=1"));
}

// Its last worker has the only copy of shard 1, and no place on the new mesh.
TEST_F(OnHosts, AHostThatOnlyGives_EndsTheEpochWithTheOthers) {
  ASSERT_NO_FATAL_FAILURE(Start(2, 3));
  ASSERT_NO_FATAL_FAILURE(Create(SpecOf(Kind::kFull, "fsdp=2,ddp=3")));
  ASSERT_NO_FATAL_FAILURE(Train(3));
  for (const char* worker : {"w3", "w4"}) cluster_->worker(worker).Kill9();
  ASSERT_NO_FATAL_FAILURE(Train(6));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("fsdp=1,ddp=3"));
}

TEST_F(OnHosts, WithoutReplicas_TheErrorSaysSo) {
  ASSERT_NO_FATAL_FAILURE(Start(2, 1));
  ASSERT_NO_FATAL_FAILURE(Create(SpecOf(Kind::kFull, "fsdp=2")));
  ASSERT_NO_FATAL_FAILURE(Train(3));
  cluster_->worker("w1").Kill9();
  const auto ended = testing::TrainOver(*client_, job_, [](Job& job) { return testing::TrainHalf(job, true, 9); });
  EXPECT_THAT(ended, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("its mesh has no replicas")));
}

TEST_F(OnHosts, AStoppedLead_IsDoneWithout_AndGoesOnWithoutTheJob) {
  ASSERT_NO_FATAL_FAILURE(Start(2, 1));
  ASSERT_NO_FATAL_FAILURE(Create(SpecOf(Kind::kFull, "ddp=2")));
  ASSERT_NO_FATAL_FAILURE(Train(3));
  cluster_->worker("w1").Signal(SIGSTOP);
  ASSERT_NO_FATAL_FAILURE(Train(6));
  cluster_->worker("w1").Continue();
  ASSERT_NO_FATAL_FAILURE(Train(3));
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=1"));
}

struct Point {
  FaultPointInfo info;
  std::string worker;  // w0 is rank 0, w2 the second host's lead
  Kind kind = Kind::kFull;
};

class LossAtPoints : public OnHosts, public ::testing::WithParamInterface<Point> {};

TEST_P(LossAtPoints, TheOthersGoOn_FromTheStepThatWasDecided) {
  const Point& point = GetParam();
  ASSERT_NO_FATAL_FAILURE(Start(2, 2, absl::StrCat(point.worker, ":", point.info.name, ":kill:5")));
  ASSERT_NO_FATAL_FAILURE(Create(SpecOf(point.kind, "ddp=2,fsdp=2")));
  ASSERT_NO_FATAL_FAILURE(Train(12));
  ASSERT_OK_AND_ASSIGN(const int ended, cluster_->worker(point.worker).Wait(absl::Seconds(5)));
  EXPECT_EQ(ended, 128 + SIGKILL) << "the point was not reached";
  ASSERT_NO_FATAL_FAILURE(ExpectLearnt("ddp=2,fsdp=1"));
}

// The trainer is attached to the first host.
bool IsOfTrainers(FaultPoint point) {
  return point == FaultPoint::kMessageTaken || point == FaultPoint::kMessageDeclared || point == FaultPoint::kAnswering;
}

std::vector<Point> Points() {
  std::vector<Point> points;
  for (const FaultPointInfo& info : kFaultPoints) {
    for (const Kind kind : {Kind::kFull, Kind::kPulled}) {
      if (info.stage != (kind == Kind::kPulled ? FaultStage::kPulled : FaultStage::kStepping)) continue;
      if (info.point == FaultPoint::kGradientShardReceived) continue;  // by whom depends on who pushes where
      points.push_back({info, info.lead ? "w0" : "w1", kind});
      if (!IsOfTrainers(info.point)) points.push_back({info, info.lead ? "w2" : "w3", kind});
    }
  }
  return points;
}

std::string NameOf(const ::testing::TestParamInfo<Point>& info) {
  std::string name = absl::StrCat(info.param.info.name, "_", info.param.worker);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(, LossAtPoints, ::testing::ValuesIn(Points()), NameOf);

struct Way {
  const char* name;
  int hosts, per_host;
  std::vector<std::string> meshes;
  Kind kind = Kind::kFull;
};

class ReshardOnHosts : public OnHosts, public ::testing::WithParamInterface<Way> {};

TEST_P(ReshardOnHosts, WhileItTrains_LearnsTheReferencesBits) {
  const Way& way = GetParam();
  ASSERT_NO_FATAL_FAILURE(Start(way.hosts, way.per_host));
  ASSERT_NO_FATAL_FAILURE(Create(SpecOf(way.kind, way.meshes[0])));
  ASSERT_NO_FATAL_FAILURE(Train(2));
  for (size_t i = 1; i < way.meshes.size(); ++i) {
    ASSERT_OK(ToWhileItTrains(way.meshes[i])) << way.meshes[i];
    ASSERT_NO_FATAL_FAILURE(Train(1));
    ASSERT_NO_FATAL_FAILURE(ExpectLearnt(way.meshes[i]));
  }
}

INSTANTIATE_TEST_SUITE_P(
    , ReshardOnHosts,
    ::testing::Values(Way{"ToSeveral_AndBack", 2, 2, {"fsdp=2", "fsdp=4", "ddp=2,fsdp=2", "fsdp=1"}},
                      Way{"ThreeHosts", 3, 2, {"fsdp=3,ddp=2", "fsdp=6", "ddp=3,fsdp=2", "fsdp=4"}},
                      Way{"Everything", 2, 2, {"fsdp=4", "ddp=4", "fsdp=2"}, Kind::kEverything},
                      Way{"Bucket", 2, 2, {"fsdp=4", "ddp=2,fsdp=2", "fsdp=4"}, Kind::kBucket},
                      Way{"Pulled", 2, 2, {"fsdp=4", "ddp=2,fsdp=2", "fsdp=2"}, Kind::kPulled}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace shardmesh
