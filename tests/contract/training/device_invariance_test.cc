// Workers on a CUDA device learn the bits that workers on processors do: real processes of one host share the memory of
// one device, which is the stand-in (worker/transport/testing/nccl_stand_in.h), its kernels walked on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/version_reader.h"
#include "core/base/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"
#include "tests/testing/training/variant.h"
#include "worker/transport/testing/load_stand_in.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;
using ::shardmesh::testing::Variant;
using ::testing::HasSubstr;

constexpr int64_t kSteps = 6;

ClusterOptions OnDevice(int workers) {
  ClusterOptions options;
  options.workers = workers;
  options.worker_program = "tests/testing/device_worker";
  options.worker_flags = {"--device", "cuda:1"};
  return options;
}

ClientOptions WithStandIn() {
  ClientOptions options;
  options.cuda_library = kStandInPath;
  options.device_windows = true;
  return options;
}

TEST(DeviceInvariance, OneTwoAndFourWorkersOfADevice_LearnWhatProcessorsDo) {
  ASSERT_OK_AND_ASSIGN(const auto processors, Cluster::Start({.workers = 1}));
  ASSERT_OK_AND_ASSIGN(Client there, processors->Connect());
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start(OnDevice(4)));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect(WithStandIn()));
  const Variant reference = {"fsdp=1", {{{0, 1, 2}, true}}};
  ASSERT_OK_AND_ASSIGN(const Learnt expected,
                       testing::TrainVariant(there, testing::OddJob("reference", "fsdp=1", 3), reference, kSteps));
  int index = 0;
  for (const Variant& variant :
       {reference, Variant{"fsdp=2", {{{2, 0}, true}, {{1}, true}}}, Variant{"fsdp=1", {{{0, 1, 2}, false}}},
        Variant{"fsdp=4", {{{1}, true}, {{0, 2}, false}}}, Variant{"ddp=2,fsdp=2", {{{0, 1, 2}, true}}}}) {
    JobSpec job = testing::OddJob(absl::StrCat("job-", index++), variant.mesh, 3);
    // Chunks are stepped twice, and replicas compared, which changes no bit.
    if (absl::StrContains(variant.mesh, "ddp")) job.check_every = 2;
    const absl::StatusOr<Learnt> learnt = testing::TrainVariant(client, job, variant, kSteps);
    ASSERT_OK(learnt) << testing::Describe(variant);
    EXPECT_EQ(*learnt, expected) << testing::Describe(variant);
  }
}

TEST(DeviceInvariance, AttachedTrainer_HasViewsOfTheDevice) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start(OnDevice(1)));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect(WithStandIn()));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(testing::OddJob("views", "fsdp=1", 2)));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0)}));
  ASSERT_OK_AND_ASSIGN(const TensorView gradient, session->gradient(Slot(0), "layers.0.bias"));
  ASSERT_OK_AND_ASSIGN(const ConstTensorView weights, session->parameter("layers.0.bias"));
  EXPECT_EQ(gradient.device, 1);
  EXPECT_EQ(weights.device, 1);
  EXPECT_THAT(testing::ReadFile(cluster->folder().File("w0.log")), HasSubstr("device=\"cuda:1 (stand-in)\""));
  // A trainer that did not ask for addresses of a device, or does not see it, is told so.
  for (const bool asks : {false, true}) {
    ClientOptions options;
    options.device_windows = asks;
    ASSERT_OK_AND_ASSIGN(Client blind, cluster->Connect(options));
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> same, blind.OpenJob("views"));
    const absl::Status status = same->Attach({Slot(1)}).status();
    EXPECT_THAT(std::string(status.message()), HasSubstr("the windows lie in memory of CUDA device 1 of worker w0"));
    EXPECT_EQ(status.code() == absl::StatusCode::kUnimplemented, !asks) << status;
  }
}

// Whichever worker is asked.
TEST(DeviceInvariance, VersionsOnDemand_AreThoseOfProcessors) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start(OnDevice(2)));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect(WithStandIn()));
  JobSpec spec = testing::OddJob("asked", "fsdp=2", 1);
  spec.publish_every = kPublishOnDemand;
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  ASSERT_OK(job->Initialize(testing::InitialWeights(spec), absl::Seconds(20)));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0)}));
  ASSERT_OK(session->AwaitWeights(absl::Seconds(20)));
  for (const int64_t step : {1, 2, 4}) {
    ASSERT_OK(testing::TrainTo(*session, step));
    ASSERT_OK_AND_ASSIGN(const v1::PublishReply published,
                         job->worker(Rank(static_cast<int>(step % 2))).Publish("asked", absl::Seconds(20)));
    EXPECT_EQ(published.step(), step);
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, step));
    EXPECT_EQ(learnt, testing::ReferenceOf(spec, step));
  }
}

// Readers map versions where they lie, hold them, and are told which device that is. Those that do not ask for a device
// pull.
TEST(DeviceInvariance, MappedReader_HasVersionsOfTheDevice) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start(OnDevice(2)));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect(WithStandIn()));
  JobSpec spec = testing::OddJob("read", "fsdp=2", 1);
  spec.publish_every = 1;
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0)}));
  ASSERT_OK(session->AwaitWeights(absl::Seconds(20)));
  ASSERT_OK(testing::TrainTo(*session, 1));
  ReaderOptions attached;
  attached.way = ReaderOptions::Way::kAttached;
  ASSERT_OK_AND_ASSIGN(const auto reader, VersionReader::Open(client, "read", attached));
  ASSERT_OK_AND_ASSIGN(const HeldVersion held, reader->Take({VersionChoice::kExact, Step(1)}, absl::Seconds(20)));
  const auto expect_held = [&] {
    const Learnt expected = testing::ReferenceOf(spec, 1);
    for (const ParameterSpec& parameter : spec.parameters) {
      ASSERT_OK_AND_ASSIGN(const ConstTensorView view, held.parameter(parameter.name));
      EXPECT_EQ(view.device, 1);
      const std::string bytes(static_cast<const char*>(view.data), static_cast<size_t>(view.data_bytes()));
      EXPECT_TRUE(absl::StartsWith(expected.weights.at(parameter.name), bytes)) << parameter.name;
    }
  };
  ASSERT_NO_FATAL_FAILURE(expect_held());
  ASSERT_OK(testing::TrainTo(*session, 5));
  ASSERT_NO_FATAL_FAILURE(expect_held()) << "what is held stays, whatever is published";

  ASSERT_OK_AND_ASSIGN(Client blind, cluster->Connect());
  EXPECT_THAT(VersionReader::Open(blind, "read", attached).status(),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("or pull versions, which go through the host")));
  ASSERT_OK_AND_ASSIGN(const auto pulled, VersionReader::Open(blind, "read"));
  EXPECT_FALSE(pulled->attached());
  ASSERT_OK_AND_ASSIGN(const HeldVersion copied, pulled->Take({VersionChoice::kAtLeast, Step(5)}, absl::Seconds(20)));
  ASSERT_OK_AND_ASSIGN(const ConstTensorView view, copied.parameter("layers.0.bias"));
  EXPECT_EQ(view.device, -1);
}

// Gradients that are not finite are found on the device, too.
TEST(DeviceInvariance, NonFiniteGradient_SkipsTheStep) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start(OnDevice(1)));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect(WithStandIn()));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(testing::OddJob("skips", "fsdp=1", 1)));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0)}));
  ASSERT_OK(session->AwaitWeights(absl::Seconds(20)));
  ASSERT_OK(testing::WriteGradients(*session, Step(1)));
  ASSERT_OK_AND_ASSIGN(const TensorView gradient, session->gradient(Slot(0), "layers.0.bias"));
  static_cast<uint16_t*>(gradient.data)[3] = 0x7F80;
  ASSERT_OK_AND_ASSIGN(const v1::StepReply reply, session->Step());
  EXPECT_TRUE(reply.skipped());
  EXPECT_THAT(reply.skip_reason(), HasSubstr("layers.0.bias"));
}

// A worker on processors beside one on a device: jobs that devices cannot do are its, and no job has both.
TEST(DeviceInvariance, WorkersOfBothKinds_AreNotMixed) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start(OnDevice(1)));
  const std::string address = cluster->folder().File("plain.address");
  ASSERT_OK_AND_ASSIGN(
      const auto plain,
      testing::Process::Start({{"worker/shardmesh-worker", "--coordinator", cluster->coordinator_address(), "--name",
                                "plain", "--local-dir", cluster->folder().path(), "--address-file", address},
                               cluster->folder().File("plain.log")}));
  ASSERT_OK(testing::AwaitLine(address, *plain, absl::Seconds(20)));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect(WithStandIn()));
  JobSpec buckets = testing::OddJob("buckets", "fsdp=1", 1);
  buckets.residency = Residency::kBucket;
  for (const auto& [spec, worker] :
       {std::pair(testing::OddJob("stored", "fsdp=1", 1), "w0"), std::pair(buckets, "plain")}) {
    ASSERT_OK(client.CreateJob(spec));
    v1::DescribeJobRequest request;
    request.set_job(spec.name);
    ASSERT_OK_AND_ASSIGN(const v1::JobDescription job, client.coordinator().DescribeJob(request, absl::Seconds(20)));
    EXPECT_EQ(job.members(0).worker(), worker) << spec.name;
  }
  ClientOptions hasty = WithStandIn();
  hasty.ready_timeout = absl::Milliseconds(300);
  ASSERT_OK_AND_ASSIGN(Client waits, cluster->Connect(hasty));
  EXPECT_THAT(waits.CreateJob(testing::OddJob("both", "fsdp=2", 1)).status(),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       ::testing::AllOf(HasSubstr(" has 1 on CUDA devices"), HasSubstr(" has 1 on processors"))));
}

// Without the stand-in: this machine may have no driver, and this build has no kernels.
TEST(DeviceInvariance, WorkerWhoseDeviceCannotBeUsed_DoesNotStart) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 1}));
  for (const auto& [flag, words] : {std::pair("cuda:999", "--device cuda:999 cannot be used: "),
                                    std::pair("gpu", "--device is \"gpu\"; it is cpu or cuda:N")}) {
    ASSERT_OK_AND_ASSIGN(const auto worker, testing::Process::Start({{"worker/shardmesh-worker", "--coordinator",
                                                                      cluster->coordinator_address(), "--device", flag},
                                                                     cluster->folder().File("refused.log")}));
    ASSERT_OK_AND_ASSIGN(const int exit_code, worker->Wait(absl::Seconds(20)));
    EXPECT_EQ(exit_code, 1);
    EXPECT_THAT(testing::ReadFile(cluster->folder().File("refused.log")), HasSubstr(words));
  }
}

}  // namespace
}  // namespace shardmesh
