// A schedule of checkpoints outlives the coordinator's absence and a worker that is lost for good, saves what a job
// that nobody disturbs learns, and ends with the job.
#include "client/cpp/checkpoint/checkpoint_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "local/testing/temp_folder.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Code = absl::StatusCode;

constexpr absl::Duration kLong = absl::Seconds(60);

class CheckpointSchedule : public ::testing::Test {
 protected:
  void Start(const std::string& mesh) {
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start({.workers = 4, .heartbeat_timeout = absl::Seconds(2)}));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(testing::OddJob("job", mesh, 2)));
    ASSERT_OK(testing::Initialize(*job_));
  }
  absl::Status TrainUntil(int64_t last) {
    return testing::TrainOver(*client_, job_, [&](Job& job) -> absl::Status {
      ASSIGN_OR_RETURN(const auto session, job.Attach({Slot(0), Slot(1)}));
      RETURN_IF_ERROR(session->AwaitWeights(kLong));
      return testing::TrainTo(*session, last, kLong);
    });
  }
  // Runs a schedule of each fourth step. Once the i-th save is there, what is next of `events` happens.
  absl::Status Run(const std::vector<std::function<void()>>& events) {
    SaveScheduleOptions options;
    options.root = temp_.File("root");
    options.keep.last = 2;
    options.schedule.every = 4;
    options.schedule.saved = [&](const ScheduledSave& save) { saves_.push_back(save); };
    options.schedule.troubled = [&](const absl::Status& status) { troubles_.push_back(status.ToString()); };
    size_t happened = 0;
    const absl::Time deadline = MonotonicNow() + kLong;
    options.stops = [&](absl::Duration) {
      if (happened == saves_.size() && happened < events.size()) events[happened++]();
      testing::Pause(absl::Milliseconds(5));
      return MonotonicNow() > deadline || ::testing::Test::HasFailure();
    };
    return SaveOnSchedule(*client_, job_, options);
  }

  testing::TempFolder temp_;
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
  std::vector<ScheduledSave> saves_;
  std::vector<std::string> troubles_;
};

TEST_F(CheckpointSchedule, CoordinatorAway_AWorkerLost_TheJobDeleted) {
  ASSERT_NO_FATAL_FAILURE(Start("ddp=2,fsdp=2"));
  const absl::Status end = Run({[&] { ASSERT_OK(TrainUntil(4)); },
                                [&] {
                                  cluster_->coordinator().Kill9();
                                  ASSERT_OK(TrainUntil(9));
                                  ASSERT_OK(cluster_->RestartCoordinator());
                                },
                                [&] {
                                  cluster_->worker("w1").Kill9();
                                  ASSERT_OK(TrainUntil(12));
                                },
                                [&] { ASSERT_OK(testing::Delete(*client_, "job")); }});
  EXPECT_THAT(end, StatusIs(Code::kNotFound, HasSubstr("job")));
  ASSERT_EQ(saves_.size(), 3u);
  const int64_t steps[] = {4, 9, 12};
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(saves_[i].saved.step, steps[i]);
    EXPECT_EQ(saves_[i].saved.digest, testing::ReferenceOf(job_->spec(), steps[i]).digest) << steps[i];
  }
  EXPECT_THAT(saves_[2].removed, ElementsAre(4));
  ASSERT_OK_AND_ASSIGN(const auto restored, RestoreCheckpoint(*client_, temp_.File("root"), {"again", "fsdp=3"}));
  EXPECT_EQ(restored->Digest(kLong)->digest(), saves_[2].saved.digest);
}

TEST_F(CheckpointSchedule, AJobThatFails_EndsIt_WithItsError) {
  ASSERT_NO_FATAL_FAILURE(Start("fsdp=4"));
  const absl::Status end = Run({[&] { ASSERT_OK(TrainUntil(4)); }, [&] { cluster_->worker("w2").Kill9(); }});
  EXPECT_THAT(end, StatusIs(Code::kFailedPrecondition, HasSubstr("job job failed: ")));
  EXPECT_THAT(end.message(), HasSubstr("w2"));
  EXPECT_THAT(saves_, Not(IsEmpty()));
}

}  // namespace
}  // namespace shardmesh
