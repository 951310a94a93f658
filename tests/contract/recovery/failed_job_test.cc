// Contract: a job whose worker was killed is over for trainers, by a typed error, and readers still get every version
// that was published, bit for bit, from the workers that live.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Bytes = std::map<std::string, std::string>;

constexpr absl::Duration kLong = absl::Seconds(20);

// The version of exactly this step, by parameter.
absl::StatusOr<Bytes> Pull(Job& job, int64_t step) {
  ASSIGN_OR_RETURN(const Version version, job.Pull({VersionChoice::kExact, Step(step)}, kLong));
  Bytes bytes;
  for (const ParameterSpec& parameter : job.spec().parameters) {
    ASSIGN_OR_RETURN(const ConstTensorView view, version.parameter(parameter.name));
    bytes[parameter.name] =
        std::string(static_cast<const char*>(view.data), view.num_elements * BytesPerElement(view.format));
  }
  return bytes;
}

// Every version that a worker holds, by step.
absl::StatusOr<std::map<int64_t, Bytes>> PullAll(Job& job) {
  ASSIGN_OR_RETURN(const v1::GetStatusReply status, job.worker(job.reading_rank()).GetStatus(kLong));
  if (status.jobs_size() != 1) return absl::InternalError(absl::StrCat(status.jobs_size(), " jobs"));
  std::map<int64_t, Bytes> versions;
  for (const int64_t step : status.jobs(0).published_steps()) {
    ASSIGN_OR_RETURN(versions[step], Pull(job, step));
  }
  return versions;
}

// How opening the job for training ends, once the coordinator knows that it failed.
absl::Status AwaitFailure(Client& client) {
  const absl::Time deadline = MonotonicNow() + kLong;
  absl::Status status;
  while (status.ok() && MonotonicNow() < deadline) {
    status = client.OpenJob("job").status();
    testing::Pause(absl::Milliseconds(5));
  }
  return status;
}

class FailedJob : public ::testing::TestWithParam<int> {};

TEST_P(FailedJob, WorkerKilled_TheLivingServeItsVersions) {
  // For so long the coordinator counts a killed worker as alive; what is below does not wait for it.
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 4, .heartbeat_timeout = absl::Seconds(15)}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(testing::OddJob("job", "fsdp=4", /*slots=*/1)));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0)}));
  ASSERT_OK(session->AwaitWeights(kLong));
  ASSERT_OK(testing::TrainTo(*session, 5));
  ASSERT_OK_AND_ASSIGN(const auto before, PullAll(*job));
  ASSERT_EQ(before.count(5), 1u);

  const std::string worker = job->members()[GetParam()].worker();
  cluster->worker(worker).Kill9();
  EXPECT_THAT(AwaitFailure(client), StatusIs(absl::StatusCode::kUnavailable,
                                             AllOf(HasSubstr("job job failed: "), HasSubstr("worker " + worker))));

  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> failed, client.OpenJob("job", {}, JobUse::kRead));
  EXPECT_NE(failed->reading_rank(), Rank(GetParam()));
  ASSERT_OK_AND_ASSIGN(const auto after, PullAll(*failed));
  EXPECT_TRUE(after == before);
  // There will be no next version: an error at once, not a wait.
  const absl::Time start = MonotonicNow();
  EXPECT_THAT(failed->Pull({VersionChoice::kAtLeast, Step(6)}, kLong),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("worker " + worker)));
  EXPECT_LT(MonotonicNow() - start, kLong / 2);

  for (const char* other : {"w0", "w1", "w2", "w3"}) cluster->worker(other).Kill9();
  EXPECT_THAT(client.OpenJob("job", {}, JobUse::kRead),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("none of the workers of job job answers")));
}

// The lead, and the one that is read from as long as it lives.
INSTANTIATE_TEST_SUITE_P(Rank, FailedJob, ::testing::Values(0, 3));

}  // namespace
}  // namespace shardmesh
