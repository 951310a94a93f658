// A worker of a job ends, and a worker of another cluster gets its port, while members of the job still call it there.
// The job's cause is that of a dead worker, never what the stranger says, and the job goes on if others have its shard.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/checkpoint/reshard.h"
#include "core/base/matchers.h"
#include "core/mesh/mesh_spec.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/await.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"
#include "tests/testing/training/two_trainers.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Await;
using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Code = absl::StatusCode;

constexpr absl::Duration kLong = absl::Seconds(30);
constexpr char kEnds[] = "w1", kStranger[] = "x1";

class ReusedAddress : public ::testing::Test {
 protected:
  // w1 is killed when its part in the older epoch is over, and nothing of its shard has moved. The heartbeat time-out
  // is longer than it takes the stranger to start.
  void Start(int workers, const std::string& mesh) {
    setenv("SHARDMESH_FAULT", absl::StrCat(kEnds, ":epoch-ended:kill:1").c_str(), 1);
    ClusterOptions options;
    options.workers = workers_ = workers;
    options.heartbeat_timeout = absl::Seconds(10);
    options.worker_program = "tests/testing/faulty_worker";
    absl::StatusOr<std::unique_ptr<Cluster>> started = Cluster::Start(options);
    unsetenv("SHARDMESH_FAULT");
    ASSERT_OK_AND_ASSIGN(cluster_, std::move(started));
    ClusterOptions other;
    other.workers = 0;
    other.worker_flags = {"--listen", cluster_->worker_address(kEnds)};
    ASSERT_OK_AND_ASSIGN(other_, Cluster::Start(other));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(testing::OddJob("job", mesh, 2)));
    created_ = job_->spec();
    ASSERT_OK(testing::Initialize(*job_));
    ASSERT_NO_FATAL_FAILURE(Train(2));
  }
  void Train(int64_t steps) {
    step_ += steps;
    ASSERT_OK_AND_ASSIGN(job_, client_->OpenJob("job"));
    testing::TrainByTwo(*client_, job_, step_);
  }
  // To the mesh. On the way w1 ends, and the stranger takes its address.
  absl::Status To(const std::string& mesh) {
    absl::Status moved;
    std::thread moving([&] {
      ReshardOptions options;
      options.timeout = kLong;
      moved = ReshardJob(*client_, "job", ParseMeshSpec(mesh).value(), options).status();
    });
    LetTheStrangerIn();
    moving.join();
    return moved;
  }
  void LetTheStrangerIn() {
    const absl::StatusOr<int> ended = cluster_->worker(kEnds).Wait(kLong);
    EXPECT_OK(ended.status());
    EXPECT_EQ(ended.value_or(0), 128 + SIGKILL) << "the point was not reached";
    EXPECT_OK(other_->StartWorker(kStranger));
    EXPECT_EQ(other_->worker_address(kStranger), cluster_->worker_address(kEnds));
    EXPECT_TRUE(Await([&] { return Met(); }, kLong)) << "nobody asked the stranger";
  }
  // Whether a member that needs w1's shard has asked the stranger for it.
  bool Met() {
    const std::string logged = absl::StrCat("has ended: worker \"", kStranger, "\" answers there now");
    for (int i = 0; i < workers_; ++i) {
      if (absl::StrContains(cluster_->worker(absl::StrCat("w", i)).Log(), logged)) return true;
    }
    return false;
  }

  std::unique_ptr<Cluster> cluster_, other_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
  JobSpec created_;
  int workers_ = 0;
  int64_t step_ = 0;
};

TEST_F(ReusedAddress, OthersHaveItsShard_TheJobMoves) {
  ASSERT_NO_FATAL_FAILURE(Start(4, "ddp=2,fsdp=2"));
  ASSERT_OK(To("fsdp=1"));
  ASSERT_NO_FATAL_FAILURE(Train(2));
  ASSERT_OK_AND_ASSIGN(job_, client_->OpenJob("job"));
  EXPECT_EQ(job_->spec().mesh.ToString(), "fsdp=1");
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job_, step_));
  EXPECT_EQ(learnt, testing::ReferenceOf(created_, step_));
}

TEST_F(ReusedAddress, NobodyHasItsShard_TheJobFailsAsByADeadWorker) {
  ASSERT_NO_FATAL_FAILURE(Start(2, "fsdp=2"));
  EXPECT_THAT(To("fsdp=1"), StatusIs(Code::kUnavailable, AllOf(HasSubstr("job job failed: "), HasSubstr("worker w1"),
                                                               Not(HasSubstr(kStranger)))));
}

}  // namespace
}  // namespace shardmesh
