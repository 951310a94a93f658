// The support table (core/job/support_table.h) held against jobs: for each pair of features that a topology of CPUs has
// in the table, a small job with both trains, and learns what a reference of one process does.
//
// What the table refuses on CPUs is listed here, too: a feature that works and is refused by mistake is in no row.
//
// Rows are sets of features that may be together; greedily chosen, so that all pairs are in few rows. A run takes a
// sample of them, drawn with a seed that it prints; SHARDMESH_MATRIX_SEED repeats it, and SHARDMESH_MATRIX=all runs all
// rows of all pairs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <iostream>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/checkpoint/checkpoint.h"
#include "client/cpp/checkpoint/reshard.h"
#include "client/cpp/version_reader.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "core/job/support.h"
#include "local/testing/temp_folder.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::Learnt;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int64_t kHalf = 3, kLast = 6;
constexpr size_t kMostFeatures = 7;  // of a row, so that one that fails says something
constexpr size_t kSampledRows = 5;   // of a topology
constexpr absl::Duration kLong = absl::Seconds(60);

using Row = std::vector<Feature>;

bool Has(const Row& row, Feature feature) { return std::find(row.begin(), row.end(), feature) != row.end(); }

// Whether one run can show both: a worker that comes back is not one that the job goes on without.
bool ShownTogether(Feature a, Feature b) {
  const auto are = [&](Feature one, Feature other) { return (a == one && b == other) || (a == other && b == one); };
  return !are(Feature::kPublishEvery, Feature::kPublishOnDemand) && !are(Feature::kRestart, Feature::kReform);
}

bool Fits(const Row& row, Feature feature, TopologyKind kind) {
  if (!Works(feature, kind) || Has(row, feature)) return false;
  return std::all_of(row.begin(), row.end(), [&](Feature other) {
    return ShownTogether(feature, other) && CheckTogether("job", feature, other).ok() &&
           CheckTogether("job", other, feature).ok();
  });
}

// Rows of which every pair of features that the topology has is in one.
std::vector<Row> RowsOf(TopologyKind kind, std::mt19937_64& random, size_t& pairs) {
  std::vector<std::pair<Feature, Feature>> open;
  for (int a = 0; a < kNumFeatures; ++a) {
    for (int b = a + 1; b < kNumFeatures; ++b) {
      const auto one = static_cast<Feature>(a), other = static_cast<Feature>(b);
      if (Works(one, kind) && Fits({one}, other, kind)) open.emplace_back(one, other);
    }
  }
  pairs = open.size();
  std::vector<Row> rows;
  while (!open.empty()) {
    std::shuffle(open.begin(), open.end(), random);
    Row row = {open[0].first, open[0].second};
    for (const auto& [a, b] : open) {  // as many of the open ones as there is room for
      Row more = row;
      for (const Feature feature : {a, b}) {
        if (!Has(more, feature) && Fits(more, feature, kind)) more.push_back(feature);
      }
      if (Has(more, a) && Has(more, b) && more.size() <= kMostFeatures) row = more;
    }
    open.erase(std::remove_if(open.begin(), open.end(),
                              [&](const auto& pair) { return Has(row, pair.first) && Has(row, pair.second); }),
               open.end());
    rows.push_back(std::move(row));
  }
  return rows;
}

std::string Describe(const Row& row) {
  return absl::StrJoin(row, " + ", [](std::string* out, Feature feature) {
    absl::StrAppend(out, std::string(RowOf(feature).name));
  });
}

JobSpec SpecOf(const Row& row) {
  JobSpec spec = testing::OddJob("job", "ddp=2,fsdp=2", 3);
  spec.publish_every = Has(row, Feature::kPublishOnDemand) ? kPublishOnDemand : Has(row, Feature::kPublishEvery) ? 2 : 1;
  spec.clip_norm = Has(row, Feature::kClipNorm) ? 0.5 : 0;
  spec.token_weights = Has(row, Feature::kTokenWeights);
  spec.check_every = Has(row, Feature::kCheckEvery) ? 2 : 0;
  spec.parameters.push_back({"base", {60, 40}, WeightFormat::kNf4});
  spec.parameters.back().frozen = true;
  if (!Has(row, Feature::kMuon)) spec.parameters.push_back({"codes", {60, 40}, WeightFormat::kInt8Row});
  if (Has(row, Feature::kMuon)) {
    spec.more_groups = {OptimizerHyper::Defaults(OptimizerKind::kMuon)};
    spec.parameters.push_back({"matrix", {60, 44}, WeightFormat::kBf16Sr});
    spec.parameters.back().group = 1;
  }
  if (Has(row, Feature::kQuantizedGathers)) {
    spec.parameters.push_back({"rows", {70, 96}, WeightFormat::kBf16Sr, "", StateFormat::kDyn8, GatherFormat::kFp8Row});
    spec.parameters.push_back({"nf4", {70, 90}, WeightFormat::kFp32, "", {}, GatherFormat::kNf4});
  }
  if (Has(row, Feature::kBucketResidency)) spec.residency = Residency::kBucket;
  if (Has(row, Feature::kPulledSlots)) {
    spec.slot_mode = SlotMode::kPulled;
    spec.num_trainers = 2;
  }
  return spec;
}

absl::Status TrainAssigned(Job& job, bool connects, int64_t last) {
  std::vector<std::unique_ptr<Session>> sessions;
  for (const int slot : {0, 1, 2}) {
    ASSIGN_OR_RETURN(auto session, connects && slot == 1 ? job.Connect({Slot(slot)}) : job.Attach({Slot(slot)}));
    sessions.push_back(std::move(session));
  }
  std::vector<absl::Status> ends(sessions.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < sessions.size(); ++i) {
    threads.emplace_back([&, i] {
      ends[i] = sessions[i]->AwaitWeights(kLong);
      ends[i].Update(testing::TrainTo(*sessions[i], last, kLong));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& end : ends) RETURN_IF_ERROR(end);
  return absl::OkStatus();
}

absl::Status TrainPulled(Job& job, bool connects, int64_t last) {
  std::vector<absl::Status> ends(2);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ends.size(); ++i) {
    threads.emplace_back([&job, &end = ends[i], connects = connects && i == 1, last] {
      auto session = connects ? job.ConnectPulling() : job.AttachPulling();
      end = session.ok() ? (*session)->AwaitWeights(kLong) : session.status();
      if (end.ok()) end = testing::PullTo(**session, last, kLong);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& end : ends) RETURN_IF_ERROR(end);
  return absl::OkStatus();
}

// One row on one topology, with a cluster of its own.
class Run {
 public:
  Run(const Row& row, TopologyKind kind) : row_(row), spec_(SpecOf(row)), several_(kind == TopologyKind::kHostsCpu) {}

  absl::Status Start() {
    testing::ClusterOptions options;
    options.workers = 4;
    options.hosts = several_ ? 2 : 1;
    options.retained = Has(row_, Feature::kRestart);
    ASSIGN_OR_RETURN(cluster_, Cluster::Start(options));
    ASSIGN_OR_RETURN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
    ASSIGN_OR_RETURN(job_, client_->CreateJob(spec_));
    return job_->Initialize(testing::InitialWeights(spec_), kLong);
  }

  absl::Status TrainTo(int64_t last) {
    const auto train = [&](Job& job) {
      const bool connects = Has(row_, Feature::kConnectedTrainers);
      return spec_.pulled() ? TrainPulled(job, connects, last) : TrainAssigned(job, connects, last);
    };
    const bool moves = Has(row_, Feature::kReform) || Has(row_, Feature::kReshard);
    RETURN_IF_ERROR(moves ? testing::TrainOver(*client_, job_, train) : train(*job_));
    if (moves) {
      ASSIGN_OR_RETURN(job_, client_->OpenJob("job"));
    }
    return absl::OkStatus();
  }

  // What the job has learnt by now, pulled from whichever worker.
  absl::StatusOr<Learnt> Learn(int64_t step) {
    if (Has(row_, Feature::kPublishOnDemand)) {
      ASSIGN_OR_RETURN(const v1::PublishReply published, job_->worker(Rank(1)).Publish("job", kLong));
      if (published.step() != step) return absl::InternalError(absl::StrCat("published step ", published.step()));
    }
    return testing::Learn(*job_, step);
  }

  // Everything that the features do with a job that has trained for a while.
  absl::Status UseFeatures() {
    if (Has(row_, Feature::kPublishOnDemand)) RETURN_IF_ERROR(Learn(kHalf).status());
    if (Has(row_, Feature::kLeases)) RETURN_IF_ERROR(Lease());
    if (Has(row_, Feature::kMappedReaders)) RETURN_IF_ERROR(MapVersion(kHalf - 1));
    if (Has(row_, Feature::kCheckpointSave) || Has(row_, Feature::kRestore)) RETURN_IF_ERROR(Save());
    if (Has(row_, Feature::kRestart)) {
      const std::string worker = cluster_->RetainedName(several_ ? 2 : 1);  // of two hosts: the lead of the second
      const pid_t pid = cluster_->PidOf(worker);
      if (pid <= 0 || kill(pid, SIGKILL) != 0) return absl::InternalError(absl::StrCat(worker, " is not there"));
      if (cluster_->AwaitNextIncarnation(worker, pid, kLong) == 0) {
        return absl::InternalError(absl::StrCat(worker, " did not come back"));
      }
    }
    if (Has(row_, Feature::kReform)) cluster_->worker("w3").Kill9();
    return Has(row_, Feature::kReshard) ? Reshard() : absl::OkStatus();
  }

  // By the end: a reader that mapped a version has followed the job to its last one.
  absl::Status Follow() { return Has(row_, Feature::kMappedReaders) ? MapVersion(kLast) : absl::OkStatus(); }

  const JobSpec& spec() const { return spec_; }

 private:
  absl::Status Lease() {
    v1::AcquireLeaseRequest request;
    request.set_job("job");
    request.set_at_least(0);
    request.set_ttl_ms(30'000);
    request.set_nonce(4711);
    ASSIGN_OR_RETURN(const v1::Lease lease, job_->worker(Rank(0)).AcquireLease(request, kLong));
    v1::ReleaseLeaseRequest release;
    release.set_job("job");
    release.set_epoch(job_->epoch().value());
    release.set_id(lease.id());
    release.set_nonce(4711);
    return job_->worker(Rank(0)).ReleaseLease(release, kLong).status();
  }
  // A worker that came back a moment ago may not have joined yet: then the job stays as it was, and says so.
  absl::Status Reshard() {
    // Equally many of each of two hosts, one of which may have lost a worker.
    const char* const on_hosts = Has(row_, Feature::kReform) ? "fsdp=2" : "fsdp=4";
    ASSIGN_OR_RETURN(const MeshSpec mesh, ParseMeshSpec(several_ ? on_hosts : "fsdp=3"));
    const absl::Time deadline = MonotonicNow() + kLong;
    absl::StatusOr<std::shared_ptr<Job>> job;
    do {
      job = ReshardJob(*client_, "job", mesh);
    } while (absl::IsAborted(job.status()) && MonotonicNow() < deadline);
    if (job.ok()) job_ = *job;
    return job.status();
  }
  // A version of that step or a newer one, by the reader that had the one before: as the reference has it.
  absl::Status MapVersion(int64_t step) {
    if (reader_ == nullptr) {
      ASSIGN_OR_RETURN(Client client, cluster_->Connect());
      ReaderOptions options;
      options.way = ReaderOptions::Way::kAttached;
      ASSIGN_OR_RETURN(reader_, VersionReader::Open(std::move(client), "job", options));
    }
    ASSIGN_OR_RETURN(const HeldVersion version, reader_->Take({VersionChoice::kAtLeast, Step(step)}, kLong));
    const Learnt reference = testing::ReferenceOf(spec_, version.step().value());
    for (const ParameterSpec& parameter : spec_.parameters) {
      ASSIGN_OR_RETURN(const ConstTensorView view, version.parameter(parameter.name));
      const auto bytes = [](const void* data, int64_t size) {
        return absl::string_view(static_cast<const char*>(data), size);
      };
      const std::string mapped =
          absl::StrCat(bytes(view.data, view.data_bytes()), bytes(view.scales, view.scale_bytes()));
      if (mapped == reference.weights.at(parameter.name)) continue;
      return absl::DataLossError(absl::StrCat("the mapped version of step ", version.step().value(),
                                              " has other bytes of ", parameter.name, " than the reference"));
    }
    return absl::OkStatus();
  }
  absl::Status Save() {
    const std::string folder = temp_.File("checkpoints");
    ASSIGN_OR_RETURN(const SavedCheckpoint saved, SaveCheckpoint(*job_, folder));
    if (saved.step != kHalf) return absl::InternalError(absl::StrCat("saved step ", saved.step));
    if (!Has(row_, Feature::kRestore)) return absl::OkStatus();
    RETURN_IF_ERROR(testing::Delete(*client_, "job"));
    RestoreOptions options{"job", "fsdp=2,ddp=2"};
    options.residency = "bucket";  // as it was, or the other one
    ASSIGN_OR_RETURN(job_, RestoreCheckpoint(*client_, folder, options));
    return absl::OkStatus();
  }

  const Row row_;
  const JobSpec spec_;
  const bool several_;
  testing::TempFolder temp_;
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
  std::unique_ptr<VersionReader> reader_;
};

absl::Status Show(const Row& row, TopologyKind kind) {
  Run run(row, kind);
  RETURN_IF_ERROR(run.Start());
  RETURN_IF_ERROR(run.TrainTo(kHalf));
  RETURN_IF_ERROR(run.UseFeatures());
  RETURN_IF_ERROR(run.TrainTo(kLast));
  ASSIGN_OR_RETURN(const Learnt learnt, run.Learn(kLast));
  if (learnt == testing::ReferenceOf(run.spec(), kLast)) return run.Follow();
  return absl::DataLossError("it has learnt something else than the reference");
}

void ShowAll(TopologyKind kind) {
  const bool all = getenv("SHARDMESH_MATRIX") != nullptr && std::string(getenv("SHARDMESH_MATRIX")) == "all";
  const auto seed = static_cast<uint64_t>(
      testing::NumberOfEnvironment("SHARDMESH_MATRIX_SEED", static_cast<int64_t>(std::random_device()())));
  std::mt19937_64 random(seed);
  size_t pairs = 0;
  std::vector<Row> rows = RowsOf(kind, random, pairs);
  const size_t of_all = rows.size();
  if (!all) rows.resize(std::min(rows.size(), kSampledRows));
  std::cerr << "SHARDMESH_MATRIX_SEED=" << seed << ": " << rows.size() << " of " << of_all << " rows, " << pairs
            << " pairs in all\n";
  const absl::Time begin = MonotonicNow();
  for (const Row& row : rows) EXPECT_OK(Show(row, kind)) << Describe(row) << ", SHARDMESH_MATRIX_SEED=" << seed;
  std::cerr << rows.size() << " rows in " << absl::FormatDuration(MonotonicNow() - begin) << "\n";
}

std::vector<std::string> RefusedOn(TopologyKind kind) {
  std::vector<std::string> names;
  for (int f = 0; f < kNumFeatures; ++f) {
    if (!Works(static_cast<Feature>(f), kind)) names.emplace_back(kFeatures[f].name);
  }
  return names;
}

// What is said here does not come from the table: whoever changes a cell changes it here, too.
TEST(Matrix, OnCpusTheTableRefuses) {
  EXPECT_THAT(RefusedOn(TopologyKind::kHostCpu), IsEmpty());
  EXPECT_THAT(RefusedOn(TopologyKind::kHostsCpu), IsEmpty());
  for (const RefusedPair& pair : kRefusedPairs) {
    EXPECT_EQ(pair.first, Feature::kMuon);
    EXPECT_EQ(pair.second, Feature::kInt8RowWeights);
  }
}

TEST(Matrix, OneHost) { ShowAll(TopologyKind::kHostCpu); }
TEST(Matrix, SeveralHosts) { ShowAll(TopologyKind::kHostsCpu); }

}  // namespace
}  // namespace shardmesh
