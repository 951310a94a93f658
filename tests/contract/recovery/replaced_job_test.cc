// A job that takes the place of another of its name does so at once, or the old one stays; who fails to make a job
// removes nobody else's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <utility>

#include "checkpoint/model_files.h"
#include "client/cpp/checkpoint/checkpoint.h"
#include "client/cpp/checkpoint/model.h"
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
using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kLong = absl::Seconds(60);

class ReplacedJob : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start({.workers = 2, .heartbeat_timeout = absl::Seconds(2)}));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(testing::OddJob("job", "fsdp=2", 2)));
    ASSERT_OK(testing::Initialize(*job_));
    ASSERT_OK(TrainTo(3));
    ASSERT_OK_AND_ASSIGN(saved_, SaveCheckpoint(*job_, temp_.File("root")));
    ASSERT_OK(TrainTo(5));
  }
  absl::Status TrainTo(int64_t step) {
    ASSIGN_OR_RETURN(const auto session, job_->Attach({Slot(0), Slot(1)}));
    RETURN_IF_ERROR(session->AwaitWeights(kLong));
    return testing::TrainTo(*session, step, kLong);
  }
  // The digest of the job that has the name now.
  absl::StatusOr<uint64_t> Digest() {
    ASSIGN_OR_RETURN(const auto job, client_->OpenJob("job"));
    ASSIGN_OR_RETURN(const v1::DigestReply digest, job->Digest(kLong));
    return digest.digest();
  }
  RestoreOptions InItsPlace(int64_t uid) const {
    RestoreOptions options;
    options.timeout = kLong;
    options.replaces_uid = uid;
    return options;
  }
  uint64_t Expected(int64_t step) const { return testing::ReferenceOf(job_->spec(), step).digest; }

  testing::TempFolder temp_;
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
  SavedCheckpoint saved_;
};

TEST_F(ReplacedJob, Restore_TakesThePlace_WhileTheCoordinatorIsAwayForAMoment) {
  cluster_->coordinator().Kill9();
  auto later = std::async(std::launch::async,
                          [&] { return RestoreCheckpoint(*client_, saved_.path, InItsPlace(job_->uid())); });
  testing::Pause(absl::Milliseconds(500));
  ASSERT_OK(cluster_->RestartCoordinator());  // by this thread: a child ends with the thread that started it
  const auto restored = later.get();
  ASSERT_OK(restored);
  EXPECT_NE((*restored)->uid(), job_->uid());
  EXPECT_GT((*restored)->epoch(), job_->epoch());
  EXPECT_EQ(Digest().value(), Expected(3));
  EXPECT_THAT(cluster_->coordinator().Log(), AllOf(HasSubstr("event=job_replaced job=job "),
                                                   ::testing::Not(HasSubstr("event=job_deleted"))))
      << "a client that ends between two calls would leave neither job";
  // Whoever still means the old one does nothing to the new one.
  EXPECT_THAT(RestoreCheckpoint(*client_, saved_.path, InItsPlace(job_->uid())),
              StatusIs(Code::kAborted, HasSubstr("somebody made another of its name")));
  EXPECT_OK(client_->DeleteJob("job", job_->uid()));  // it is gone already
  EXPECT_EQ(Digest().value(), Expected(3));
}

TEST_F(ReplacedJob, Restore_CoordinatorStaysAway_TheOldJobStays) {
  cluster_->coordinator().Kill9();
  ClientOptions brief;
  brief.call_timeout = absl::Milliseconds(200);
  brief.ready_timeout = absl::Seconds(1);
  ASSERT_OK_AND_ASSIGN(Client never_answered, cluster_->Connect(brief));
  EXPECT_THAT(RestoreCheckpoint(never_answered, saved_.path, InItsPlace(job_->uid())), StatusIs(Code::kUnavailable, HasSubstr("coordinator")));
  ASSERT_OK(cluster_->RestartCoordinator());
  EXPECT_EQ(Digest().value(), Expected(5));
}

TEST_F(ReplacedJob, Import_AnotherClientMakesTheJobMeanwhile_ItStays) {
  ASSERT_OK_AND_ASSIGN(const ModelFiles model, ModelFiles::Open(saved_.path));
  ImportOptions options;
  options.job.name = "llama";
  options.job.mesh = ParseMeshSpec("fsdp=1").value();
  options.timeout = kLong;
  ASSERT_OK_AND_ASSIGN(const ImportPlan same, PlanImport(model, options));
  for (const JobSpec& other : {testing::OddJob("llama", "fsdp=2", 2), same.spec}) {
    std::shared_ptr<Job> theirs;
    options.progress = [&](int64_t, int64_t) {
      if (theirs != nullptr) return;
      ASSERT_OK_AND_ASSIGN(theirs, client_->CreateJob(other));
    };
    EXPECT_THAT(ImportModel(*client_, saved_.path, options), StatusIs(Code::kAlreadyExists, HasSubstr("job llama")));
    ASSERT_NE(theirs, nullptr);
    ASSERT_OK_AND_ASSIGN(const auto there, client_->OpenJob("llama"));
    EXPECT_EQ(there->uid(), theirs->uid());
    EXPECT_THAT(there->Digest(kLong), StatusIs(Code::kFailedPrecondition, HasSubstr("weights"))) << "the import gave it weights";
    ASSERT_OK(client_->DeleteJob("llama", theirs->uid()));
  }
}

// Both wait for a third worker, and another client makes a job of two in the place of theirs meanwhile.
TEST_F(ReplacedJob, ImportAndRestore_AnotherClientReplacesTheJobMeanwhile_ItStays) {
  ImportOptions import;
  import.job.name = "llama";
  import.job.mesh = ParseMeshSpec("fsdp=3").value();
  import.timeout = kLong;
  const RestoreOptions restore{"llama", "fsdp=3", kLong};
  ASSERT_OK_AND_ASSIGN(const ModelFiles model, ModelFiles::Open(saved_.path));
  ASSERT_OK_AND_ASSIGN(const ImportPlan plan, PlanImport(model, import));
  for (const bool imports : {true, false}) {
    SCOPED_TRACE(imports ? "import" : "restore");
    auto ended = std::async(std::launch::async, [&] {
      return imports ? ImportModel(*client_, saved_.path, import).status()
                     : RestoreCheckpoint(*client_, saved_.path, restore).status();
    });
    v1::DescribeJobRequest request;
    request.set_job("llama");
    absl::StatusOr<v1::JobDescription> made = absl::UnknownError("not yet");
    for (const absl::Time until = MonotonicNow() + kLong; !made.ok() && MonotonicNow() < until;) {
      made = client_->coordinator().DescribeJob(request, kLong);
      testing::Pause(absl::Milliseconds(5));
    }
    ASSERT_OK(made);
    JobSpec spec = imports ? plan.spec : job_->spec();
    spec.name = "llama";
    spec.mesh = ParseMeshSpec("fsdp=2").value();
    ASSERT_OK_AND_ASSIGN(const auto theirs, client_->CreateJob(spec, {}, made->uid()));
    EXPECT_THAT(ended.get(), imports ? StatusIs(Code::kAlreadyExists, HasSubstr("job llama"))
                                     : StatusIs(Code::kAborted, HasSubstr("made another of its name")));
    ASSERT_OK_AND_ASSIGN(const auto there, client_->OpenJob("llama"));
    EXPECT_EQ(there->uid(), theirs->uid());
    EXPECT_THAT(there->Digest(kLong), StatusIs(Code::kFailedPrecondition, HasSubstr("weights"))) << "it was given some";
    ASSERT_OK(client_->DeleteJob("llama", theirs->uid()));
  }
}

TEST_F(ReplacedJob, Import_CoordinatorAwayWhileItReads_GoesOn) {
  ImportOptions options;
  options.job.name = "llama";
  options.job.mesh = ParseMeshSpec("fsdp=2").value();
  options.timeout = kLong;
  std::promise<void> killed;
  bool once = false;
  options.progress = [&](int64_t, int64_t) {
    if (std::exchange(once, true)) return;
    cluster_->coordinator().Kill9();
    killed.set_value();
  };
  auto imported = std::async(std::launch::async, [&] { return ImportModel(*client_, saved_.path, options); });
  ASSERT_EQ(killed.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
  testing::Pause(absl::Milliseconds(500));
  ASSERT_OK(cluster_->RestartCoordinator());
  EXPECT_OK(imported.get());
}

}  // namespace
}  // namespace shardmesh
