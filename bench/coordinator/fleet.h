// Fleet: a coordinator's state machine in this process, and the calls of all the workers of a job, one after the other,
// as the service would make them. What each call returns is checked outside the time that is measured.
//
// A job of more ranks than workers can have is made by JobDefinition::CreateUnrefused; one of at most kMaxHostRanks as
// the service makes it. Thread-compatible.
//
//   ASSIGN_OR_RETURN(auto fleet, Fleet::Make({1024, 1024, folder + "/state.db"}));
//   RETURN_IF_ERROR(fleet->Join().status());
//   ASSIGN_OR_RETURN(const Cost cost, fleet->CreateJobs());
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/coordinator/coordinator.h"

namespace shardmesh::bench {

inline constexpr int kRanksPerHost = 8;

struct FleetOptions {
  int ranks = 64;            // workers, each a rank of one job
  int ranks_per_job = 64;    // divides `ranks`
  std::string state;         // file of the SQLite store; empty: the store in memory
  double most_seconds = 60;  // of the calls of all ranks for one purpose; then the rest is reckoned from those made
};

// What the calls of all ranks took. Where they took longer than FleetOptions::most_seconds, `calls` ranks made theirs,
// spread over all, and the seconds are scaled to all of them.
struct Cost {
  double elapsed = 0;    // seconds
  double processor = 0;  // seconds of this process
  int calls = 0;
};
Cost operator+(const Cost& a, const Cost& b);  // `calls`: the fewer

// A worker as it introduces itself, with names, addresses and paths of a usual length.
WorkerIdentity FleetWorker(int number);
// A job of two parameters for so many ranks.
absl::StatusOr<std::shared_ptr<const JobDefinition>> FleetJob(int number, int ranks);

class Fleet {
 public:
  // Errors of the store and of the coordinator.
  static absl::StatusOr<std::unique_ptr<Fleet>> Make(const FleetOptions& options);

  // Each: Internal: the coordinator's answer is wrong; the message says which.
  // `most_seconds`: for all, else the jobs would wait for the rest.
  absl::StatusOr<Cost> Join(double most_seconds = std::numeric_limits<double>::infinity());
  absl::StatusOr<Cost> CreateJobs();
  // The first heartbeat of each worker, which has its assignment.
  absl::StatusOr<Cost> TakeAssignments();
  // The heartbeat of each worker that says READY. Then the jobs are READY, unless calls were left out.
  absl::StatusOr<Cost> ReportReady();
  // One heartbeat of each worker, with a step more than before.
  absl::StatusOr<Cost> Beat();
  absl::StatusOr<Cost> Tick();
  // The tick that finds that no worker was heard for the time-out.
  absl::StatusOr<Cost> LoseAll();
  // What a client that waits for the first job is told, once.
  absl::StatusOr<Cost> Describe();

  int num_jobs() const { return options_.ranks / options_.ranks_per_job; }
  int64_t writes() const { return *writes_; }  // batches that the store was given
  // Bytes of an assignment as it is sent. REQUIRES: assignments were taken.
  int64_t assignment_bytes() const { return assignment_bytes_; }
  // The coordinator, for a service. Nothing else may be called then.
  std::unique_ptr<Coordinator> Release() { return std::move(coordinator_); }

 private:
  explicit Fleet(FleetOptions options) : options_(std::move(options)) {}
  // `call` for all ranks, in chunks; `check` behind each chunk, outside the time.
  absl::StatusOr<Cost> ForRanks(double most_seconds, const std::function<absl::Status(int)>& call,
                                const std::function<absl::Status()>& check);
  absl::Status Check(int worker, const std::vector<Assignment>& told);
  absl::Status CheckJobs(bool ready) const;

  const FleetOptions options_;
  std::shared_ptr<int64_t> writes_ = std::make_shared<int64_t>(0);
  std::unique_ptr<Coordinator> coordinator_;
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(24 * 365);
  std::vector<WorkerIdentity> workers_;
  std::vector<std::shared_ptr<const JobDefinition>> jobs_;
  std::vector<std::vector<MemberReport>> reports_;  // by worker
  int64_t assignment_bytes_ = 0;
  int64_t step_ = 0;
  bool ready_ = false;  // all jobs
};

}  // namespace shardmesh::bench
