// JobShard: everything one worker has of one job: its shard's storage, the host's shared memory, the step protocol and
// the engine that runs it. The ways in (worker/doors) call it with what a trainer asked; it knows no connection.
//
// Thread-safe. Errors are those of shard.proto.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
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
#include "worker/job/epoch_end.h"
#include "worker/job/pulls_under_way.h"
#include "worker/job/push_claims.h"
#include "worker/job/shard_memory.h"
#include "worker/job/unclaimed_sessions.h"
#include "worker/job/waiters.h"
#include "worker/lead/engine.h"
#include "worker/lead/hosts/host_lead.h"
#include "worker/lead/one_host.h"
#include "worker/lead/step_mail.h"
#include "worker/memory/host_capacity.h"
#include "worker/memory/host_memory.h"
#include "worker/pass/device/device_pass.h"
#include "worker/pass/pass.h"
#include "worker/pass/snapshot.h"
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

// What executes its commands.
struct ShardRun {
  StepPass& pass;
  Engine& engine;
  SnapshotPort& snapshots;
  const Trace& trace;
  const HostLead* host_lead;  // null: the job is on one host, or it leads none
  int threads;
  absl::Duration idle;  // since a command was committed: a job that waits for nobody can be saved without giving way
};

class JobShard {
 public:
  // Takes the host's memory (created on the lead, mapped elsewhere) and starts the engine. Cancelled: `cancelled` was
  // set meanwhile. REQUIRES: the job is supported where it is (CheckSupported).
  static absl::StatusOr<std::unique_ptr<JobShard>> Create(JobShardOptions options, Plan plan, HostMemory host,
                                                          Memory& memory, const std::atomic<bool>* cancelled = nullptr);
  ~JobShard();

  // On the lead of a job on several hosts, once, when their leads have met: from now on it takes part in their rounds.
  void StartHosts(HostGroups groups, absl::Duration heartbeat_timeout, MeetAgain meet_again);

  const JobSpec& spec() const { return options_.spec; }
  Epoch epoch() const { return options_.epoch; }
  Rank rank() const { return options_.rank; }
  const Plan& plan() const { return plan_; }
  ShardPlace place() const { return place_; }

  // Its parts.
  StepProtocol& protocol() const { return *protocol_; }
  HostMemory& host() const { return *host_; }
  ShardMemory& memory() const { return *memory_; }  // of this shard, on processors
  ShardRun run() const;
  EpochEnd& epoch_end() const { return *epoch_end_; }
  PushClaims& pushes() const { return *pushes_; }
  VersionLeases& leases() const { return *leases_; }
  PullsUnderWay& pulls() const { return *pulls_; }  // of this worker
  Waiters& waiters() { return waiters_; }
  UnclaimedSessions& unclaimed() { return unclaimed_; }
  const TrainerRequests& requests() const { return requests_; }  // what trainers ask of it

  // From now on Health is NotFound ("deleted"), if the job was not aborted before, and waiters are answered with it.
  // Whoever holds the object may go on.
  void Close();
  // OK; Unavailable: aborted, naming the member; NotFound: closed.
  absl::Status Health() const;
  // NotFound: closed, whatever its health was before: whoever still has something of the job lets it go.
  absl::Status CheckOpen() const;
  // Whether this epoch has ended, or the shard is closed: its versions are left behind.
  bool is_over() const;

  // EpochEnd::Run: readers are told, too.
  absl::Status End(const EpochMembers& members, const std::atomic<bool>& cancelled, absl::Duration timeout);
  // Lifesigns of this member and a look at the others; then lets waiters look at their deadlines. `retained`: a node
  // has all that the next incarnation needs. True: this is a host's lead that lost another one, and waits to meet it again.
  bool Tick(int64_t now_nanos, absl::Duration heartbeat_timeout, bool retained = false);

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
  const std::unique_ptr<HostMemory> host_;
  const std::unique_ptr<ShardMemory> memory_;
  const std::unique_ptr<SnapshotPort> snapshots_;
  const std::unique_ptr<PullsUnderWay> pulls_;
  Waiters waiters_;
  UnclaimedSessions unclaimed_;
  std::atomic<bool> closed_{false}, apart_{false};
  std::atomic<int64_t> moved_nanos_{MonotonicNanos()};
  Trace trace_;
  std::unique_ptr<StepProtocol> protocol_;
  std::unique_ptr<VersionLeases> leases_;
  std::unique_ptr<PushClaims> pushes_;
  std::unique_ptr<StepPass> pass_;
  const TrainerRequests requests_;
  StepMail mail_;                        // the lead's
  std::optional<OneHostLead> lead_;      // of a job on one host, which the engine calls
  std::unique_ptr<Engine> engine_;       // its thread uses all the others
  Mutex hosts_mu_;                       // held while the next is set or stopped
  std::unique_ptr<HostLead> host_lead_;  // as does this one's
  std::unique_ptr<EpochEnd> epoch_end_;
};

// Where the job runs.
Topology TopologyOf(const JobShard& shard);
// FailedPrecondition: the job has weights, or is about to have those of an older epoch.
absl::Status CheckHasNoWeights(const JobShard& shard);
// Of a shard that loaded its part of a checkpoint (Engine::UseLoaded). Errors of Shard.UseLoaded.
absl::Status UseLoaded(const JobShard& shard, const v1::UseLoadedRequest& request);

}  // namespace shardmesh
