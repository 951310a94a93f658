// Contract 4: the coordinator may die at any instruction: steps go on, and its next incarnation knows every job, epoch
// and version.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <iostream>
#include <random>
#include <set>
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

absl::StatusOr<v1::JobDescription> Describe(Client& client, const std::string& job) {
  v1::DescribeJobRequest request;
  request.set_job(job);
  return client.coordinator().DescribeJob(request, absl::Seconds(5));
}

// A trainer of all slots, stepping in a thread until it is told to stop; then to a round number of steps.
class SteadyTrainer {
 public:
  explicit SteadyTrainer(std::shared_ptr<Job> job) : job_(std::move(job)) {
    thread_ = std::thread([this] { status_ = Run(); });
  }
  ~SteadyTrainer() {
    if (thread_.joinable()) (void)Finish();
  }

  int64_t step() const { return step_.load(); }
  bool AwaitStep(int64_t step) const {
    const absl::Time deadline = MonotonicNow() + absl::Seconds(20);
    while (step_.load() < step && MonotonicNow() < deadline) testing::Pause(absl::Milliseconds(2));
    return step_.load() >= step;
  }
  // The last step.
  absl::StatusOr<int64_t> Finish() {
    stop_.store(true);
    thread_.join();
    RETURN_IF_ERROR(status_);
    return step_.load();
  }

 private:
  absl::Status Run() {
    ASSIGN_OR_RETURN(const auto session, job_->Attach({Slot(0), Slot(1)}));
    RETURN_IF_ERROR(session->AwaitWeights(absl::Seconds(20)));
    while (!stop_.load()) {
      RETURN_IF_ERROR(testing::TrainTo(*session, session->committed_step().value() + 1));
      step_.store(session->committed_step().value());
      testing::Pause(absl::Milliseconds(2));
    }
    return absl::OkStatus();
  }

  const std::shared_ptr<Job> job_;
  std::atomic<int64_t> step_{0};
  std::atomic<bool> stop_{false};
  absl::Status status_;
  std::thread thread_;
};

class CoordinatorRestart : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start({.workers = 2}));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(spec_));
    ASSERT_OK(testing::Initialize(*job_));
    trainer_ = std::make_unique<SteadyTrainer>(job_);
    ASSERT_TRUE(trainer_->AwaitStep(3));
  }
  // The coordinator's view reaches `step`, with the same epoch and members.
  void ExpectCatchesUp(int64_t step) {
    const absl::Time deadline = MonotonicNow() + absl::Seconds(15);
    absl::StatusOr<v1::JobDescription> seen;
    do {
      seen = Describe(*client_, spec_.name);
      testing::Pause(absl::Milliseconds(10));
    } while (MonotonicNow() < deadline && (!seen.ok() || seen->committed_step() < step));
    ASSERT_OK(seen);
    EXPECT_GE(seen->committed_step(), step);
    EXPECT_EQ(seen->state(), v1::JOB_STATE_READY) << seen->error();
    EXPECT_EQ(seen->epoch(), job_->epoch().value());
    ASSERT_EQ(seen->members_size(), 2);
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(seen->members(rank).worker(), job_->members()[rank].worker());
      EXPECT_EQ(seen->members(rank).incarnation(), job_->members()[rank].incarnation());
    }
    EXPECT_GT(seen->published_steps_size(), 0);
  }
  // Ends the training; nothing was lost or doubled.
  void ExpectAsUndisturbed() {
    ASSERT_OK_AND_ASSIGN(const int64_t last, trainer_->Finish());
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job_, last));
    ASSERT_OK_AND_ASSIGN(const Learnt undisturbed, testing::Undisturbed(*client_, spec_, last));
    EXPECT_EQ(learnt, undisturbed);
    std::cout << last << " steps\n";
  }

  const JobSpec spec_ = testing::OddJob("job", "fsdp=2", 2);
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
  std::unique_ptr<SteadyTrainer> trainer_;
};

TEST_F(CoordinatorRestart, StepsGoOn_AndTheNextIncarnationCatchesUp) {
  cluster_->coordinator().Kill9();
  const int64_t at_death = trainer_->step();
  EXPECT_THAT(Describe(*client_, "job"), StatusIs(absl::StatusCode::kUnavailable, ::testing::HasSubstr("coordinator")));
  ASSERT_TRUE(trainer_->AwaitStep(at_death + 50)) << "steps wait for the coordinator";
  // A reader that knows the workers reads on, too.
  ASSERT_OK_AND_ASSIGN(const Version version,
                       job_->Pull({VersionChoice::kAtLeast, Step(at_death + 50)}, absl::Seconds(10)));
  EXPECT_GE(version.step().value(), at_death + 50);
  ASSERT_OK(cluster_->RestartCoordinator());
  ASSERT_OK_AND_ASSIGN(const v1::JobDescription first, Describe(*client_, "job"));
  EXPECT_EQ(first.epoch(), job_->epoch().value());
  ExpectCatchesUp(trainer_->step());
  ExpectAsUndisturbed();
}

TEST_F(CoordinatorRestart, OrderlyEnd_KeepsTheVersionsItKnew) {
  ExpectCatchesUp(5);
  ASSERT_OK_AND_ASSIGN(const v1::JobDescription before, Describe(*client_, "job"));
  cluster_->coordinator().Signal(SIGTERM);
  ASSERT_OK_AND_ASSIGN(const int status, cluster_->coordinator().Wait(absl::Seconds(20)));
  EXPECT_EQ(status, 0);
  ASSERT_OK(cluster_->RestartCoordinator());
  v1::ListVersionsRequest request;
  request.set_job("job");
  absl::StatusOr<v1::ListVersionsReply> after;
  const absl::Time until = MonotonicNow() + absl::Seconds(10);
  do {  // the first call may still meet the end of the old connection
    after = client_->coordinator().ListVersions(request, absl::Seconds(10));
  } while (absl::IsUnavailable(after.status()) && MonotonicNow() < until);
  ASSERT_OK(after);
  EXPECT_GE(after->committed_step(), before.committed_step());
  EXPECT_GT(after->published_steps_size(), 0);
  ExpectCatchesUp(trainer_->step());
  ExpectAsUndisturbed();
}

// Creates and deletes jobs beside the kills, and knows what was acknowledged.
class Churn {
 public:
  explicit Churn(Client& client) : client_(client) {
    thread_ = std::thread([this] { Run(); });
  }
  // Ends it. What must be there, and what may be (its last call got no answer).
  void Finish(std::set<std::string>& there, std::set<std::string>& unsure) {
    stop_.store(true);
    thread_.join();
    there = there_;
    unsure = unsure_;
    std::cout << created_ << " jobs created, " << deleted_ << " deleted, " << failed_ << " calls without answer\n";
    for (const absl::Status& status : unexpected_) ADD_FAILURE() << status;
  }

 private:
  // Repeats a call until it has an answer, as every client may.
  template <typename Call>
  absl::Status Repeat(Call call) {
    while (!stop_.load()) {
      const absl::Status status = call();
      if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) return status;
      ++failed_;
      testing::Pause(absl::Milliseconds(10));
    }
    return absl::CancelledError("the test ends");
  }
  absl::Status Create(const std::string& name) {
    v1::CreateJobRequest request;
    request.mutable_spec()->set_name(name);
    request.mutable_spec()->set_slots(1);
    request.mutable_spec()->mutable_optimizer()->set_epsilon(1e-8);
    request.mutable_spec()->mutable_optimizer()->set_learning_rate(1e-3);
    v1::MeshDimension* dim = request.mutable_spec()->add_mesh();
    dim->set_name("fsdp");
    dim->set_size(1);
    v1::Parameter* parameter = request.mutable_spec()->add_parameters();
    parameter->set_name("w");
    parameter->add_shape(100);
    return client_.coordinator().CreateJob(request, absl::Seconds(2)).status();
  }
  void Run() {
    for (int i = 0; !stop_.load(); ++i) {
      const std::string name = absl::StrCat("churn-", i);
      unsure_ = {name};
      if (!Note(Repeat([&] { return Create(name); }), created_)) return;
      unsure_.clear();
      there_.insert(name);
      if (there_.size() < 5) continue;
      const std::string old = *there_.begin();
      there_.erase(old);
      unsure_ = {old};
      // NOT_FOUND: a call before this one deleted it, and its answer was lost.
      absl::Status status = Repeat([&] {
        const absl::Status deleted = testing::Delete(client_, old);
        return absl::IsNotFound(deleted) ? absl::OkStatus() : deleted;
      });
      if (!Note(status, deleted_)) return;
      unsure_.clear();
    }
  }
  bool Note(const absl::Status& status, int& counter) {
    if (status.ok()) ++counter;
    if (!status.ok() && !absl::IsCancelled(status)) unexpected_.push_back(status);
    return status.ok();
  }

  Client& client_;
  std::atomic<bool> stop_{false};
  std::set<std::string> there_, unsure_;
  int created_ = 0, deleted_ = 0, failed_ = 0;
  std::vector<absl::Status> unexpected_;
  std::thread thread_;
};

TEST_F(CoordinatorRestart, KilledTenTimesAtRandom_StateStaysWhole) {
  const uint32_t seed = std::random_device()();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  Churn churn(*client_);
  for (int kill = 0; kill < 10; ++kill) {
    testing::Pause(absl::Milliseconds(random() % 250));
    cluster_->coordinator().Kill9();
    ASSERT_OK(cluster_->RestartCoordinator());
  }
  std::set<std::string> there, unsure;
  churn.Finish(there, unsure);
  // One more incarnation: what was acknowledged is in the file, not only in memory.
  cluster_->coordinator().Kill9();
  ASSERT_OK(cluster_->RestartCoordinator());
  ExpectCatchesUp(trainer_->step());
  there.insert("job");
  ASSERT_OK_AND_ASSIGN(const v1::ListJobsReply jobs, client_->coordinator().ListJobs({}, absl::Seconds(10)));
  std::set<std::string> found;
  for (const v1::JobDescription& job : jobs.jobs()) {
    found.insert(job.spec().name());
    EXPECT_NE(job.state(), v1::JOB_STATE_FAILED) << job.spec().name() << ": " << job.error();
    EXPECT_EQ(there.count(job.spec().name()) + unsure.count(job.spec().name()), 1u)
        << job.spec().name() << " was deleted";
  }
  for (const std::string& name : there) EXPECT_EQ(found.count(name), 1u) << name << " is lost";
  for (const std::string& name : found) {
    if (name == "job") continue;
    EXPECT_OK(testing::Delete(*client_, name));
  }
  ExpectAsUndisturbed();
}

}  // namespace
}  // namespace shardmesh
