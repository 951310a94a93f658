// Checkpoints: what was saved goes on with the same bits on any mesh, its files are the same whatever the mesh, and
// nothing is loaded by halves.
#include "client/cpp/checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "checkpoint/adopt.h"
#include "checkpoint/folder.h"
#include "checkpoint/folder_access.h"
#include "checkpoint/stored_files.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "core/mesh/mesh_spec.h"
#include "local/testing/temp_folder.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;
using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr int kSlots = 2;
constexpr int64_t kSaved = 3, kLast = 6;
constexpr absl::Duration kLong = absl::Seconds(60);

// Every format of weights and states, matrices of Muon, frozen and tied ones.
JobSpec RichJob(const std::string& name, const std::string& mesh) {
  JobSpec spec = testing::OddJob(name, mesh, kSlots);
  spec.more_groups = {OptimizerHyper::Defaults(OptimizerKind::kMuon)};
  spec.parameters.push_back({"plus16", {37, 61}, WeightFormat::kBf16Plus16, "", StateFormat::kDyn8});
  spec.parameters.push_back({"plus8", {700}, WeightFormat::kBf16Plus8Sr, "", StateFormat::kFp8x32});
  spec.parameters.push_back({"rows", {50, 300}, WeightFormat::kInt8Row, "", StateFormat::kDyn4});
  spec.parameters.push_back({"fp8", {1025}, WeightFormat::kBf16Sr, "", StateFormat::kFp8});
  spec.parameters.push_back({"matrix", {70, 48}, WeightFormat::kBf16Sr, "", StateFormat::kDyn8});
  spec.parameters.back().group = 1;
  spec.parameters.push_back({"frozen", {513}, WeightFormat::kBf16});
  spec.parameters.back().frozen = true;
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{70, 51}, {33, 512}}) {
    spec.parameters.push_back({absl::StrCat("base.", shape[0]), shape, WeightFormat::kNf4});
    spec.parameters.back().frozen = true;
  }
  return spec;
}

absl::Status Train(Job& job, int64_t last) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, job.Attach({Slot(0), Slot(1)}));
  RETURN_IF_ERROR(session->AwaitWeights(kLong));
  return testing::TrainTo(*session, last);
}

std::string BytesOf(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

class Checkpoints : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start({.workers = 4}));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
  }
  // A job that was saved at step kSaved.
  void Save(const JobSpec& spec) {
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(spec));
    ASSERT_OK(testing::Initialize(*job_));
    ASSERT_OK(Train(*job_, kSaved));
    ASSERT_OK_AND_ASSIGN(saved_, SaveCheckpoint(*job_, root_));
    EXPECT_EQ(saved_.step, kSaved);
  }
  bool HasJob(const std::string& name) {
    v1::DescribeJobRequest request;
    request.set_job(name);
    return client_->coordinator().DescribeJob(request, kLong).ok();
  }

  testing::TempFolder temp_;
  const std::string root_ = temp_.File("checkpoints");
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  // The restored job is saved into `folder` with the files and the digest that it came from, trains on to the
  // reference's bits, and is deleted.
  void ExpectGoesOn(Job& job, const std::string& folder, const Learnt& uninterrupted) {
    ASSERT_OK_AND_ASSIGN(const SavedCheckpoint again, SaveCheckpoint(job, folder));
    EXPECT_EQ(again.digest, saved_.digest);
    for (const char* file : {"model.safetensors", "states.safetensors"}) {
      EXPECT_TRUE(BytesOf(fs::path(saved_.path) / file) == BytesOf(fs::path(again.path) / file)) << file;
    }
    ASSERT_OK(Train(job, kLast));
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(job, kLast));
    EXPECT_EQ(learnt, uninterrupted);
    ASSERT_OK(testing::Delete(*client_, job.spec().name));
  }

  std::shared_ptr<Job> job_;
  SavedCheckpoint saved_;
};

TEST_F(Checkpoints, OnEveryMesh_TheJobGoesOnWithItsBits_AndItsFilesAreTheSame) {
  const JobSpec spec = RichJob("job", "fsdp=2");
  ASSERT_NO_FATAL_FAILURE(Save(spec));
  const Learnt uninterrupted = testing::ReferenceOf(spec, kLast);
  ASSERT_OK(testing::Delete(*client_, "job"));
  for (const char* mesh : {"fsdp=1", "fsdp=2", "fsdp=3", "fsdp=4", "ddp=2,fsdp=2", "ddp=4"}) {
    SCOPED_TRACE(mesh);
    ASSERT_OK_AND_ASSIGN(const auto job, RestoreCheckpoint(*client_, root_, {"again", mesh}));
    ASSERT_OK_AND_ASSIGN(const v1::DigestReply digest, job->Digest(kLong));
    EXPECT_EQ(digest.step(), kSaved);
    EXPECT_EQ(digest.digest(), saved_.digest);
    ASSERT_NO_FATAL_FAILURE(ExpectGoesOn(*job, temp_.File(absl::StrCat("of-", mesh)), uninterrupted));
  }
}

TEST_F(Checkpoints, InAnotherGatherFormat_TheJobHasTheSameBits) {
  JobSpec spec = testing::TinyJob("job", "fsdp=2", kSlots);
  spec.parameters.push_back({"rows", {20, 96}, WeightFormat::kInt8Row});
  spec.parameters.push_back({"base", {20, 96}, WeightFormat::kNf4});  // has its own
  spec.parameters.back().frozen = true;
  ASSERT_NO_FATAL_FAILURE(Save(spec));
  const Learnt uninterrupted = testing::ReferenceOf(spec, kLast);
  RestoreOptions options{"quantized", "fsdp=3"};
  options.gather = "fp8_tensor";
  ASSERT_OK_AND_ASSIGN(const auto quantized, RestoreCheckpoint(*client_, root_, options));
  for (const ParameterSpec& p : quantized->spec().parameters) {
    EXPECT_EQ(p.gather, p.frozen ? GatherFormat::kStored : GatherFormat::kFp8Tensor) << p.name;
  }
  const std::string other = temp_.File("quantized");
  ASSERT_OK_AND_ASSIGN(const SavedCheckpoint again, SaveCheckpoint(*quantized, other));
  EXPECT_EQ(again.digest, saved_.digest);
  options = {"stored", "fsdp=1"};
  options.gather = "stored";
  ASSERT_OK_AND_ASSIGN(const auto stored, RestoreCheckpoint(*client_, other, options));
  ASSERT_OK(Train(*stored, kLast));
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*stored, kLast));
  EXPECT_EQ(learnt, uninterrupted);
  options.gather = "fp9";
  EXPECT_THAT(RestoreCheckpoint(*client_, root_, options), StatusIs(Code::kInvalidArgument, HasSubstr("fp9")));
}

// Each way, and back: files and bits do not know which residency the job had.
TEST_F(Checkpoints, WithAnotherResidency_TheJobGoesOnWithItsBits) {
  const JobSpec spec = RichJob("job", "fsdp=2");
  ASSERT_NO_FATAL_FAILURE(Save(spec));
  const Learnt uninterrupted = testing::ReferenceOf(spec, kLast);
  ASSERT_OK(testing::Delete(*client_, "job"));
  std::string folder = root_;
  for (const Residency residency : {Residency::kBucket, Residency::kFull}) {
    SCOPED_TRACE(ResidencyName(residency));
    RestoreOptions options{"again", "fsdp=3"};
    options.residency = std::string(ResidencyName(residency));
    options.bucket_elements = 2048;
    options.prefetch_buckets = 2;
    ASSERT_OK_AND_ASSIGN(const auto job, RestoreCheckpoint(*client_, folder, options));
    EXPECT_EQ(job->spec().residency, residency);
    EXPECT_EQ(job->spec().bucket_elements, 2048);
    EXPECT_EQ(job->spec().prefetch_buckets, 2);
    folder = temp_.File(absl::StrCat("with-", options.residency));
    ASSERT_NO_FATAL_FAILURE(ExpectGoesOn(*job, folder, uninterrupted));
  }
  RestoreOptions wrong{"again"};
  wrong.residency = "half";
  EXPECT_THAT(RestoreCheckpoint(*client_, root_, wrong),
              StatusIs(Code::kInvalidArgument, "\"half\" is no residency; there are full, bucket"));
  wrong = {"again"};
  wrong.bucket_elements = 5;
  EXPECT_THAT(RestoreCheckpoint(*client_, root_, wrong),
              StatusIs(Code::kInvalidArgument, HasSubstr("bucket_elements is 5; it is 1024 to")));
  wrong = {"again"};
  for (const int64_t buckets : {int64_t{-1}, int64_t{1} << 40}) {
    wrong.prefetch_buckets = buckets;
    EXPECT_THAT(
        RestoreCheckpoint(*client_, root_, wrong),
        StatusIs(Code::kInvalidArgument, absl::StrCat("prefetch_buckets is ", buckets, "; it is 1 to 1048576")));
  }
}

// Three ways: uninterrupted, resumed with the states, and with the weights alone.
TEST_F(Checkpoints, TheWeightsAlone_AreNotEnough) {
  const JobSpec spec = testing::TinyJob("job", "fsdp=2", kSlots);
  ASSERT_NO_FATAL_FAILURE(Save(spec));
  const Learnt uninterrupted = testing::ReferenceOf(spec, kLast);
  ASSERT_OK_AND_ASSIGN(const auto resumed, RestoreCheckpoint(*client_, saved_.path, {"resumed", "fsdp=3"}));
  ASSERT_OK(Train(*resumed, kLast));
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*resumed, kLast));
  EXPECT_EQ(learnt, uninterrupted);
  const std::string file = BytesOf(fs::path(saved_.path) / "model.safetensors");
  std::vector<float> weights(1000);
  ASSERT_GT(file.size(), weights.size() * sizeof(float));
  std::memcpy(weights.data(), file.data() + file.size() - weights.size() * sizeof(float),
              weights.size() * sizeof(float));
  JobSpec fresh = spec;
  fresh.name = "weights-only";
  ASSERT_OK_AND_ASSIGN(const auto job, client_->CreateJob(fresh));
  ASSERT_OK(job->Initialize({{"w", weights}}, kLong));
  ASSERT_OK(Train(*job, kLast - kSaved));
  ASSERT_OK_AND_ASSIGN(const Learnt without, testing::Learn(*job, kLast - kSaved));
  EXPECT_NE(without.weights, uninterrupted.weights);
}

TEST_F(Checkpoints, ItsFiles_Adopted_AreTheSameCheckpoint) {
  ASSERT_NO_FATAL_FAILURE(Save(RichJob("job", "fsdp=2")));
  const fs::path path = saved_.path, given = temp_.File("given");
  fs::create_directories(given / "states");
  fs::copy(path / "model.safetensors", given);
  fs::copy(path / "states.safetensors", given / "states" / "model.safetensors");
  fs::copy(path / "manifest.json", given / "job.json");
  ASSERT_OK_AND_ASSIGN(const AdoptedCheckpoint adopted, AdoptFiles(given, temp_.File("adopted")));
  EXPECT_EQ(adopted.digest, saved_.digest);
  for (const char* file : {"model.safetensors", "states.safetensors", "manifest.json"}) {
    EXPECT_TRUE(BytesOf(fs::path(adopted.path) / file) == BytesOf(path / file)) << file;
  }
}

// Of a model with a child that is called like a wrapper, on fewer workers, with buffers.
TEST_F(Checkpoints, NamesAndBuffers_AreAsTheyWere_OnWhateverMesh) {
  JobSpec spec = testing::TinyJob("job", "fsdp=2", kSlots);
  spec.parameters[0].name = "a._orig_mod.w";
  const NameRules rules = RulesOfCanonical({"a._orig_mod.w"});
  ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(spec, rules));
  ASSERT_OK(job_->Initialize({{"a._orig_mod.w", std::vector<float>(1000, 0.5f)}}, kLong));
  SaveOptions options;
  options.buffers = {{*MakeSafetensorsEntry("a.mean", "F32", {2}), "8 bytes!"}};
  std::vector<std::string> models;
  for (const char* mesh : {"fsdp=3", "fsdp=1"}) {
    ASSERT_OK_AND_ASSIGN(saved_, SaveCheckpoint(*job_, root_ + mesh, options));
    models.push_back(BytesOf(fs::path(saved_.path) / "model.safetensors"));
    ASSERT_OK_AND_ASSIGN(job_, RestoreCheckpoint(*client_, saved_.path, {absl::StrCat("job-", models.size()), mesh}));
    EXPECT_EQ(job_->spec().parameters[0].name, "a._orig_mod.w");
    EXPECT_EQ(job_->Digest(kLong)->digest(), saved_.digest);
    ASSERT_OK_AND_ASSIGN(const SavedCheckpoint again, SaveCheckpoint(*job_, root_ + mesh, options));
    EXPECT_TRUE(again.already_there);
  }
  EXPECT_TRUE(models[0] == models[1]);
  ASSERT_OK_AND_ASSIGN(const OpenedCheckpoint opened, OpenCheckpoint(saved_.path));
  ASSERT_OK_AND_ASSIGN(const std::vector<BufferValue> buffers, ReadBuffers(opened));
  ASSERT_EQ(buffers.size(), 1);
  EXPECT_EQ(buffers[0].bytes, "8 bytes!");
  RestoreOptions fit{"fit"};
  fit.fit_mesh = true;
  ASSERT_OK_AND_ASSIGN(const auto fitting, RestoreCheckpoint(*client_, saved_.path, fit));
  EXPECT_EQ(fitting->Digest(kLong)->digest(), saved_.digest);
}

TEST_F(Checkpoints, WhileTheJobTrains_AStepIsSaved_AsItWas) {
  const JobSpec spec = RichJob("job", "ddp=2,fsdp=2");
  ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job_));
  ASSERT_OK_AND_ASSIGN(const auto session, job_->Attach({Slot(0), Slot(1)}));
  ASSERT_OK(session->AwaitWeights(kLong));
  std::atomic<bool> stop{false};
  absl::Status trained;
  std::thread trainer([&] {
    for (int64_t step = 1; trained.ok() && !stop.load(); ++step) trained = testing::TrainTo(*session, step);
  });
  std::vector<SavedCheckpoint> saved;
  absl::Status status;
  while (status.ok() && saved.size() < 4) {
    const auto one = SaveCheckpoint(*job_, root_);
    if (one.ok() && !one->already_there) saved.push_back(*one);  // else no step was committed since
    status = one.status();
  }
  stop.store(true);
  trainer.join();
  ASSERT_OK(status);
  ASSERT_OK(trained);
  for (const SavedCheckpoint& one : saved) {
    EXPECT_EQ(one.digest, testing::ReferenceOf(spec, one.step).digest) << one.step;
    ASSERT_OK_AND_ASSIGN(const auto job, RestoreCheckpoint(*client_, one.path, {"again", "fsdp=3"}));
    EXPECT_OK(testing::Delete(*client_, "again"));
  }
}

TEST_F(Checkpoints, DamagedFiles_AreRefused_AndNothingIsLeft) {
  ASSERT_NO_FATAL_FAILURE(Save(RichJob("job", "fsdp=2")));
  const auto refused = [&](Code code, const char* words) {
    EXPECT_THAT(RestoreCheckpoint(*client_, root_, {"again", "fsdp=3"}), StatusIs(code, HasSubstr(words)));
    EXPECT_FALSE(HasJob("again"));
  };
  for (const char* name : {"model.safetensors", "states.safetensors"}) {
    const fs::path file = fs::path(saved_.path) / name;
    const std::string good = BytesOf(file);
    std::string bad = good;
    bad[bad.size() / 2] ^= 16;
    std::ofstream(file, std::ios::binary) << bad;
    refused(Code::kDataLoss, "a file changed since");
    bad = good;
    bad[20] ^= 1;  // of the header
    std::ofstream(file, std::ios::binary) << bad;
    refused(Code::kFailedPrecondition, "does not begin as this job's file");
    std::ofstream(file, std::ios::binary) << good.substr(1);
    refused(Code::kDataLoss, "it was saved with");
    fs::remove(file);
    refused(Code::kDataLoss, "is missing");
    std::ofstream(file, std::ios::binary) << good;
  }
  ASSERT_OK_AND_ASSIGN(const auto job, RestoreCheckpoint(*client_, root_, {"again", "fsdp=3"}));
  EXPECT_EQ(job->Digest(kLong)->digest(), saved_.digest);
}

// A job that is there before it is restored stays when that fails, without weights: whatever was read into its place.
class RestoredIntoAJob : public Checkpoints {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(Checkpoints::SetUp());
    spec_ = RichJob("job", "fsdp=2");
    ASSERT_NO_FATAL_FAILURE(Save(spec_));
    spec_.name = "again";
    spec_.mesh = ParseMeshSpec("ddp=2,fsdp=2").value();
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(spec_));
  }
  absl::Status Restore() { return RestoreCheckpoint(*client_, root_, {"again", "ddp=2,fsdp=2", kLong}).status(); }
  // Every byte behind the head is another one: the last piece that is read, too.
  void RestoreDamaged() {
    const fs::path file = fs::path(saved_.path) / "states.safetensors";
    const std::string good = BytesOf(file);
    ASSERT_OK_AND_ASSIGN(const StoredFiles files, StoredFiles::Create(spec_));
    std::string bad = good;
    for (size_t i = files.files()[1].head.size(); i < bad.size(); ++i) bad[i] = static_cast<char>(~bad[i]);
    std::ofstream(file, std::ios::binary) << bad;
    EXPECT_THAT(Restore(), StatusIs(Code::kDataLoss, HasSubstr("a file changed since")));
    std::ofstream(file, std::ios::binary) << good;
    EXPECT_TRUE(HasJob("again"));
    EXPECT_THAT(job_->Digest(kLong), StatusIs(Code::kFailedPrecondition, HasSubstr("no initial weights")));
  }
  void ExpectGoesOnFrom(int64_t step) {
    ASSERT_OK_AND_ASSIGN(const v1::DigestReply digest, job_->Digest(kLong));
    EXPECT_EQ(digest.step(), step);
    EXPECT_EQ(digest.digest(), testing::ReferenceOf(spec_, step).digest);
    ASSERT_OK(Train(*job_, kLast));
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job_, kLast));
    EXPECT_EQ(learnt, testing::ReferenceOf(spec_, kLast));
  }

  JobSpec spec_;
};

TEST_F(RestoredIntoAJob, AfterADamagedOne_InitialWeightsAreThoseOfAFreshJob) {
  ASSERT_NO_FATAL_FAILURE(RestoreDamaged());
  ASSERT_OK(testing::Initialize(*job_));
  ExpectGoesOnFrom(0);
}

TEST_F(RestoredIntoAJob, AfterADamagedOne_AnotherOneIsRight) {
  ASSERT_NO_FATAL_FAILURE(RestoreDamaged());
  ASSERT_OK(Restore());
  ExpectGoesOnFrom(kSaved);
}

TEST_F(RestoredIntoAJob, ByTwoAtOnce_ItBeginsOnce) {
  absl::Status other;
  std::thread another([&] { other = Restore(); });
  const absl::Status one = Restore();
  another.join();
  EXPECT_TRUE(one.ok() || other.ok()) << one << other;
  for (const absl::Status& status : {one, other}) {
    if (!status.ok()) {
      EXPECT_THAT(status.code(), AnyOf(Code::kFailedPrecondition, Code::kAborted)) << status;
    }
  }
  ExpectGoesOnFrom(kSaved);
}

// Both end soon, and the job has what one of them gave it.
TEST_F(RestoredIntoAJob, WhileSomebodyInitializes_ItHasOneOrTheOther) {
  for (int round = 0; round < 4; ++round) {
    absl::Status initialized;
    RestoreOptions options{"again", "ddp=2,fsdp=2", kLong};
    std::thread another;
    options.progress = [&](int64_t, int64_t) {
      if (!another.joinable()) another = std::thread([&] { initialized = testing::Initialize(*job_); });
    };
    const absl::Status restored = RestoreCheckpoint(*client_, root_, options).status();
    another.join();
    EXPECT_TRUE(restored.ok() || initialized.ok()) << restored << initialized;
    ASSERT_OK_AND_ASSIGN(const v1::DigestReply digest, job_->Digest(kLong));
    EXPECT_EQ(digest.digest(), testing::ReferenceOf(spec_, digest.step()).digest);
    EXPECT_EQ(digest.step(), restored.ok() ? kSaved : 0);
    ASSERT_OK(testing::Delete(*client_, "again"));
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(spec_));
  }
}

TEST_F(Checkpoints, JobsThatCannot_AreLeftAsTheyAre) {
  ASSERT_OK_AND_ASSIGN(const auto empty, client_->CreateJob(testing::TinyJob("empty", "fsdp=2", kSlots)));
  EXPECT_THAT(SaveCheckpoint(*empty, root_), StatusIs(Code::kFailedPrecondition, HasSubstr("no initial weights")));
  EXPECT_TRUE(fs::is_empty(root_));
  ASSERT_NO_FATAL_FAILURE(Save(testing::TinyJob("job", "fsdp=2", kSlots)));
  ASSERT_OK_AND_ASSIGN(const SavedCheckpoint again, SaveCheckpoint(*job_, root_));
  EXPECT_TRUE(again.already_there);
  EXPECT_EQ(again.path, saved_.path);
  // The job itself: it has weights, and keeps them.
  EXPECT_THAT(RestoreCheckpoint(*client_, root_),
              StatusIs(Code::kFailedPrecondition, HasSubstr("has weights already")));
  EXPECT_THAT(RestoreCheckpoint(*client_, root_, {"job", "fsdp=3"}), StatusIs(Code::kAlreadyExists, HasSubstr("mesh")));
  EXPECT_THAT(RestoreCheckpoint(*client_, root_, {"again", "nonsense"}),
              StatusIs(Code::kInvalidArgument, HasSubstr("nonsense")));
  EXPECT_THAT(RestoreCheckpoint(*client_, temp_.path()), StatusIs(Code::kNotFound, HasSubstr("no checkpoint")));
  ASSERT_OK(Train(*job_, kLast));
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job_, kLast));
  EXPECT_EQ(learnt, testing::ReferenceOf(job_->spec(), kLast));
}

// A worker touches no file but one that was made for this.
TEST_F(Checkpoints, FilesThatAreNotTheJobs_AreNotTouched) {
  ASSERT_NO_FATAL_FAILURE(Save(testing::TinyJob("job", "fsdp=2", kSlots)));
  const std::string folder = temp_.File(".step-other"), secret(kSecretBytes, 'a');
  fs::create_directories(folder);
  std::ofstream(folder + "/" + kSecretFile) << secret;
  const std::string text(fs::file_size(fs::path(saved_.path) / "model.safetensors"), 'x');
  std::ofstream(folder + "/model.safetensors") << text;
  v1::SaveRequest request;
  request.set_job("job");
  request.set_epoch(job_->epoch().value());
  request.set_folder(folder);
  request.set_secret(secret);
  const auto save = [&] {
    return job_->worker(Rank(0)).Save(
        request, [](const v1::FileProgress&) { return absl::OkStatus(); }, kLong);
  };
  EXPECT_THAT(save(), StatusIs(Code::kFailedPrecondition, HasSubstr("does not begin as this job's file")));
  EXPECT_EQ(BytesOf(folder + "/model.safetensors"), text);
  fs::remove(folder + "/model.safetensors");
  fs::create_symlink(fs::path(saved_.path) / "model.safetensors", folder + "/model.safetensors");
  EXPECT_THAT(save(), StatusIs(Code::kFailedPrecondition,
                               HasSubstr(folder + "/model.safetensors: Too many levels of symbolic links")));
  fs::remove(folder + "/model.safetensors");
  fs::create_hard_link(fs::path(saved_.path) / "model.safetensors", folder + "/model.safetensors");
  EXPECT_THAT(save(), StatusIs(Code::kFailedPrecondition, HasSubstr("has 2 names")));
  request.set_folder("relative");
  EXPECT_THAT(save(), StatusIs(Code::kInvalidArgument, HasSubstr("absolute path")));
  v1::UseLoadedRequest use;
  use.set_job("job");
  use.set_epoch(job_->epoch().value());
  use.set_load_id(77);
  EXPECT_THAT(job_->worker(Rank(0)).UseLoaded(use, kLong),
              StatusIs(Code::kFailedPrecondition, HasSubstr("weights already")));
}

// A committed checkpoint is nobody's to write, and what lies at a path is told to nobody who cannot read it himself.
TEST_F(Checkpoints, FoldersThatTheCallerCannotProveToReach_AreNeitherWrittenNorDescribed) {
  ASSERT_NO_FATAL_FAILURE(Save(testing::TinyJob("job", "fsdp=2", kSlots)));
  const std::string weights = BytesOf(saved_.path + "/model.safetensors");
  ASSERT_OK(Train(*job_, kSaved + 1));
  const auto told = [](const v1::FileProgress&) { return absl::OkStatus(); };
  const std::string secret(kSecretBytes, 'a');
  const auto save = [&](const std::string& folder) {
    v1::SaveRequest request;
    request.set_job("job");
    request.set_epoch(job_->epoch().value());
    request.set_folder(folder);
    request.set_secret(secret);
    return job_->worker(Rank(0)).Save(request, told, kLong).status();
  };
  std::ofstream(saved_.path + "/" + kSecretFile) << secret;  // even so: it has a manifest
  EXPECT_THAT(save(saved_.path), StatusIs(Code::kPermissionDenied, HasSubstr("has not proved")));
  EXPECT_THAT(save(temp_.path() + "/x/.." + saved_.path.substr(temp_.path().size())),
              StatusIs(Code::kInvalidArgument, HasSubstr("\"..\"")));
  EXPECT_EQ(BytesOf(saved_.path + "/model.safetensors"), weights);
  // One answer, whatever is there.
  const std::string folder = temp_.File(".step-1");
  const auto answer = [&] { return std::string(save(folder).message()); };
  const std::string none = answer();
  fs::create_directories(folder);
  EXPECT_EQ(answer(), none);
  std::ofstream(folder + "/model.safetensors") << "x";
  EXPECT_EQ(answer(), none);
  std::ofstream(folder + "/" + kSecretFile) << std::string(kSecretBytes, 'b');
  EXPECT_EQ(answer(), none);

  ASSERT_OK_AND_ASSIGN(const auto empty, client_->CreateJob(testing::TinyJob("empty", "fsdp=2", kSlots)));
  const auto load = [&](uint64_t digest, int64_t step = kSaved) {
    v1::LoadRequest request;
    request.set_job("empty");
    request.set_epoch(empty->epoch().value());
    request.set_folder(folder);
    request.set_step(step);
    request.set_load_id(7);
    request.set_digest(digest);
    return empty->worker(Rank(0)).Load(request, told, kLong).status();
  };
  const absl::Status unknown = load(saved_.digest);
  EXPECT_THAT(unknown, StatusIs(Code::kPermissionDenied, HasSubstr("has not proved")));
  fs::copy_file(saved_.path + "/model.safetensors", folder + "/model.safetensors",
                fs::copy_options::overwrite_existing);
  EXPECT_EQ(load(saved_.digest), unknown);
  fs::copy_file(saved_.path + "/manifest.json", folder + "/manifest.json");
  EXPECT_EQ(load(saved_.digest + 1), unknown);
  EXPECT_EQ(load(saved_.digest, kSaved + 1), unknown);
  EXPECT_THAT(load(saved_.digest), StatusIs(Code::kFailedPrecondition, HasSubstr("cannot open")));
  std::ofstream(folder + "/" + kSecretFile) << secret;  // the right one, but the folder has a manifest
  EXPECT_EQ(answer(), none);
}

TEST_F(Checkpoints, BelowTheRootsOfTheWorkers_AndNowhereElse) {
  const std::string inside = temp_.File("inside"), outside = temp_.File("outside");
  for (const std::string& folder : {inside, outside}) fs::create_directories(folder);
  ASSERT_OK_AND_ASSIGN(const auto cluster,
                       Cluster::Start({.workers = 2, .worker_flags = {"--checkpoint-root", inside}}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const auto job, client.CreateJob(testing::TinyJob("job", "fsdp=2", kSlots)));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK(Train(*job, kSaved));
  const auto elsewhere = StatusIs(Code::kPermissionDenied, HasSubstr("below no --checkpoint-root"));
  EXPECT_THAT(SaveCheckpoint(*job, outside), elsewhere);
  EXPECT_TRUE(fs::is_empty(outside));
  ASSERT_OK_AND_ASSIGN(const SavedCheckpoint saved, SaveCheckpoint(*job, inside + "/llama"));
  fs::copy(inside, outside, fs::copy_options::recursive);
  EXPECT_THAT(RestoreCheckpoint(client, outside + "/llama", {"again", "fsdp=1"}), elsewhere);
  ASSERT_OK_AND_ASSIGN(const auto again, RestoreCheckpoint(client, inside + "/llama", {"again", "fsdp=1"}));
  EXPECT_EQ(again->Digest(kLong)->digest(), saved.digest);
}

// The worker dies while its shard is being copied: who saves learns of it by name, and the older checkpoint stays.
TEST_F(Checkpoints, AWorkerThatDies_IsNamed_AndLeavesTheOldCheckpoint) {
  const JobSpec spec = testing::TinyJob("job", "fsdp=2", kSlots, 1 << 20);
  ASSERT_NO_FATAL_FAILURE(Save(spec));
  ASSERT_OK(Train(*job_, kSaved + 1));
  const std::string victim = job_->members()[1].worker();
  std::atomic<bool> killed{false};
  SaveOptions options;
  options.progress = [&](int64_t, int64_t) {
    if (!killed.exchange(true)) cluster_->worker(victim).Kill9();
  };
  EXPECT_THAT(SaveCheckpoint(*job_, root_, options), StatusIs(Code::kUnavailable, HasSubstr(victim)));
  ASSERT_TRUE(killed.load());
  ASSERT_OK_AND_ASSIGN(const OpenedCheckpoint newest, OpenCheckpoint(root_));
  EXPECT_EQ(newest.manifest.step, kSaved);
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), {}), 1);
  ASSERT_OK(testing::Delete(*client_, "job"));
  ASSERT_OK_AND_ASSIGN(const auto job, RestoreCheckpoint(*client_, root_));
  ASSERT_OK(Train(*job, kLast));
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(*job, kLast));
  EXPECT_EQ(learnt, testing::ReferenceOf(spec, kLast));
}

TEST_F(Checkpoints, AWorkerThatDiesWhileItLoads_LeavesNoJob) {
  ASSERT_NO_FATAL_FAILURE(Save(testing::TinyJob("job", "fsdp=4", kSlots, 1 << 20)));
  std::atomic<bool> killed{false};
  RestoreOptions options{"again", "fsdp=4"};
  options.progress = [&](int64_t, int64_t) {
    if (!killed.exchange(true)) cluster_->worker("w2").Kill9();
  };
  EXPECT_THAT(RestoreCheckpoint(*client_, root_, options), StatusIs(Code::kUnavailable, HasSubstr("w2")));
  EXPECT_FALSE(HasJob("again"));
  options = {"again", "fsdp=3"};
  ASSERT_OK_AND_ASSIGN(const auto job, RestoreCheckpoint(*client_, root_, options));
  EXPECT_EQ(job->Digest(kLong)->digest(), saved_.digest);
}

}  // namespace
}  // namespace shardmesh
