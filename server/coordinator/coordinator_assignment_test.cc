// Which workers the coordinator gives to a job, and what a job waits for.
#include <gmock/gmock.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "core/job/support.h"
#include "server/coordinator/testing/coordinator_fixture.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

TEST_F(CoordinatorTest, WaitingJob_SaysWhatIsMissing) {
  ASSERT_OK(c_->CreateJob(SmallJob("j", 3), now_));
  EXPECT_EQ(View("j").waiting_for, "3 live workers on one host; none is there");
  ASSERT_OK(c_->Join(SmallWorker("a", 1, "h1"), now_));
  ASSERT_OK(c_->Join(SmallWorker("b", 1, "h2"), now_));
  ASSERT_OK(c_->Join(SmallWorker("c", 1, "h2"), now_));
  EXPECT_EQ(View("j").state, JobState::kWaiting);
  EXPECT_EQ(View("j").waiting_for, "3 live workers on one host; host h2 has 2, host h1 has 1");
  ASSERT_OK(c_->Join(SmallWorker("d", 1, "h2"), now_));
  EXPECT_EQ(View("j").state, JobState::kPreparing);
  EXPECT_EQ(View("j").members[2].worker.name, "d");
  EXPECT_EQ(View("j").waiting_for, "");
}

TEST_F(CoordinatorTest, Assignment_PrefersTheLeastLoadedHostAndWorkers) {
  for (const char* name : {"a", "b", "c"}) ASSERT_OK(c_->Join(SmallWorker(name, 1, "h1"), now_));
  ASSERT_OK(c_->CreateJob(SmallJob("j1", 2), now_));
  ASSERT_OK(c_->CreateJob(SmallJob("j2", 2), now_));
  EXPECT_EQ(View("j1").members[0].worker.name, "a");
  EXPECT_EQ(View("j2").members[0].worker.name, "c");  // serves none
  EXPECT_EQ(View("j2").members[1].worker.name, "a");
  for (const char* name : {"x", "y"}) ASSERT_OK(c_->Join(SmallWorker(name, 1, "h2"), now_));
  ASSERT_OK(c_->CreateJob(SmallJob("j3", 2), now_));
  EXPECT_EQ(View("j3").members[0].worker.name, "x");
}

TEST_F(CoordinatorTest, Traits_AreThoseThatWorkersSaidLast) {
  const WorkerTraits device{false, true};
  ASSERT_OK(c_->Join(SmallWorker("a"), now_));
  ASSERT_OK(c_->Join(SmallWorker("b"), now_, device));
  ASSERT_OK(c_->CreateJob(SmallJob("j", 2), now_));
  EXPECT_EQ(View("j").waiting_for,
            "2 live workers on one host; host h1 has 1 on CUDA devices, host h1 has 1 on processors");
  Restart();  // nothing is known of the workers until they say it again
  EXPECT_EQ(View("j").waiting_for, "2 live workers on one host; none is there");
  ASSERT_OK(c_->Heartbeat("b", 1, {}, now_, device));
  EXPECT_EQ(View("j").waiting_for, "2 live workers on one host; host h1 has 1 on CUDA devices");
  Beat("a");
  EXPECT_EQ(View("j").state, JobState::kWaiting);
  ASSERT_OK(c_->Join(SmallWorker("c"), now_, device));
  EXPECT_EQ(View("j").members[0].worker.name, "b");
  EXPECT_EQ(View("j").members[1].worker.name, "c");
}

TEST_F(CoordinatorTest, JobThatDevicesCannotDo_WaitsForProcessors) {
  ASSERT_OK(c_->Join(SmallWorker("a"), now_, {false, true}));
  JobSpec bucketed = SmallSpec("j", 1);
  bucketed.residency = Residency::kBucket;
  ASSERT_OK(c_->CreateJob(JobDefinition::Create(bucketed).value(), now_));
  EXPECT_THAT(View("j").waiting_for, HasSubstr("1 on CUDA devices are not asked: job j has bucket residency"));
  ASSERT_OK(c_->Join(SmallWorker("b"), now_));
  EXPECT_EQ(View("j").members[0].worker.name, "b");
}

// Jobs of one feature each, where the workers that live would do on two hosts alone.
TEST_F(CoordinatorTest, JobThatSeveralHostsCannotDo_WaitsForOneHost_AndIsNeverPlacedOnBoth) {
  const WorkerTraits reached{true, false};
  for (const char* worker : {"a", "b"}) ASSERT_OK(c_->Join(SmallWorker(worker, 1, worker), now_, reached));
  std::vector<JobSpec> jobs(5, SmallSpec("", 2));
  jobs[1].residency = Residency::kBucket;
  jobs[2].slot_mode = SlotMode::kPulled;
  jobs[2].num_trainers = 2;
  jobs[3].token_weights = true;
  jobs[4].clip_norm = 1;
  for (size_t i = 0; i < jobs.size(); ++i) {
    jobs[i].name = absl::StrCat("j", i);
    const auto definition = JobDefinition::Create(jobs[i]).value();
    ASSERT_OK(c_->CreateJob(definition, now_));
    const absl::Status there = CheckSupported(jobs[i], definition->plan(), {2, 2, false});
    EXPECT_EQ(View(jobs[i].name).state, there.ok() ? JobState::kPreparing : JobState::kWaiting) << there;
    if (there.ok()) continue;
    EXPECT_EQ(View(jobs[i].name).waiting_for,
              absl::StrCat("2 live workers on one host; host a has 1, host b has 1; several hosts together are not "
                           "asked: ",
                           there.message()));
  }
  EXPECT_EQ(View("j0").state, JobState::kPreparing);
  ASSERT_OK(c_->Join(SmallWorker("c", 1, "b"), now_, reached));
  for (const JobSpec& job : jobs) EXPECT_EQ(View(job.name).state, JobState::kPreparing) << job.name;
}

}  // namespace
}  // namespace shardmesh
