// The C++ client: open or create a job, take part in its steps (Session, session.h), read its versions.
//
//   ASSIGN_OR_RETURN(Client client, Client::Connect("127.0.0.1:7000"));
//   ASSIGN_OR_RETURN(std::shared_ptr<Job> job, client.OpenJob("llama"));
//   ASSIGN_OR_RETURN(std::unique_ptr<Session> session, job->Attach({Slot(0)}));
//   while (...) {
//     ... read session->parameter("layers.0.weight"), write session->gradient(Slot(0), "layers.0.weight") ...
//     RETURN_IF_ERROR(session->Step().status());
//   }
//
// Names are given as the client has them: the rules (core/names/names.h) map them to canonical ones. Client and Job are
// thread-safe; a Session is for one thread. Every call ends at a time limit. Errors name the job, worker or value.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/next_incarnation.h"
#include "client/cpp/transport/coordinator_transport.h"
#include "client/cpp/transport/shard_transport.h"
#include "core/base/ids.h"
#include "core/base/sync.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "core/names/names.h"
#include "rpc/tls/tls.h"

namespace shardmesh {

class Session;
class PullingSession;

struct ClientOptions {
  TlsOptions tls;  // what it lacks comes from SHARDMESH_TLS_CERT, _KEY, _CA and _NAME, when Connect is called
  absl::Duration call_timeout = absl::Seconds(10);   // of control calls
  absl::Duration ready_timeout = absl::Seconds(60);  // for a job's workers to be ready
  // Of the control calls that open a job: none takes longer than the whole may.
  absl::Duration opening_call() const { return std::min(call_timeout, ready_timeout); }
  // How long an attached session polls for a step's commit before it sleeps; only for trainers with a core to spare.
  absl::Duration spin;
  // For finding uses of buckets that lack an Acquire, or come after DeclareBucket: of jobs with bucket residency, what
  // a session may not touch cannot be touched (the process ends with SIGSEGV). Costs a system call for each such call.
  bool guard_buckets = false;
  absl::Duration peer_timeout;  // silence after which a worker counts as gone; 0: as the coordinator has it
  // Whether a session's weights may be written to: what is written is seen by its process alone, until
  // Session::ForgetWrites(). Otherwise a write to them is a fault.
  bool writable_weights = false;
  // Whether an attached session or reader takes windows in memory of a CUDA device, where the job's workers have them: views
  // then have addresses of the device that they name. Otherwise Attach refuses such a job (Connect goes through the host),
  // and a VersionReader pulls.
  bool device_windows = false;
  std::string cuda_library;  // file of the CUDA driver's library, of jobs on a device; "": the system's
};

// Elements of one tensor, row-major; borrowed.
struct TensorView {
  void* data = nullptr;
  Format format = Format::kFp32;
  int64_t num_elements = 0;
  int device = -1;  // the CUDA device whose memory it is, as this process counts them; -1: memory of the host
};
// The same of weights. Where the job gathers them in codes (core/format/gather_format.h), `data` are those, `format` is
// what was quantized, and the scales lie beside them.
struct ConstTensorView {
  const void* data = nullptr;
  Format format = Format::kFp32;
  int64_t num_elements = 0;
  GatherFormat gather = GatherFormat::kStored;
  const void* scales = nullptr;  // floats, in mx8 and nf4 bytes (core/format/gather_format.h); null: as stored
  int64_t num_scales = 0;
  int device = -1;  // as TensorView

  int64_t data_bytes() const { return GatheredCodeBytes(format, gather, num_elements); }
  int64_t scale_bytes() const { return GatheredScalesBytes(gather, num_scales); }
};

// A tensor's weights in a window or version: `bucket_begin` is where the bytes of its bucket begin.
ConstTensorView WeightsIn(const Plan& plan, int tensor, const char* bucket_begin);

// What a job is opened for. A job that failed cannot be trained, but its published versions can be read from the
// workers that live.
enum class JobUse { kTrain, kRead };

// Which version to pull. A version is an epoch of the job and a step. One of a later epoch is newer, whatever the steps
// are: a trainer that goes back to an older state leaves the versions of earlier epochs behind. kExact, kAtLeast and
// kLatest are of the job's newest epoch.
struct VersionChoice {
  // kNewer: of a later epoch than `epoch`, or of that one and a later step than `step`.
  enum Kind { kExact, kAtLeast, kLatest, kNewer } kind = kLatest;
  Step step;
  Epoch epoch;

  // The lowest step that a version may have, other than of kExact, of a job at `of`.
  int64_t LowestAt(Epoch of) const;
};

// One whole version, in this process's memory.
class Version {
 public:
  Step step() const { return step_; }
  Epoch epoch() const;
  int64_t num_bytes() const { return static_cast<int64_t>(bytes_.size()); }
  // Borrowed from this object. NotFound: no such parameter.
  absl::StatusOr<ConstTensorView> parameter(absl::string_view name) const;

 private:
  friend class Job;
  friend class PulledReader;
  std::shared_ptr<const class Job> job_;
  Step step_;
  std::vector<char> bytes_;  // every bucket's weight_bytes, in order
};

struct AttachOptions {
  // Calls that wait for other slots end with FailedPrecondition once the trainer of one has left; else another trainer
  // can take its place meanwhile.
  bool needs_all = false;
};

class Job : public std::enable_shared_from_this<Job> {
 public:
  const JobSpec& spec() const { return spec_; }
  const Plan& plan() const { return plan_; }
  Epoch epoch() const { return epoch_; }
  int64_t uid() const { return uid_; }  // JobDescription.uid
  const std::vector<v1::Member>& members() const { return members_; }
  const ClientOptions& options() const { return options_; }
  absl::Duration peer_timeout() const { return peer_timeout_; }

  // The tensor index (of the storage, where tied) of a name as this client has it. NotFound / InvalidArgument.
  absl::StatusOr<int> Resolve(absl::string_view name) const;

  // Whether this host has a worker of the job, so that its memory can be shared.
  bool IsOnThisHost() const;
  // Takes part with these slots through shared memory. FailedPrecondition: another host, or a slot has another writer.
  // Unimplemented: the windows are a device's, which ClientOptions::device_windows does not ask for.
  absl::StatusOr<std::unique_ptr<Session>> Attach(std::vector<Slot> slots, AttachOptions options = {});
  // Takes part in a job whose slots are pulled (pulling_session.h). ResourceExhausted: it has all its trainers.
  // FailedPrecondition: another host, or its slots are assigned.
  absl::StatusOr<std::unique_ptr<PullingSession>> AttachPulling();
  // The same as AttachPulling through gRPC, from anywhere. Unimplemented: the workers are of a build in which trainers
  // that pull slots attach.
  absl::StatusOr<std::unique_ptr<PullingSession>> ConnectPulling();
  // The same as Attach through gRPC, from anywhere. The session holds its own copy of the weights and gradients.
  absl::StatusOr<std::unique_ptr<Session>> Connect(std::vector<Slot> slots);

  // Gives the job its weights, by this client's names, fp32; only the first complete set counts, later ones are
  // dropped. `values` of tied parameters may be left out. InvalidArgument: a parameter is missing or has another size.
  absl::Status Initialize(const std::map<std::string, std::vector<float>>& values, absl::Duration timeout);

  // Pulls a version of this epoch from one worker. Errors of Shard.Pull. Aborted: the job is at another epoch; Reopen
  // it. FailedPrecondition: `stop`, which may be null, was true when bytes came.
  absl::StatusOr<Version> Pull(VersionChoice choice, absl::Duration timeout, const std::atomic<bool>* stop = nullptr);
  // Asks one worker.
  absl::StatusOr<v1::DigestReply> Digest(absl::Duration timeout);

  // Of a job that was deleted: waits until no worker holds this epoch of it any more, so that nobody reads its versions
  // as the newest of that name. For at most `timeout`; workers that do not answer are passed over.
  void AwaitClosed(absl::Duration timeout) const;

  // A checkpoint of this job is there whole: what it goes back to by itself, should it lose a shard (on_loss=checkpoint).
  // No effect on other jobs. Asks the coordinator, again and again for at most `timeout` while that is away. Errors of
  // Coordinator.RecordCheckpoint.
  absl::Status RecordCheckpoint(const v1::StoredCheckpoint& checkpoint, absl::Duration timeout) const;
  // The job went back to a checkpoint by itself after `before`: it is at that one's step, and every later step that it
  // had is gone. Of a job that Client::Reopen returned: with the epoch of the one that it was given.
  std::optional<v1::GoneBack> WentBackSince(Epoch before) const;

  // The worker to read versions from: the last one that lived when the job was opened. Any worker of the host has whole
  // versions, and the lead (rank 0) is the busiest.
  Rank reading_rank() const;

  // Whether a call to that member that failed with Unavailable may succeed soon: a node has its memory, so that it comes
  // back, and the coordinator does not say that this epoch is over. It is asked now and then; no answer is no news.
  // Thread-safe.
  bool MayComeBack(Rank rank) const;
  // For whoever waits for something at a member, which may have been left out of the job while its process runs on.
  //   Aborted: the coordinator says that this epoch is over. It is asked now and then; no answer is no news.
  absl::Status CheckNotOver() const;
  // What the worker at `rank` says of the job at this epoch. nullopt: it is a next incarnation that does not have the
  // job yet. A call takes at most `limit`, and is repeated as CallAgain does.
  //   Aborted: the worker has the job at another epoch. Unavailable: the worker is gone, or was left out of the job; or
  //   the job failed.
  absl::StatusOr<std::optional<v1::GetStatusReply::Job>> StatusAt(Rank rank, absl::Duration limit) const;
  // How many trainers pull slots of the job now, on all its hosts. Errors of StatusAt and CheckNotOver.
  absl::StatusOr<int> CountTrainers(absl::Duration limit) const;

  // The transport of the worker at `rank`. REQUIRES: a rank of the plan.
  ShardTransport& worker(Rank rank) const { return *workers_[rank.value()]; }

 private:
  friend class Client;
  Job(JobSpec spec, Plan plan, NameRules rules, ClientOptions options);
  static absl::StatusOr<std::shared_ptr<Job>> Create(const v1::JobDescription& description, const NameRules& rules,
                                                     const ClientOptions& options,
                                                     std::shared_ptr<CoordinatorTransport> coordinator);
  absl::Status DialMembers(const v1::JobDescription& description);
  absl::Status KeepLiving(const std::string& cause);
  bool IsOver() const;

  const JobSpec spec_;
  const Plan plan_;
  const NameRules rules_;
  const ClientOptions options_;
  std::map<std::string, int, std::less<>> index_of_;  // canonical name -> parameter index
  std::shared_ptr<CoordinatorTransport> coordinator_;
  Epoch epoch_;
  std::optional<v1::GoneBack> gone_back_;
  int64_t uid_ = 0;
  absl::Duration peer_timeout_;
  std::vector<v1::Member> members_;
  std::vector<std::unique_ptr<ShardTransport>> workers_;
  mutable std::atomic<bool> over_{false};
  mutable Mutex look_mu_;
  mutable absl::Time next_look_ ABSL_GUARDED_BY(look_mu_) = absl::InfinitePast();
};

// A call to a member of a job, which may be repeated: while it is away and comes back (Job::MayComeBack), for at most
// `patience`. `call` gives what StatusOf takes (next_incarnation.h).
template <typename Call>
auto CallAgain(const Job& job, Rank rank, absl::Duration patience, Call call) -> decltype(call()) {
  return CallAgainWhile([&] { return job.MayComeBack(rank); }, patience, std::move(call));
}

class Client {
 public:
  // Errors of NewChannel; the first call connects.
  static absl::StatusOr<Client> Connect(const std::string& coordinator, ClientOptions options = {});
  // Over a transport that is there.
  explicit Client(std::shared_ptr<CoordinatorTransport> coordinator, ClientOptions options = {})
      : coordinator_(std::move(coordinator)), options_(std::move(options)) {}

  // Creates the job or finds the same one, and waits until its workers are ready. Names in `spec` as this client has
  // them. Errors of Coordinator.CreateJob, and of OpenJob.
  // `replaces`: the uid of the job of this name that the new one takes the place of (CreateJobRequest.replaces_uid).
  absl::StatusOr<std::shared_ptr<Job>> CreateJob(const JobSpec& spec, const NameRules& rules = {},
                                                 int64_t replaces = 0);
  // The call alone, with a uid of its own unless `request` has one. While a coordinator that answered before is away,
  // it is repeated for the options' ready_timeout. Errors of Coordinator.CreateJob.
  absl::StatusOr<v1::CreateJobReply> Create(v1::CreateJobRequest request);
  // Deletes the job with that uid, and no other one of its name; repeated as Create is. OK: it is gone, or was before.
  absl::Status DeleteJob(const std::string& name, int64_t uid);
  // Waits until the job's workers are ready.
  //   NotFound: there is no such job.
  //   DeadlineExceeded: it was not ready within the options' ready_timeout; says what it waits for.
  //   Unavailable: it failed; with kRead: and none of its workers answers.
  absl::StatusOr<std::shared_ptr<Job>> OpenJob(const std::string& name, const NameRules& rules = {},
                                               JobUse use = JobUse::kTrain);
  // OpenJob of a job that somebody else creates, maybe later: `timeout` is for both, that it is there and ready.
  absl::StatusOr<std::shared_ptr<Job>> AwaitJob(const std::string& name, absl::Duration timeout,
                                                const NameRules& rules = {}, JobUse use = JobUse::kTrain);

  // OpenJob of a job that lost a member, or was made again, since `before` was opened: waits until it is ready at a
  // later epoch, for the options' ready_timeout where no other `timeout` is given. Sessions of `before` are over;
  // attach to what this returns. Its step is at least that of `before`, unless it went back to a checkpoint
  // (Job::WentBackSince). Errors of OpenJob; Unavailable: it cannot go on without the member.
  absl::StatusOr<std::shared_ptr<Job>> Reopen(const Job& before, JobUse use = JobUse::kTrain,
                                              std::optional<absl::Duration> timeout = std::nullopt);

  // All other methods of the coordinator.
  CoordinatorTransport& coordinator() { return *coordinator_; }

 private:
  enum class Absent { kError, kWait };
  // `after`: at a later epoch than that.
  absl::StatusOr<std::shared_ptr<Job>> Open(const std::string& name, const NameRules& rules, JobUse use, Absent absent,
                                            absl::Duration timeout, int64_t after = -1);

  std::shared_ptr<CoordinatorTransport> coordinator_;
  ClientOptions options_;
};

// What a job that is neither ready nor failed waits for, in words: "3 live workers on one host; host h1 has 2".
std::string WaitsFor(const v1::JobDescription& job);

}  // namespace shardmesh
