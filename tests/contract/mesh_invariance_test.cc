// Contract 1: for bit-identical gradients per slot, weights and optimizer state are bit-identical on every mesh, with
// every number of workers and threads, for attached and connected trainers, and for every bucket size.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iostream>

#include "absl/strings/str_cat.h"
#include "core/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training.h"
#include "tests/testing/variant.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::Trainer;
using ::shardmesh::testing::Variant;

constexpr int kSlots = 3;
constexpr int64_t kSteps = 20;

absl::StatusOr<Learnt> Train(Client& client, const std::string& name, const Variant& variant) {
  return testing::TrainVariant(client, testing::OddJob(name, variant.mesh, kSlots), variant, kSteps);
}

const std::vector<Trainer> kOneAttached = {{{0, 1, 2}, true}};
const std::vector<Trainer> kOneConnected = {{{0, 1, 2}, false}};

// What every variant must learn: one worker, one thread, one attached trainer.
const Variant kReference = {"fsdp=1", kOneAttached};

std::vector<Variant> Variants() {
  const std::vector<Trainer> two_attached = {{{2, 0}, true}, {{1}, true}};
  const std::vector<Trainer> three_connected = {{{0}, false}, {{1}, false}, {{2}, false}};
  const std::vector<Trainer> mixed = {{{1}, true}, {{0, 2}, false}};
  return {
      kReference,
      {"fsdp=1", kOneConnected},
      {"fsdp=2", two_attached},
      {"fsdp=3", mixed},
      {"fsdp=4", kOneAttached},
      {"fsdp=4", three_connected},
      {"fsdp=4", mixed, 1024},
      {"ddp=4", two_attached},
      {"ddp=4", kOneConnected},
      {"ddp=3", mixed},
      {"ddp=2,fsdp=2", kOneAttached},
      {"ddp=2,fsdp=2", mixed},
      {"ddp=2,fsdp=2", two_attached, kDefaultBucketElements},
      {"fsdp=2,ddp=2", kOneConnected},
      {"fsdp=2,ddp=2", two_attached, 1024},
      {"fsdp=3", kOneAttached, kDefaultBucketElements},
  };
}

void ExpectAllEqual(int threads, const Learnt& reference) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 4, .threads = threads}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  int index = 0;
  for (const Variant& variant : Variants()) {
    const absl::StatusOr<Learnt> learnt = Train(client, absl::StrCat("job-", index++), variant);
    ASSERT_OK(learnt) << testing::Describe(variant);
    EXPECT_EQ(*learnt, reference) << testing::Describe(variant) << ", threads " << threads;
  }
}

absl::StatusOr<Learnt> Reference() {
  ASSIGN_OR_RETURN(const auto cluster, Cluster::Start({.workers = 1}));
  ASSIGN_OR_RETURN(Client client, cluster->Connect());
  return Train(client, "reference", kReference);
}

TEST(MeshInvariance, OneThread) {
  ASSERT_OK_AND_ASSIGN(const Learnt reference, Reference());
  std::cout << reference << "\n";
  ExpectAllEqual(1, reference);
}

TEST(MeshInvariance, TwoThreads) {
  ASSERT_OK_AND_ASSIGN(const Learnt reference, Reference());
  ExpectAllEqual(2, reference);
}

// The comparison above sees a difference of one bit in one gradient's slot assignment.
TEST(MeshInvariance, OtherGradients_AreSeen) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 1}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const Learnt reference, Train(client, "reference", kReference));
  JobSpec spec = testing::OddJob("other", "fsdp=1", kSlots);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0), Slot(1), Slot(2)}));
  ASSERT_OK(session->AwaitWeights(absl::Seconds(20)));
  ASSERT_OK(testing::TrainTo(*session, kSteps - 1));
  ASSERT_OK(testing::WriteGradients(*session, Step(kSteps)));
  ASSERT_OK_AND_ASSIGN(const TensorView bias, session->gradient(Slot(1), "layers.0.bias"));
  static_cast<uint16_t*>(bias.data)[3] ^= 1;
  StepOptions options;
  options.learning_rates = {testing::LearningRate(kSteps)};
  ASSERT_OK(session->Step(options));
  ASSERT_OK_AND_ASSIGN(const Learnt other, testing::Learn(*job, kSteps));
  EXPECT_NE(other.digest, reference.digest);
}

}  // namespace
}  // namespace shardmesh
