// The table of support (core/job/support_table.h) beside what services do: on each topology, what it says works does,
// and what it refuses is refused in its words. What a job needs by its specification has tests of its own; here is
// also what is asked of a job later. Several hosts are names (--host-name); devices are stand-ins.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/checkpoint/checkpoint.h"
#include "client/cpp/version_reader.h"
#include "core/base/matchers.h"
#include "core/job/support.h"
#include "core/mesh/mesh_spec.h"
#include "local/testing/temp_folder.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"
#include "worker/transport/testing/load_stand_in.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr int64_t kSteps = 4;
constexpr absl::Duration kLong = absl::Seconds(60);

class SupportedFeatures : public ::testing::TestWithParam<TopologyKind> {
 protected:
  SupportedFeatures() {
    const TopologyKind kind = GetParam();
    at_.hosts = kind == TopologyKind::kHostsCpu || kind == TopologyKind::kHostsCuda ? 2 : 1;
    at_.ranks = 2;
    at_.device = kind == TopologyKind::kHostCuda || kind == TopologyKind::kHostsCuda;
    options_.workers = 2;
    options_.hosts = at_.hosts;
    if (at_.device) {
      options_.worker_program = "tests/testing/device_worker";
      options_.worker_flags = {"--device", "cuda:1"};
    }
  }
  // A client that waits for a job's workers for so long.
  absl::StatusOr<Client> Connect(absl::Duration ready = kLong) const {
    ClientOptions options;
    options.ready_timeout = ready;
    if (at_.device) {
      options.cuda_library = kStandInPath;
      options.device_windows = true;
    }
    return cluster_->Connect(options);
  }
  // What was asked of `job` did what the table says. Whether it works.
  bool IsAsInTable(const JobSpec& job, Feature feature, const absl::Status& status) const {
    SCOPED_TRACE(RowOf(feature).name);
    const absl::Status table = CheckSupported(job, *Plan::Create(job), at_, feature);
    if (table.ok()) {
      EXPECT_OK(status);
    } else {
      EXPECT_THAT(status, StatusIs(Code::kUnimplemented, HasSubstr(std::string(table.message()))));
    }
    return table.ok() && status.ok();
  }

  Topology at_;
  ClusterOptions options_;
  std::unique_ptr<Cluster> cluster_;
};

absl::StatusOr<Learnt> Train(Client& client, const JobSpec& spec) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  RETURN_IF_ERROR(testing::Initialize(*job));
  ASSIGN_OR_RETURN(const auto session, job->Attach({Slot(0), Slot(1)}));
  RETURN_IF_ERROR(session->AwaitWeights(kLong));
  RETURN_IF_ERROR(testing::TrainTo(*session, kSteps));
  ASSIGN_OR_RETURN(Learnt learnt, testing::Learn(*job, kSteps));
  RETURN_IF_ERROR(testing::Delete(client, spec.name));
  return learnt;
}

std::vector<std::pair<const char*, std::function<void(JobSpec&)>>> NeededBySpecification() {
  return {{"publish_every", [](JobSpec& job) { job.publish_every = 2; }},
          {"token_weights", [](JobSpec& job) { job.token_weights = true; }},
          {"clip_norm", [](JobSpec& job) { job.clip_norm = 0.5; }},
          {"check_every", [](JobSpec& job) { job.check_every = 2; }},
          {"gathers", [](JobSpec& job) { job.parameters[0].gather = GatherFormat::kFp8Tensor; }},
          {"bucket", [](JobSpec& job) { job.residency = Residency::kBucket; }}};
}

// A job that the topology refuses waits, and is neither placed nor failed.
TEST_P(SupportedFeatures, OfASpecification_TrainToTheBitsOfOneWorker_OrWaitInTheWordsOfTheTable) {
  ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start(options_));
  ASSERT_OK_AND_ASSIGN(const auto reference, Cluster::Start({.workers = 1}));
  ASSERT_OK_AND_ASSIGN(Client there, reference->Connect());
  for (const auto& [name, need] : NeededBySpecification()) {
    SCOPED_TRACE(name);
    JobSpec spec = testing::TinyJob(name, "fsdp=2", 2, 5000);
    need(spec);
    const absl::Status table = CheckSupported(spec, *Plan::Create(spec), at_);
    ASSERT_OK_AND_ASSIGN(Client client, Connect(table.ok() ? kLong : absl::Milliseconds(300)));
    if (!table.ok()) {
      // Devices that one host's workers cannot do it on are not told of again for several hosts.
      const absl::Status one_host = CheckSupported(spec, *Plan::Create(spec), {1, at_.ranks, at_.device});
      const std::string words(at_.device && !one_host.ok() ? one_host.message() : table.message());
      // The service says so shortly before the caller gives up; a call that it could not answer in time is repeated.
      absl::Status waits;
      for (int calls = 0; calls < 20 && !absl::StrContains(waits.message(), "job "); ++calls) {
        waits = client.CreateJob(spec).status();
      }
      EXPECT_THAT(waits, StatusIs(Code::kDeadlineExceeded, HasSubstr(words)));
      EXPECT_OK(client.DeleteJob(spec.name, /*uid=*/0));
      continue;
    }
    const absl::StatusOr<Learnt> learnt = Train(client, spec);
    ASSERT_OK(learnt);
    spec.mesh = *ParseMeshSpec("fsdp=1");
    ASSERT_OK_AND_ASSIGN(const Learnt expected, Train(there, spec));
    EXPECT_EQ(*learnt, expected);
  }
}

TEST_P(SupportedFeatures, AskedLater_WorkOrAreRefusedInTheWordsOfTheTable) {
  if (!Works(Feature::kTraining, GetParam())) GTEST_SKIP() << "no job is there to be asked";
  ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start(options_));
  ASSERT_OK_AND_ASSIGN(Client client, Connect());
  const JobSpec spec = testing::TinyJob("job", "fsdp=2", 2, 5000);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0), Slot(1)}));
  ASSERT_OK(session->AwaitWeights(kLong));
  ASSERT_OK(testing::TrainTo(*session, kSteps));

  v1::AcquireLeaseRequest lease;
  lease.set_job(spec.name);
  lease.set_at_least(kSteps);
  lease.set_ttl_ms(60'000);
  lease.set_nonce(1);
  IsAsInTable(spec, Feature::kLeases, job->worker(Rank(1)).AcquireLease(lease, kLong).status());

  const auto read = [&]() -> absl::Status {
    ReaderOptions options;
    options.way = ReaderOptions::Way::kAttached;
    ASSIGN_OR_RETURN(const auto reader, VersionReader::Open(client, spec.name, options));
    ASSIGN_OR_RETURN(const HeldVersion version, reader->Take({VersionChoice::kAtLeast, Step(kSteps)}, kLong));
    ASSIGN_OR_RETURN(const ConstTensorView held, version.parameter("w"));
    ASSIGN_OR_RETURN(const Learnt learnt, testing::Learn(*job, kSteps));
    const std::string& pulled = learnt.weights.at("w");
    const bool same = absl::string_view(static_cast<const char*>(held.data), pulled.size()) == pulled;
    return same ? absl::OkStatus() : absl::DataLossError("the mapped version is not the one that is pulled");
  };
  IsAsInTable(spec, Feature::kMappedReaders, read());

  IsAsInTable(spec, Feature::kPublishOnDemand, job->worker(Rank(0)).Publish(spec.name, kLong).status());

  const testing::TempFolder folder;
  const absl::StatusOr<SavedCheckpoint> saved = SaveCheckpoint(*job, folder.path());
  if (!IsAsInTable(spec, Feature::kCheckpointSave, saved.status())) return;
  EXPECT_EQ(saved->step, kSteps);
  JobSpec again = spec;
  again.name = "again";
  const auto restored = RestoreCheckpoint(client, folder.path(), {again.name});
  if (!IsAsInTable(again, Feature::kRestore, restored.status())) return;
  ASSERT_OK_AND_ASSIGN(const Learnt before, testing::Learn(*job, kSteps));
  ASSERT_OK_AND_ASSIGN(const Learnt after, testing::Learn(**restored, kSteps));
  EXPECT_EQ(after, before);
}

INSTANTIATE_TEST_SUITE_P(Topologies, SupportedFeatures,
                         ::testing::Values(TopologyKind::kHostCpu, TopologyKind::kHostsCpu, TopologyKind::kHostCuda,
                                           TopologyKind::kHostsCuda));

}  // namespace
}  // namespace shardmesh
