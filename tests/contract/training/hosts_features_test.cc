// What a job may have on one host, it may have on several, with the same bits: bucket residency, token weights,
// checkpoints that it begins with, versions on demand. Compared with a reference of one process. The hosts are names,
// as in several_hosts_test.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/cpp/checkpoint/checkpoint.h"
#include "core/base/matchers.h"
#include "local/testing/temp_folder.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;

constexpr int64_t kSteps = 5;
constexpr absl::Duration kLong = absl::Seconds(60);
const char* const kMeshes[] = {"fsdp=4", "ddp=2,fsdp=2", "fsdp=2,ddp=2"};

JobSpec Spec(const std::string& mesh) {
  JobSpec spec = testing::OddJob("job", mesh, 3);
  spec.clip_norm = 0.5;
  spec.parameters.push_back({"quantized", {70, 300}, WeightFormat::kBf16Sr, "", {}, GatherFormat::kFp8Row});
  spec.parameters.push_back({"int8", {50, 96}, WeightFormat::kInt8Row, "", StateFormat::kDyn8});
  spec.parameters.push_back({"frozen", {5000}, WeightFormat::kBf16});
  spec.parameters.back().frozen = true;
  return spec;
}

// Uses a bucket of its own choice over each step, where windows have what is used.
absl::Status TrainUsing(Session& session, int64_t last, unsigned seed) {
  std::mt19937 random(seed);
  const auto buckets = static_cast<unsigned>(session.job().plan().buckets().size());
  while (session.committed_step().value() < last) {
    const int bucket = static_cast<int>(random() % buckets);
    const bool uses = session.job().spec().residency == Residency::kBucket;
    if (uses) RETURN_IF_ERROR(session.Acquire(bucket, kLong));
    RETURN_IF_ERROR(testing::TrainTo(session, session.committed_step().value() + 1));
    if (uses) RETURN_IF_ERROR(session.Release(bucket));
  }
  return absl::OkStatus();
}

// Slots 0 and 2 are attached, each by its own trainer, on one host and on the other; slot 1 is connected. All at once.
absl::Status Train(Job& job, int64_t last) {
  std::vector<std::unique_ptr<Session>> sessions;
  for (const int slot : {0, 2}) {
    ASSIGN_OR_RETURN(auto session, job.Attach({Slot(slot)}));
    sessions.push_back(std::move(session));
  }
  ASSIGN_OR_RETURN(auto connected, job.Connect({Slot(1)}));
  sessions.push_back(std::move(connected));
  std::vector<absl::Status> ends(sessions.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < sessions.size(); ++i) {
    threads.emplace_back([&, i] {
      ends[i] = sessions[i]->AwaitWeights(kLong);
      ends[i].Update(TrainUsing(*sessions[i], last, static_cast<unsigned>(17 + i)));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& end : ends) RETURN_IF_ERROR(end);
  return absl::OkStatus();
}

class HostsFeatures : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start({.workers = 4, .hosts = 2}));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
  }
  void ExpectReference(const JobSpec& spec) {
    SCOPED_TRACE(absl::StrCat(spec.mesh.ToString(), " publish_every ", spec.publish_every));
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_->CreateJob(spec));
    ASSERT_OK(testing::Initialize(*job));
    ASSERT_OK(Train(*job, kSteps));
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, kSteps));
    EXPECT_EQ(learnt, testing::ReferenceOf(spec, kSteps));
    ASSERT_OK(testing::Delete(*client_, "job"));
  }

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
};

TEST_F(HostsFeatures, BucketResidency) {
  for (const char* mesh : kMeshes) {
    for (const int publish_every : {1, 5}) {
      JobSpec spec = Spec(mesh);
      spec.residency = Residency::kBucket;
      spec.publish_every = publish_every;
      ExpectReference(spec);
    }
  }
}

// Trainers of both hosts, fewer than slots and as many, unequally fast; attached and connected.
TEST_F(HostsFeatures, PulledSlots) {
  for (const char* mesh : kMeshes) {
    for (const int trainers : {2, 4}) {
      SCOPED_TRACE(absl::StrCat(mesh, " trainers ", trainers));
      JobSpec spec = testing::OddJob("job", mesh, 5);
      spec.clip_norm = 0.5;
      spec.slot_mode = SlotMode::kPulled;
      spec.num_trainers = trainers;
      spec.token_weights = trainers == 4;
      ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_->CreateJob(spec));
      ASSERT_OK(testing::Initialize(*job));
      std::vector<absl::Status> ends(trainers);
      std::vector<std::thread> threads;
      for (int i = 0; i < trainers; ++i) {
        threads.emplace_back([&job, &end = ends[i], i] {
          auto session = i % 2 == 0 ? job->AttachPulling() : job->ConnectPulling();
          end = session.ok() ? (*session)->AwaitWeights(kLong) : session.status();
          if (end.ok()) end = testing::PullTo(**session, kSteps, kLong);
        });
      }
      for (std::thread& thread : threads) thread.join();
      for (const absl::Status& end : ends) EXPECT_OK(end);
      ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, kSteps));
      EXPECT_EQ(learnt, testing::ReferenceOf(spec, kSteps));
      ASSERT_OK(testing::Delete(*client_, "job"));
    }
  }
}

TEST_F(HostsFeatures, TokenWeights) {
  for (const char* mesh : kMeshes) {
    JobSpec spec = Spec(mesh);
    spec.token_weights = true;
    ExpectReference(spec);
  }
}

TEST_F(HostsFeatures, ACheckpoint_OnAnotherMesh_WithBucketsOrWithout) {
  const testing::TempFolder temp;
  const JobSpec spec = Spec("fsdp=4");
  ASSERT_OK_AND_ASSIGN(std::shared_ptr<Job> job, client_->CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK(Train(*job, 3));
  ASSERT_OK_AND_ASSIGN(const SavedCheckpoint saved, SaveCheckpoint(*job, temp.File("checkpoints")));
  EXPECT_EQ(saved.step, 3);
  ASSERT_OK(testing::Delete(*client_, "job"));
  Residency residency = Residency::kBucket;
  for (const char* mesh : kMeshes) {
    SCOPED_TRACE(mesh);
    RestoreOptions options{"again", mesh};
    options.residency = std::string(ResidencyName(residency));
    ASSERT_OK_AND_ASSIGN(job, RestoreCheckpoint(*client_, temp.File("checkpoints"), options));
    ASSERT_EQ(job->spec().residency, residency);
    residency = residency == Residency::kFull ? Residency::kBucket : Residency::kFull;
    ASSERT_OK_AND_ASSIGN(const v1::DigestReply digest, job->Digest(kLong));
    EXPECT_EQ(digest.step(), 3);
    EXPECT_EQ(digest.digest(), saved.digest);
    ASSERT_OK(Train(*job, kSteps));
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, kSteps));
    EXPECT_EQ(learnt, testing::ReferenceOf(spec, kSteps));
    ASSERT_OK(testing::Delete(*client_, "again"));
  }
}

// Whichever worker is asked, of whichever host, with full windows or with buckets.
TEST_F(HostsFeatures, VersionsOnDemand) {
  for (const Residency residency : {Residency::kFull, Residency::kBucket}) {
    JobSpec spec = Spec("fsdp=4");
    spec.publish_every = kPublishOnDemand;
    spec.residency = residency;
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client_->CreateJob(spec));
    ASSERT_OK(job->Initialize(testing::InitialWeights(spec), kLong));
    for (int64_t step = 1; step <= 4; ++step) {
      ASSERT_OK(Train(*job, step));
      ASSERT_OK_AND_ASSIGN(const v1::PublishReply published,
                           job->worker(Rank(static_cast<int>(step - 1))).Publish("job", kLong));
      EXPECT_EQ(published.step(), step);
      ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, step));
      EXPECT_EQ(learnt, testing::ReferenceOf(spec, step));
    }
    ASSERT_OK(testing::Delete(*client_, "job"));
  }
}

}  // namespace
}  // namespace shardmesh
