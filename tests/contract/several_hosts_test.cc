// Contract 1, over hosts: a job whose workers count as on two hosts learns, bit for bit, what it learns on one: shards
// and replicas over hosts, clipped, coded and frozen, attached and connected trainers. The hosts are names
// (--host-name), and the line between them is loopback; with real ones: tests/e2e/job_on_two_hosts_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "core/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;

constexpr int64_t kSteps = 10;

JobSpec Spec(const std::string& mesh) {
  JobSpec spec = testing::OddJob("job", mesh, 3);
  spec.clip_norm = 0.5;
  spec.parameters.push_back({"coded", {70, 300}, WeightFormat::kBf16Sr, "", {}, GatherFormat::kFp8Row});
  const StateFormat fp32 = StateFormat::kFp32;
  spec.parameters.push_back({"nf4", {310, 190}, WeightFormat::kFp32, "", fp32, GatherFormat::kNf4});  // four factors
  spec.parameters.push_back({"frozen", {5000}, WeightFormat::kBf16});
  spec.parameters.back().frozen = true;
  return spec;
}

// Slots 0 and 1 are attached, slot 2 is connected.
absl::StatusOr<Learnt> Train(Client& client, const JobSpec& spec) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  RETURN_IF_ERROR(testing::Initialize(*job));
  ASSIGN_OR_RETURN(const auto attached, job->Attach({Slot(0), Slot(1)}));
  ASSIGN_OR_RETURN(const auto connected, job->Connect({Slot(2)}));
  for (Session* session : {attached.get(), connected.get()}) RETURN_IF_ERROR(session->AwaitWeights(absl::Seconds(20)));
  absl::Status other;
  std::thread thread([&] { other = testing::TrainTo(*connected, kSteps); });
  const absl::Status mine = testing::TrainTo(*attached, kSteps);
  thread.join();
  RETURN_IF_ERROR(mine);
  RETURN_IF_ERROR(other);
  ASSIGN_OR_RETURN(Learnt learnt, testing::Learn(*job, kSteps));
  RETURN_IF_ERROR(testing::Delete(client, spec.name));
  return learnt;
}

TEST(SeveralHosts, TheSameBitsAsOnOne) {
  ASSERT_OK_AND_ASSIGN(const auto one, Cluster::Start({.workers = 4}));
  ASSERT_OK_AND_ASSIGN(const auto two, Cluster::Start({.workers = 4, .hosts = 2}));
  ASSERT_OK_AND_ASSIGN(Client on_one, one->Connect());
  ASSERT_OK_AND_ASSIGN(Client on_two, two->Connect());
  for (const char* mesh : {"fsdp=4", "ddp=4", "ddp=2,fsdp=2", "fsdp=2,ddp=2"}) {
    ASSERT_OK_AND_ASSIGN(const Learnt expected, Train(on_one, Spec(mesh)));
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, Train(on_two, Spec(mesh)));
    EXPECT_EQ(learnt, expected) << mesh;
  }
}

// Each remote shard crosses to a host once, in its gather format, however many workers the host has; a slot's gradients
// leave for the hosts that need them once.
TEST(SeveralHosts, BytesIntoAHost_AreThoseThatItLacks) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 4, .hosts = 2}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  JobSpec spec = testing::TinyJob("job", "fsdp=4", 2, 100'000);
  spec.gradient_format = Format::kBf16;
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0), Slot(1)}));
  ASSERT_OK(session->AwaitWeights(absl::Seconds(20)));
  ASSERT_OK(testing::TrainTo(*session, kSteps));
  int64_t weights = 0, gradients = 0;
  for (const int lead : {0, 2}) {
    ASSERT_OK_AND_ASSIGN(const v1::GetStatusReply status, job->worker(Rank(lead)).GetStatus(absl::Seconds(20)));
    ASSERT_EQ(status.jobs_size(), 1);
    const double model = static_cast<double>(job->plan().version_bytes());
    EXPECT_LE(static_cast<double>(status.jobs(0).host_weight_bytes_in()), 1.05 * (kSteps + 1) * model / 2);
    weights += status.jobs(0).host_weight_bytes_in();
    gradients += status.jobs(0).host_gradient_bytes_in();
  }
  EXPECT_EQ(weights, (kSteps + 1) * job->plan().version_bytes());  // half of it into each host
  // Both slots are on one host: the other's shards of both cross.
  EXPECT_EQ(gradients, kSteps * 2 * job->plan().gradient_window_bytes() / 2);
}

}  // namespace
}  // namespace shardmesh
