#include "client/cpp/checkpoint/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "checkpoint/stored_files.h"
#include "client/cpp/await_weights.h"
#include "client/cpp/next_incarnation.h"
#include "core/base/fault_point.h"
#include "core/base/status.h"
#include "core/base/sync.h"
#include "core/base/thread.h"
#include "core/names/names.h"
#include "proto/convert.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kFirstPatience = absl::Seconds(1);  // with a first connection, where nobody keeps the worker
constexpr double kSlowestReading = 50e6;  // bytes a second
constexpr int kAttempts = 8;
constexpr absl::Duration kFirstPause = absl::Milliseconds(10);  // twice as long after each attempt: 1.3 s of all

// One call to each of some workers at once, and what they told last.
class FileCalls {
 public:
  using Call = std::function<absl::StatusOr<v1::FileProgress>(ShardTransport&, const ShardTransport::Progress&)>;

  FileCalls(Job& job, std::vector<Rank> ranks, const OnFileProgress& progress, const Call& call)
      : ranks_(std::move(ranks)), progress_(progress), told_(ranks_.size()), any_(ranks_.size(), false) {
    for (size_t i = 0; i < ranks_.size(); ++i) {
      absl::StatusOr<std::thread> thread =
          StartThread("a call to a worker", [this, &job, call, i] { End(Ask(job, i, call)); });
      if (!thread.ok()) {
        Fail(thread.status());
        return;
      }
      threads_.push_back(*std::move(thread));
    }
  }
  ~FileCalls() { Join().IgnoreError(); }
  FileCalls(const FileCalls&) = delete;
  FileCalls& operator=(const FileCalls&) = delete;

  // Waits until all workers said something, or one ended.
  absl::Status AwaitAllReady() {
    MutexLock lock(mu_);
    while (first_error_.ok() && std::count(any_.begin(), any_.end(), true) < static_cast<int>(any_.size()) &&
           ended_ < threads_.size()) {
      changed_.WaitFor(mu_, absl::Seconds(1));  // a call ends at its deadline
    }
    return first_error_;
  }
  // The others end soon after one failed, or after this.
  void Fail(const absl::Status& status) {
    MutexLock lock(mu_);
    first_error_.Update(status);
  }
  // Waits until all have ended. The first error.
  absl::Status Join() {
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
    MutexLock lock(mu_);
    return first_error_;
  }
  // By rank as given. REQUIRES: Join returned OK.
  const std::vector<v1::FileProgress>& told() const { return told_; }

 private:
  void End(const absl::Status& status) {
    MutexLock lock(mu_);
    ++ended_;
    first_error_.Update(status);
    changed_.SignalAll();
  }
  // A call that was not answered has done nothing, and a first connection may fail although the worker lives: gRPC
  // before 1.61 looks at the errno of connect after calls that change it (github.com/grpc/grpc, pull request 35064).
  absl::Status Ask(Job& job, size_t i, const Call& call) {
    const bool retained = job.members()[ranks_[i].value()].kept();
    const auto told = [this, i](const v1::FileProgress& progress) { return Told(i, progress); };
    const auto may_again = [this, i] {
      MutexLock lock(mu_);
      return !any_[i] && first_error_.ok();
    };
    return CallAgainWhile(may_again, retained ? job.peer_timeout() : std::min(job.peer_timeout(), kFirstPatience),
                          [&] { return call(job.worker(ranks_[i]), told); })
        .status();
  }
  absl::Status Told(size_t i, const v1::FileProgress& progress) {
    MutexLock lock(mu_);
    told_[i] = progress;
    any_[i] = true;
    changed_.SignalAll();
    if (progress_ && std::count(any_.begin(), any_.end(), true) == static_cast<int>(any_.size())) {
      int64_t done = 0, total = 0;
      for (const v1::FileProgress& each : told_) {
        done += each.bytes_done();
        total += each.bytes_total();
      }
      progress_(done, total);
    }
    return first_error_;
  }

  const std::vector<Rank> ranks_;
  const OnFileProgress& progress_;
  Mutex mu_;
  CondVar changed_;
  std::vector<v1::FileProgress> told_;
  std::vector<bool> any_;
  size_t ended_ = 0;
  absl::Status first_error_;
  std::vector<std::thread> threads_;
};

// The first replica of each shard.
std::vector<Rank> OnePerShard(const Plan& plan) {
  std::vector<Rank> ranks;
  for (int shard = 0; shard < plan.num_shards(); ++shard) ranks.push_back(plan.RankOf({shard, 0}));
  return ranks;
}

std::vector<Rank> AllRanks(const Plan& plan) {
  std::vector<Rank> ranks;
  for (int rank = 0; rank < plan.num_ranks(); ++rank) ranks.push_back(Rank(rank));
  return ranks;
}

void AddBuffers(const std::vector<SafetensorsEntry>& entries,
                google::protobuf::RepeatedPtrField<v1::StoredBuffer>* buffers) {
  for (const SafetensorsEntry& entry : entries) {
    v1::StoredBuffer* const buffer = buffers->Add();
    buffer->set_name(entry.name);
    buffer->set_dtype(entry.dtype);
    buffer->mutable_shape()->Add(entry.shape.begin(), entry.shape.end());
  }
}

// Of all shards at one step; Aborted: they copied different ones.
absl::StatusOr<v1::DigestReply> SaveShards(Job& job, const std::string& folder, const std::string& secret,
                                           const Manifest& manifest, const SaveOptions& options) {
  v1::SaveRequest request;
  AddBuffers(manifest.buffer_entries(), request.mutable_buffers());
  request.set_job(job.spec().name);
  request.set_epoch(job.epoch().value());
  request.set_folder(folder);
  request.set_secret(secret);
  FileCalls calls(job, OnePerShard(job.plan()), options.progress,
                  [&](ShardTransport& worker, const ShardTransport::Progress& told) {
                    return worker.Save(request, told, options.timeout);
                  });
  RETURN_IF_ERROR(calls.AwaitAllReady());
  const absl::StatusOr<v1::DigestReply> digest = job.Digest(options.timeout);
  if (!digest.ok()) calls.Fail(digest.status());
  RETURN_IF_ERROR(calls.Join());
  uint64_t sum = 0;
  for (const v1::FileProgress& copy : calls.told()) {
    if (copy.step() != digest->step()) {
      return absl::AbortedError(absl::StrCat("a worker copied step ", copy.step(), ", another one ", digest->step()));
    }
    sum += copy.digest();
  }
  if (sum == digest->digest()) return digest;
  return absl::DataLossError(absl::StrFormat("what was written of step %d has the digest %016x; the job's is %016x",
                                             digest->step(), sum, digest->digest()));
}

absl::Status AddFiles(const StoredFiles& files, NewCheckpoint& checkpoint, Manifest& manifest) {
  const auto add = [&](const std::string& name, const std::string& head, int64_t bytes) {
    manifest.files.push_back({name, bytes});
    return checkpoint.AddFile(name, head, bytes);
  };
  for (const StoredFile& file : files.files()) RETURN_IF_ERROR(add(file.name, file.head, file.bytes));
  if (files.index().empty()) return absl::OkStatus();
  return add(kIndexFile, files.index(), static_cast<int64_t>(files.index().size()));
}

// That the files of the manifest are those of its job.
absl::Status CheckFiles(const OpenedCheckpoint& opened, const JobSpec& spec) {
  ASSIGN_OR_RETURN(const StoredFiles files, StoredFiles::Create(spec, opened.manifest.buffer_entries()));
  for (const StoredFile& file : files.files()) {
    const bool listed =
        std::any_of(opened.manifest.files.begin(), opened.manifest.files.end(),
                    [&](const Manifest::File& f) { return f.name == file.name && f.bytes == file.bytes; });
    if (listed) continue;
    return absl::DataLossError(absl::StrCat(opened.path, " lists no ", file.name, " of ", file.bytes,
                                            " bytes, which its job has; it was edited, or made by another build"));
  }
  return absl::OkStatus();
}

// Every worker is told. Whoever tells them first gives the job its weights.
absl::Status UseShards(Job& job, uint64_t load_id, absl::Duration timeout) {
  v1::UseLoadedRequest use;
  use.set_job(job.spec().name);
  use.set_epoch(job.epoch().value());
  use.set_load_id(load_id);
  const auto tell = [&](Rank rank) {
    return CallAgain(job, rank, job.peer_timeout(),
                     [&] { return job.worker(rank).UseLoaded(use, job.options().call_timeout); })
        .status();
  };
  for (int rank = job.plan().num_ranks() - 1; rank >= 0; --rank) {
    RETURN_IF_ERROR(ErrorAt(FaultPoint::kUseLoaded));
    RETURN_IF_ERROR(tell(Rank(rank)));
  }
  RETURN_IF_ERROR(AwaitCommittedStep(job, Rank(0), timeout).status());
  return tell(Rank(0));  // it began with these, and not with what somebody else loaded or pushed meanwhile
}

v1::StoredCheckpoint Stored(const std::string& path, int64_t step, uint64_t digest) {
  v1::StoredCheckpoint stored;
  stored.set_folder(path);
  stored.set_step(step);
  stored.set_digest(digest);
  return stored;
}

// Of a slow disk.
absl::Duration ReadingTime(const Manifest& manifest) {
  int64_t bytes = 0;
  for (const Manifest::File& file : manifest.files) bytes += file.bytes;
  return absl::Seconds(static_cast<double>(bytes) / kSlowestReading);
}

// Names in a specification are canonical already.
NameRules RulesOf(const JobSpec& spec) {
  std::vector<std::string> names;
  for (const ParameterSpec& parameter : spec.parameters) names.push_back(parameter.name);
  return RulesOfCanonical(names);
}

// The job as it was saved, but for what the caller wants otherwise.
absl::StatusOr<JobSpec> RestoredSpec(JobSpec spec, const RestoreOptions& options) {
  if (!options.name.empty()) spec.name = options.name;
  if (!options.mesh.empty()) {
    ASSIGN_OR_RETURN(spec.mesh, ParseMeshSpec(options.mesh));
  }
  if (!options.gather.empty()) {
    ASSIGN_OR_RETURN(const GatherFormat gather, ParseGatherFormat(options.gather));
    for (ParameterSpec& parameter : spec.parameters) {
      if (parameter.format != WeightFormat::kNf4) parameter.gather = gather;
    }
  }
  if (!options.residency.empty()) {
    ASSIGN_OR_RETURN(spec.residency, ParseResidency(options.residency));
  }
  if (!options.on_loss.empty()) {
    ASSIGN_OR_RETURN(spec.on_loss, ParseOnLoss(options.on_loss));
  }
  if (options.copies < 0 || options.copies > 2) {
    return absl::InvalidArgumentError(absl::StrCat("copies is ", options.copies, "; it is 1 or 2"));
  }
  if (options.copies != 0) spec.copies = static_cast<int>(options.copies);
  if (options.bucket_elements != 0) spec.bucket_elements = options.bucket_elements;
  if (options.prefetch_buckets < 0 || options.prefetch_buckets > kMaxPrefetchBuckets) {
    return absl::InvalidArgumentError(
        absl::StrCat("prefetch_buckets is ", options.prefetch_buckets, "; it is 1 to ", kMaxPrefetchBuckets));
  }
  if (options.prefetch_buckets != 0) spec.prefetch_buckets = static_cast<int>(options.prefetch_buckets);
  RETURN_IF_ERROR(spec.Validate());
  return spec;
}

// Once.
absl::Status LoadShardsUnder(uint64_t load_id, Job& job, const OpenedCheckpoint& opened,
                             const RestoreOptions& options) {
  v1::LoadRequest request;
  request.set_job(job.spec().name);
  request.set_epoch(job.epoch().value());
  request.set_folder(opened.path);
  request.set_step(opened.manifest.step);
  request.set_load_id(load_id);
  request.set_digest(opened.manifest.digest);
  AddBuffers(opened.manifest.buffer_entries(), request.mutable_buffers());
  FileCalls calls(job, AllRanks(job.plan()), options.progress,
                  [&](ShardTransport& worker, const ShardTransport::Progress& told) {
                    return worker.Load(request, told, options.timeout + ReadingTime(opened.manifest));
                  });
  RETURN_IF_ERROR(calls.Join());
  const Plan& plan = job.plan();
  for (int replica = 0; replica < plan.num_replicas(); ++replica) {
    uint64_t sum = 0;
    for (int shard = 0; shard < plan.num_shards(); ++shard) {
      sum += calls.told()[plan.RankOf({shard, replica}).value()].digest();
    }
    if (sum == opened.manifest.digest) continue;
    return absl::DataLossError(
        absl::StrFormat("%s: the digest of what was read is %016x; %016x was saved: a file "
                        "changed since",
                        opened.path, sum, opened.manifest.digest));
  }
  for (const v1::FileProgress& told : calls.told()) {
    if (told.refused().empty()) continue;
    return absl::DataLossError(absl::StrCat(opened.path, ": ", told.refused(),
                                            ". It was saved so: training had gone wrong, or another program wrote it. "
                                            "Restore an older checkpoint"));
  }
  return UseShards(job, load_id, options.timeout);
}

// Again, where the workers still read for somebody who died, or one came back without what it had loaded. Of two who
// restore one job at a time each may take some workers from the other: they come again after pauses of their own.
absl::Status LoadShards(Job& job, const OpenedCheckpoint& opened, const RestoreOptions& options) {
  std::random_device random;
  absl::Status status;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const double share = static_cast<double>(random() % 1024) / 512;  // 0 to 2
    if (attempt > 0) absl::SleepFor(kFirstPause * (1 << (attempt - 1)) * share);
    status = LoadShardsUnder((static_cast<uint64_t>(random()) << 32 | random()) | 1, job, opened, options);
    if (!absl::IsAborted(status) && !absl::IsNotFound(status)) return status;
  }
  return absl::AbortedError(
      absl::StrCat("somebody else gives job ", job.spec().name, " its weights, or has deleted it: ", status.message()));
}

}  // namespace

absl::StatusOr<SavedCheckpoint> SaveCheckpoint(Job& job, const std::string& root, const SaveOptions& options) {
  Manifest manifest;
  manifest.spec = job.spec();
  ASSIGN_OR_RETURN(manifest.buffers, DescribeBuffers(options.buffers));
  ASSIGN_OR_RETURN(const StoredFiles files, StoredFiles::Create(job.spec(), manifest.buffer_entries()));
  ASSIGN_OR_RETURN(const std::unique_ptr<NewCheckpoint> checkpoint,
                   NewCheckpoint::Begin(std::filesystem::absolute(root).lexically_normal().string()));
  RETURN_IF_ERROR(AddFiles(files, *checkpoint, manifest));
  RETURN_IF_ERROR(WriteBuffers(files, options.buffers, *checkpoint));
  ASSIGN_OR_RETURN(const std::string secret, checkpoint->MakeSecret());
  absl::StatusOr<v1::DigestReply> digest;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    digest = SaveShards(job, checkpoint->path(), secret, manifest, options);
    if (!absl::IsAborted(digest.status()) || attempt + 1 == kAttempts) break;
    absl::SleepFor(kFirstPause * (1 << attempt));  // the workers of a saver that died take a moment to see that
  }
  RETURN_IF_ERROR(digest.status());
  manifest.step = digest->step();
  manifest.digest = digest->digest();
  ASSIGN_OR_RETURN(NewCheckpoint::Finished finished, checkpoint->Finish(manifest));
  absl::Status recorded;
  if (options.record) {
    recorded = job.RecordCheckpoint(Stored(finished.path, digest->step(), digest->digest()), options.timeout);
  }
  return SavedCheckpoint{std::move(finished.path), digest->step(),         digest->digest(),
                         files.num_bytes(),        finished.already_there, recorded};
}

absl::StatusOr<std::shared_ptr<Job>> RestoreCheckpoint(Client& client, const std::string& path,
                                                       const RestoreOptions& options) {
  ASSIGN_OR_RETURN(const OpenedCheckpoint opened,
                   OpenCheckpoint(std::filesystem::absolute(path).lexically_normal().string()));
  ASSIGN_OR_RETURN(const JobSpec spec, RestoredSpec(opened.manifest.spec, options));
  RETURN_IF_ERROR(CheckFiles(opened, spec));
  RETURN_IF_ERROR(ReadBuffers(opened).status());
  v1::CreateJobRequest create;
  *create.mutable_spec() = ToProto(spec);
  *create.mutable_names() = ToProto(RulesOf(spec));
  create.set_fit_mesh(options.fit_mesh && options.mesh.empty());
  create.set_replaces_uid(options.replaces_uid);
  ASSIGN_OR_RETURN(const v1::CreateJobReply reply, client.Create(std::move(create)));
  const auto restore = [&]() -> absl::StatusOr<std::shared_ptr<Job>> {
    ASSIGN_OR_RETURN(std::shared_ptr<Job> job, client.OpenJob(spec.name));
    if (job->uid() != reply.job().uid()) {
      return absl::AbortedError(absl::StrCat("somebody deleted job ", spec.name, " and made another of its name"));
    }
    RETURN_IF_ERROR(LoadShards(*job, opened, options));
    const Manifest& manifest = opened.manifest;
    if (options.record) {
      RETURN_IF_ERROR(job->RecordCheckpoint(Stored(opened.path, manifest.step, manifest.digest), options.timeout));
    }
    return job;
  };
  absl::StatusOr<std::shared_ptr<Job>> job = restore();
  if (!job.ok() && reply.created() && options.replaces_uid == 0) {
    client.DeleteJob(spec.name, reply.job().uid()).IgnoreError();
  }
  return job;
}

}  // namespace shardmesh
