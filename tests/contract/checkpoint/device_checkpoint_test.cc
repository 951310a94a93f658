// Checkpoints of jobs whose workers are on a CUDA device: the files are those of processors, and a job that is restored on
// either continues with the same bits. The device is the stand-in (worker/transport/testing/nccl_stand_in.h).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/cpp/checkpoint/checkpoint.h"
#include "core/base/matchers.h"
#include "local/testing/temp_folder.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"
#include "worker/transport/testing/load_stand_in.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;

constexpr int kSlots = 2;
constexpr int64_t kSaved = 3, kLast = 6;
constexpr absl::Duration kLong = absl::Seconds(60);

// The formats of weights and states that devices take, tied and frozen ones.
JobSpec RichJob(const std::string& name, const std::string& mesh) {
  JobSpec spec = testing::OddJob(name, mesh, kSlots);
  spec.parameters.push_back({"plus16", {37, 61}, WeightFormat::kBf16Plus16, "", StateFormat::kDyn8});
  spec.parameters.push_back({"plus8", {700}, WeightFormat::kBf16Plus8Sr, "", StateFormat::kFp8x32});
  spec.parameters.push_back({"rows", {50, 300}, WeightFormat::kInt8Row, "", StateFormat::kDyn4});
  spec.parameters.push_back({"fp8", {1025}, WeightFormat::kBf16Sr, "", StateFormat::kFp8});
  spec.parameters.push_back({"frozen", {513}, WeightFormat::kBf16});
  spec.parameters.back().frozen = true;
  return spec;
}

// Workers of one kind, and a client of theirs.
struct Place {
  std::unique_ptr<Cluster> cluster;
  std::unique_ptr<Client> client;
};

class DeviceCheckpoints : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(Start({.workers = 4}, {}, processors_));
    ClusterOptions on_device;
    on_device.workers = 4;
    on_device.worker_program = "tests/testing/device_worker";
    on_device.worker_flags = {"--device", "cuda:1"};
    ClientOptions with_stand_in;
    with_stand_in.cuda_library = kStandInPath;
    with_stand_in.device_windows = true;
    ASSERT_NO_FATAL_FAILURE(Start(on_device, with_stand_in, device_));
  }
  static void Start(const ClusterOptions& options, const ClientOptions& as, Place& place) {
    ASSERT_OK_AND_ASSIGN(place.cluster, Cluster::Start(options));
    ASSERT_OK_AND_ASSIGN(Client client, place.cluster->Connect(as));
    place.client = std::make_unique<Client>(std::move(client));
  }
  static absl::Status Train(Job& job, int64_t last) {
    ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, job.Attach({Slot(0), Slot(1)}));
    RETURN_IF_ERROR(session->AwaitWeights(kLong));
    return testing::TrainTo(*session, last);
  }
  // A job that is saved at step kSaved, and gone.
  void Save(const Place& place, const JobSpec& spec, const std::string& folder, SavedCheckpoint& saved) {
    ASSERT_OK_AND_ASSIGN(const auto job, place.client->CreateJob(spec));
    ASSERT_OK(testing::Initialize(*job));
    ASSERT_OK(Train(*job, kSaved));
    ASSERT_OK_AND_ASSIGN(saved, SaveCheckpoint(*job, folder));
    EXPECT_EQ(saved.step, kSaved);
    ASSERT_OK(testing::Delete(*place.client, spec.name));
  }
  void ExpectGoesOn(const Place& place, const std::string& folder, const std::string& mesh, const Learnt& undisturbed) {
    ASSERT_OK_AND_ASSIGN(const auto job, RestoreCheckpoint(*place.client, folder, {"again", mesh}));
    ASSERT_OK(Train(*job, kLast));
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, kLast));
    EXPECT_EQ(learnt, undisturbed);
    ASSERT_OK(testing::Delete(*place.client, "again"));
  }

  testing::TempFolder temp_;
  Place processors_, device_;
};

TEST_F(DeviceCheckpoints, AreThoseOfProcessors_AndEitherGoesOnWithThem) {
  const JobSpec spec = RichJob("job", "fsdp=2");
  const Learnt undisturbed = testing::ReferenceOf(spec, kLast);
  const std::string here = temp_.File("device"), there = temp_.File("processors");
  SavedCheckpoint of_device, of_processors;
  ASSERT_NO_FATAL_FAILURE(Save(device_, spec, here, of_device));
  ASSERT_NO_FATAL_FAILURE(Save(processors_, spec, there, of_processors));
  EXPECT_EQ(of_device.digest, of_processors.digest);
  for (const char* file : {"model.safetensors", "states.safetensors"}) {
    EXPECT_TRUE(testing::ReadFile(absl::StrCat(of_device.path, "/", file)) ==
                testing::ReadFile(absl::StrCat(of_processors.path, "/", file)))
        << file;
  }
  for (const char* mesh : {"fsdp=1", "fsdp=3", "ddp=2,fsdp=2"}) {
    SCOPED_TRACE(mesh);
    ASSERT_NO_FATAL_FAILURE(ExpectGoesOn(device_, there, mesh, undisturbed));
  }
  ASSERT_NO_FATAL_FAILURE(ExpectGoesOn(processors_, here, "fsdp=4", undisturbed));
}

// While it trains: the copy is of one step, and the steps go on.
TEST_F(DeviceCheckpoints, AreOfOneStep_WhileTheJobTrains) {
  const JobSpec spec = RichJob("job", "fsdp=4");
  ASSERT_OK_AND_ASSIGN(const auto job, device_.client->CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0), Slot(1)}));
  ASSERT_OK(session->AwaitWeights(kLong));
  std::atomic<bool> saves{true};
  absl::StatusOr<SavedCheckpoint> saved;
  std::thread saver([&] {
    saved = SaveCheckpoint(*job, temp_.File("while"));
    saves.store(false);
  });
  int64_t step = 0;
  while (saves.load()) ASSERT_OK(testing::TrainTo(*session, ++step));
  saver.join();
  ASSERT_OK(saved);
  ASSERT_OK_AND_ASSIGN(const auto restored, RestoreCheckpoint(*processors_.client, temp_.File("while"), {"again", "fsdp=1"}));
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*restored, saved->step));
  EXPECT_EQ(learnt, testing::ReferenceOf(spec, saved->step));
}

}  // namespace
}  // namespace shardmesh
