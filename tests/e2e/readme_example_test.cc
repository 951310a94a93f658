// The example of README.md: these very lines, compiled and run. readme_test.py compares the two.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "client/cpp/session.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "tests/testing/cluster.h"

namespace shardmesh {
namespace {

absl::StatusOr<Version> TrainOneStep(const std::string& address) {
  // [example]
  JobSpec spec;
  spec.name = "tiny";
  spec.mesh = ParseMeshSpec("ddp=2,fsdp=2").value();
  spec.parameters = {{"w", {64, 32}, WeightFormat::kBf16Sr}};
  ASSIGN_OR_RETURN(Client client, Client::Connect(address));  // the coordinator's, e.g. "127.0.0.1:7000"
  ASSIGN_OR_RETURN(std::shared_ptr<Job> job, client.CreateJob(spec));
  RETURN_IF_ERROR(job->Initialize({{"w", std::vector<float>(64 * 32, 0.5f)}}, absl::Seconds(10)));
  ASSIGN_OR_RETURN(std::unique_ptr<Session> session, job->Attach({Slot(0)}));  // or Connect, from another host
  RETURN_IF_ERROR(session->AwaitWeights(absl::Seconds(10)));
  ASSIGN_OR_RETURN(TensorView gradient, session->gradient(Slot(0), "_orig_mod.w"));  // the service's memory, as bf16
  std::fill_n(static_cast<uint16_t*>(gradient.data), gradient.num_elements, FloatToBf16Rne(0.25f));
  RETURN_IF_ERROR(session->Step().status());
  ASSIGN_OR_RETURN(Version version, job->Pull({VersionChoice::kAtLeast, Step(1)}, absl::Seconds(10)));
  // [/example]
  return version;
}

TEST(ReadmeExample, Trains) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, testing::Cluster::Start({.workers = 4}));
  ASSERT_OK_AND_ASSIGN(const Version version, TrainOneStep(cluster->coordinator_address()));
  EXPECT_EQ(version.step(), Step(1));
  ASSERT_OK_AND_ASSIGN(const ConstTensorView w, version.parameter("w"));
  ASSERT_EQ(w.num_elements, 64 * 32);
  // The first step of AdamW moves every element against its gradient by the learning rate, about.
  for (int64_t i = 0; i < w.num_elements; ++i) {
    const float value = Bf16ToFloat(static_cast<const uint16_t*>(w.data)[i]);
    ASSERT_NEAR(value, 0.5f - 1e-3f, 4e-3f) << i;
  }
}

}  // namespace
}  // namespace shardmesh
