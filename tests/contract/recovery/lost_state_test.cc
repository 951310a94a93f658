// Contract: a coordinator that comes back with an empty state file ends no training: the workers keep the job, both
// sides say so, and with the right file all is as before.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "local/testing/temp_folder.h"
#include "server/store/store.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/small_disk.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(20);

bool Says(const testing::Process& process, const std::string& text) {
  const absl::Time deadline = MonotonicNow() + kLong;
  while (!absl::StrContains(process.Log(), text) && MonotonicNow() < deadline) testing::Pause(absl::Milliseconds(10));
  return absl::StrContains(process.Log(), text);
}

// The database, and what SQLite keeps beside it.
void Move(const std::string& from, const std::string& to) {
  for (const char* end : {"", "-wal", "-journal"}) {
    if (std::filesystem::exists(from + end)) std::filesystem::rename(from + end, to + end);
  }
}

// As a cleaner of old files would do.
TEST(LostState, FileRemovedWhileTheCoordinatorRuns_IsWrittenAgain) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 1}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK(client.CreateJob(testing::OddJob("before", "fsdp=1", 1)));
  ASSERT_TRUE(std::filesystem::remove(cluster->StateFile()));
  EXPECT_TRUE(Says(cluster->coordinator(), "event=state_file_written_again"));
  ASSERT_OK(client.CreateJob(testing::OddJob("after", "fsdp=1", 1)));
  cluster->coordinator().Kill9();
  ASSERT_OK(cluster->RestartCoordinator());
  ASSERT_OK_AND_ASSIGN(Client there, cluster->Connect());
  for (const char* job : {"before", "after"}) EXPECT_OK(there.OpenJob(job)) << job;
}

// The memory file system stands for a disk.
TEST(LostState, ADiskThatIsFull_IsResourceExhausted_AndNothingChanges) {
  const testing::TempFolder temp;
  const auto disk = testing::SmallDisk::Mount(temp.File("disk"), 256 << 10);
  if (!disk.ok()) GTEST_SKIP() << "SKIPPED: no file systems of a test's own here: " << disk.status().message();
  ASSERT_OK_AND_ASSIGN(const auto store, NewSqliteStore(temp.File("disk") + "/state.db"));
  StoreBatch batch;
  batch.put_specs["large"] = std::string(1 << 20, 's');
  EXPECT_THAT(store->Write(batch), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("nothing was changed")));
  batch.put_specs["large"] = "s";
  EXPECT_OK(store->Write(batch));
  EXPECT_EQ(store->Load()->specs.at("large"), "s");
}

TEST(LostState, TrainingGoesOn_AndTheRightFileFindsIt) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 2}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(testing::OddJob("job", "fsdp=2", 1)));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0)}));
  ASSERT_OK(session->AwaitWeights(kLong));
  ASSERT_OK(testing::TrainTo(*session, 5));

  cluster->coordinator().Kill9();
  Move(cluster->StateFile(), cluster->StateFile() + ".right");
  ASSERT_OK(cluster->RestartCoordinator());
  for (const char* worker : {"w0", "w1"}) {
    EXPECT_TRUE(Says(cluster->coordinator(), absl::StrCat("event=other_state_file worker=", worker)));
    EXPECT_TRUE(Says(cluster->worker(worker), absl::StrCat("worker ", worker, " holds job job (epoch 1)")));
  }
  ASSERT_OK(testing::TrainTo(*session, 10));
  ASSERT_OK_AND_ASSIGN(Client there, cluster->Connect());
  EXPECT_THAT(there.OpenJob("job"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("there are no jobs")));

  cluster->coordinator().Kill9();
  Move(cluster->StateFile(), cluster->StateFile() + ".empty");
  Move(cluster->StateFile() + ".right", cluster->StateFile());
  ASSERT_OK(cluster->RestartCoordinator());
  ASSERT_OK_AND_ASSIGN(Client back, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> found, back.OpenJob("job"));
  EXPECT_EQ(found->epoch(), job->epoch());
  ASSERT_OK(testing::TrainTo(*session, 15));
  EXPECT_OK(found->Pull({VersionChoice::kExact, Step(15)}, kLong));
  // Deletion still closes it.
  ASSERT_OK(testing::Delete(back, "job"));
  for (const char* worker : {"w0", "w1"}) EXPECT_TRUE(Says(cluster->worker(worker), "event=job_closed job=job"));
}

}  // namespace
}  // namespace shardmesh
