// The coordinator's memory, and Transaction: the only way to change what a Store keeps of it. Not thread-safe.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/coordinator/place_index.h"
#include "server/jobs/job_definition.h"
#include "server/store/records.h"
#include "server/store/store.h"

namespace shardmesh {

// A READY job on its way to another mesh: who its members will be. While they build their memory it trains on, and
// nothing of it has changed.
struct NextMesh {
  int64_t epoch = 0;
  std::shared_ptr<const JobDefinition> definition;
  std::vector<MemberRecord> members;  // by rank; ready: it has its memory
  std::vector<MemberRecord> departing;  // members of now that will be none; ready: it knows
  absl::Time since;
};

// Since when an incarnation of rank 0, at an epoch, reports fewer steps than are known, and nothing else.
struct Behind {
  absl::Time since;
  int64_t epoch = 0, incarnation = 0;
};

// Which members of a job said READY at an epoch. It is stored when all have: each says so with every heartbeat, so a
// coordinator that restarts before hears it again.
class ReadyRanks {
 public:
  // Of an epoch other than before: nobody else is.
  void Add(int64_t epoch, size_t num_ranks, size_t rank);
  bool Has(int64_t epoch, size_t rank) const { return epoch == epoch_ && rank < ready_.size() && ready_[rank]; }
  // Everybody else is, of so many.
  bool AllBut(int64_t epoch, size_t num_ranks, size_t rank) const {
    return (epoch == epoch_ ? count_ : 0) + !Has(epoch, rank) == num_ranks;
  }

 private:
  int64_t epoch_ = 0;
  size_t count_ = 0;
  std::vector<bool> ready_;
};

// What members that go back to a checkpoint say of it at an epoch: the digest of the shard that each has read, or why it
// cannot. Not stored, as ReadyRanks.
class ReadShards {
 public:
  struct Said {
    std::optional<uint64_t> digest;
    std::string error;  // without a digest; empty: it said nothing yet
    bool empty() const { return !digest.has_value() && error.empty(); }
  };
  // Of an epoch other than before: nobody else did.
  void Add(int64_t epoch, size_t num_ranks, size_t rank, Said said);
  // All of that epoch's did.
  bool AllSaid(int64_t epoch) const { return epoch == epoch_ && count_ == said_.size(); }
  bool Has(int64_t epoch, size_t rank) const { return epoch == epoch_ && rank < said_.size() && !said_[rank].empty(); }
  const std::vector<Said>& said() const { return said_; }  // by rank

 private:
  int64_t epoch_ = 0;
  size_t count_ = 0;
  std::vector<Said> said_;
};

// Since when other hosts say that a host's lead is gone, at an epoch. Two hosts may say it of each other.
struct HostsInDoubt {
  int64_t epoch = 0;
  std::map<std::string, absl::Time> since;  // by host
};

// What a worker keeps of a job with copies=2. Meanings: KeptCopies in coordinator.proto.
struct KeptCopies {
  std::string job;
  int64_t epoch = 0;
  int32_t rank = 0, hosts = 1;
  std::string mesh;
  int64_t step = 0;
  uint64_t digest = 0;
  std::string secret;  // of the job
};

// What workers keep of a job, by their names; the newest that each said.
struct Copies {
  struct Of {
    int64_t incarnation = 0;
    KeptCopies kept;
  };
  std::map<std::string, Of> by_worker;
  // None of an older epoch, or of the same one and no later step, is taken any more: what was tried could not be read.
  int64_t passed_epoch = 0, passed_step = -1;
};

struct Job {
  JobRecord record;
  std::shared_ptr<const JobDefinition> defined;     // as it was given
  std::shared_ptr<const JobDefinition> definition;  // with the mesh that it has now
  bool progress_unsaved = false;  // committed_step, published_steps: written by the next Tick, said again by rank 0
  // Not stored:
  ReadyRanks ready;  // while it is PREPARING; but for the last one changed without a transaction
  ReadShards read;   // while it goes back; changed without a transaction
  absl::Time back_since = absl::InfinitePast();   // when it began to
  absl::Time assigned_at = absl::InfinitePast();  // and its members were assigned
  std::optional<Behind> behind;  // of the newest incarnation of rank 0 that reports fewer steps than committed_step
  Copies copies;                 // changed without a transaction
  int lost_members = 0;                  // that died since its last step or, without one, its making
  HostsInDoubt in_doubt;                 // changed without a transaction
  bool awaits_incarnation = false;       // it re-forms, and the only holder of a shard is to come back
  std::shared_ptr<const NextMesh> next;  // a coordinator that restarts knows nothing of it: then it is given up
  std::string reshard_error;             // why the newest attempt to bring it to another mesh was given up
};

struct Worker {
  WorkerRecord record;
  absl::Time last_heartbeat;           // not stored: a restarted coordinator starts counting anew
  std::optional<WorkerTraits> traits;  // unset: it said nothing to this run of the coordinator yet
  bool doubted = false;                // a peer said that it is gone, and it was not heard since
  uint64_t heard = 0;                  // CoordinatorState::heard at its last whole heartbeat
};

struct CoordinatorState {
  std::map<std::string, Job> jobs;
  std::map<std::string, Worker> workers;
  // The largest epoch of a deleted job, or that a job was to have on another mesh: nothing else may be taken for that.
  int64_t epoch_floor = 0;
  // Of transactions that changed more of a job than its progress, or of workers that were forgotten. While it is the same, a
  // pointer to a worker stays valid.
  uint64_t changes = 0;
  uint64_t heard = 0;         // whole heartbeats, and what came with them
  mutable PlaceIndex places;  // of the workers in the jobs; Transaction keeps it right
};

// Changes memory at once and keeps what was there. Commit writes all changes to the store as one batch, and puts memory
// back if that fails; so does the destructor without a Commit. Whoever holds the coordinator sees all of it or nothing.
class Transaction {
 public:
  Transaction(CoordinatorState& state, Store& store, std::vector<std::string>& events);
  ~Transaction();
  Transaction(const Transaction&) = delete;
  Transaction& operator=(const Transaction&) = delete;

  // REQUIRES: it exists. References are good until the transaction ends or the entry is deleted.
  Job& MutableJob(const std::string& name);
  Worker& MutableWorker(const std::string& name);
  // Adds or replaces.
  void PutJob(Job job);
  void PutWorker(Worker worker);
  void DeleteJob(const std::string& name);  // raises the epoch floor to its epoch
  void UseUpEpoch(int64_t epoch);           // no job gets it, or an older one, any more
  void DeleteWorker(const std::string& name);

  // A log line, key=value; part of the outcome only if the commit succeeds.
  void Event(std::string line) { events_.push_back(std::move(line)); }

  // Unavailable: the store failed, and nothing changed. Without changes the store is not asked.
  absl::Status Commit();

 private:
  void SaveJob(const std::string& name);
  void SaveWorker(const std::string& name);
  StoreBatch Batch() const;
  bool ChangesAJob() const;
  void RollBack();

  CoordinatorState& state_;
  Store& store_;
  std::vector<std::string>& committed_events_;
  std::map<std::string, std::optional<Job>> old_jobs_;  // nullopt: it was not there
  std::map<std::string, std::optional<Worker>> old_workers_;
  const int64_t old_epoch_floor_;
  std::vector<std::string> events_;
  bool ended_ = false;
};

}  // namespace shardmesh
