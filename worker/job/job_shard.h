// JobShard: everything one worker has of one job: its shard's storage, the host's shared memory, the step protocol and
// the engine that runs it. The ways in (worker/doors) call it with what a trainer asked; it knows no connection.
//
// Thread-safe. Errors are those of shard.proto.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/base/sync.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "core/job/support.h"
#include "proto/shardmesh/v1/shard.pb.h"
#include "worker/job/pulls_under_way.h"
#include "worker/job/unclaimed_sessions.h"
#include "worker/job/waiters.h"
#include "worker/lead/engine.h"
#include "worker/lead/host_lead.h"
#include "worker/lead/one_host.h"
#include "worker/lead/step_mail.h"
#include "worker/memory/gradient_sums.h"
#include "worker/memory/host_capacity.h"
#include "worker/memory/host_memory.h"
#include "worker/memory/shard_storage.h"
#include "worker/pass/device/device_pass.h"
#include "worker/pass/pass.h"
#include "worker/pass/snapshot.h"
#include "worker/step/job_ending.h"
#include "worker/step/step_protocol.h"
#include "worker/versions/version_leases.h"

namespace shardmesh {

struct JobShardOptions {
  JobSpec spec;
  Epoch epoch;
  Rank rank;
  std::vector<std::string> worker_names;  // by rank
  int threads = 1;
  absl::Duration step_timeout = absl::Seconds(60);
  absl::Duration spin;                   // EngineOptions::spin
  std::optional<HostRanks> ranks;        // of this host; unset: all
  const WorkerDevice* device = nullptr;  // on which it runs, outlives the shard; null: on processors
  bool resumed = false;                  // all memory is that of this member's last incarnation, which is dead
  HostCapacity capacity;                 // what the host can give
};

class JobShard {
 public:
  // Takes the host's memory (created on the lead, mapped elsewhere) and starts the engine. Cancelled: `cancelled` was
  // set meanwhile. REQUIRES: the job is supported where it is (CheckSupported).
  static absl::StatusOr<std::unique_ptr<JobShard>> Create(JobShardOptions options, Plan plan, HostMemory host,
                                                          Memory& memory, const std::atomic<bool>* cancelled = nullptr);
  ~JobShard();

  // On the lead of a job on several hosts, once, when their leads have met: from now on it takes part in their rounds.
  void StartHosts(HostGroups groups, absl::Duration heartbeat_timeout);

  const JobSpec& spec() const { return options_.spec; }
  Epoch epoch() const { return options_.epoch; }
  Rank rank() const { return options_.rank; }
  const Plan& plan() const { return plan_; }
  ShardPlace place() const { return place_; }
  StepProtocol& protocol() { return *protocol_; }
  const StepProtocol& protocol() const { return *protocol_; }
  HostMemory& host() { return host_; }
  const HostMemory& host() const { return host_; }
  const StepPass& pass() const { return *pass_; }
  const HostLead* host_lead() const { return host_lead_.get(); }  // null: the job is on one host, or it leads none
  const Trace& trace() const { return trace_; }
  int64_t sum_bytes() const { return GradientSums::Has(plan_) ? sums_->num_bytes() : 0; }
  Engine& engine() { return *engine_; }
  Waiters& waiters() { return waiters_; }
  UnclaimedSessions& unclaimed() { return unclaimed_; }

  // Takes the memory that the job's first command writes to from the system: the storage, and this shard's part of the
  // parameter window and of the first publication. For at most `patience`: the rest comes as it is written. Of a new
  // job, before it is used. Returns early when `cancelled` is set.
  void TakeMemory(absl::Duration patience, const std::atomic<bool>& cancelled);
  // The same of what the first steps read and write beside that: slots and publications. REQUIRES: on processors.
  void TakeMemoryOfSteps(const std::atomic<bool>& cancelled) const;

  // From now on Health is NotFound ("deleted"), if the job was not aborted before, and waiters are answered with it.
  // Whoever holds the object may go on.
  void Close();
  // OK; Unavailable: aborted, naming the member; NotFound: closed.
  absl::Status Health() const;
  // NotFound: closed, whatever its health was before: whoever still has something of the job lets it go.
  absl::Status CheckOpen() const;

  // What trainers ask of it.
  const TrainerRequests& requests() const { return requests_; }
  // Health, and whether what was declared stands (StepDeclarations::CheckStands).
  absl::Status HealthOf(const v1::StepRequest& request) const;

  // One push of a gradient shard at a time: false when one is under way. Of a gradient: at any replica of the shard.
  // REQUIRES: a slot of the job, or -1: initial weights.
  bool BeginPush(int slot);
  void EndPush(int slot);

  // The job goes on at a later epoch with `members` of this one, of which this is one: ends this epoch with them, waits
  // until all have, and brings the shard to the step that all agree on. Again: at once. From any thread.
  //   Cancelled, DeadlineExceeded: as AwaitEnding. DataLoss: the shard is damaged.
  absl::Status End(absl::Span<const Rank> members, const std::atomic<bool>& cancelled, absl::Duration timeout);
  // How it ended, once End is through: from then on the shard does not change.
  std::optional<Ending> ending() const;
  // Whether this epoch has ended, or the shard is closed: its versions are left behind.
  bool is_over() const;
  // After Close, when nobody needs the shard any more: stops the engine, and gives the memory of the shard and of the
  // slots back. Versions stay.
  void KeepVersionsOnly();
  // Fills this shard with what others give of an older epoch. REQUIRES: on processors.
  const ShardStorage& storage() const { return *storage_; }

  bool on_device() const { return options_.device != nullptr; }
  Topology topology() const;
  SnapshotPort& snapshots() { return snapshots_; }
  VersionLeases& leases() { return *leases_; }
  const VersionLeases& leases() const { return *leases_; }
  PullsUnderWay& pulls() { return pulls_; }  // of this worker
  const PullsUnderWay& pulls() const { return pulls_; }
  // FailedPrecondition: the job has weights, or is about to have those of an older epoch.
  absl::Status CheckHasNoWeights() const;
  // What this shard was in a checkpoint (Engine::Load, UseLoaded): `read` writes it into storage(). REQUIRES: on
  // processors.
  absl::Status Load(uint64_t load_id, Step step, const std::function<absl::Status()>& read);
  int threads() const { return options_.threads; }
  // ResourceExhausted: the host has no room for a checkpoint's copies beside the job.
  absl::Status CheckCopyFits() const;
  // Since when no command was committed. A job that waits for nobody can be saved without giving way.
  absl::Duration Idle() const { return absl::Nanoseconds(MonotonicNanos() - moved_nanos_.load()); }
  // UseLoadedRequest. Errors of Shard.UseLoaded.
  absl::Status UseLoaded(const v1::UseLoadedRequest& request);

  // Lifesigns of this member and a look at the others; then lets waiters look at their deadlines. `retained`: a node
  // has all that the next incarnation needs.
  void Tick(int64_t now_nanos, absl::Duration heartbeat_timeout, bool retained = false);

 private:
  JobShard(JobShardOptions options, Plan plan, HostMemory host);
  absl::Status Open(Memory& memory, const std::atomic<bool>* cancelled);
  absl::Status OpenPass(Memory& memory, const std::atomic<bool>* cancelled);
  EngineOptions ForEngine();
  // That no version will come, to readers that wait for one.
  void TellReaders(BoardOver how);

  const JobShardOptions options_;
  const Plan plan_;
  const ShardPlace place_;
  HostMemory host_;
  std::optional<ShardStorage> storage_;  // on processors
  std::optional<GradientSums> sums_;
  SnapshotPort snapshots_;
  PullsUnderWay pulls_;
  Waiters waiters_;
  UnclaimedSessions unclaimed_;
  std::atomic<bool> closed_{false};
  std::atomic<int64_t> moved_nanos_{MonotonicNanos()};
  Trace trace_;
  std::unique_ptr<StepProtocol> protocol_;
  std::unique_ptr<VersionLeases> leases_;
  std::unique_ptr<StepPass> pass_;
  const TrainerRequests requests_;
  StepMail mail_;                        // the lead's
  std::optional<OneHostLead> lead_;      // of a job on one host, which the engine calls
  std::unique_ptr<Engine> engine_;       // its thread uses all the others
  std::unique_ptr<HostLead> host_lead_;  // as does this one's
  mutable Mutex mu_;
  std::set<int> pushes_ ABSL_GUARDED_BY(mu_);
  std::optional<Ending> ending_ ABSL_GUARDED_BY(mu_);
  Mutex ending_mu_;  // held in End, before mu_
};

}  // namespace shardmesh
