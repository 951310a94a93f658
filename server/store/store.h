// Store: where the coordinator's records outlive its process. The coordinator writes a mutation here before anybody can
// see it, one Batch for each, and reads everything back once, at its start.
// Not thread-safe. The factories are the only way to make one.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/store/records.h"

namespace shardmesh {

// A change, applied as a whole or not at all. Records replace those of the same name.
struct StoreBatch {
  std::vector<WorkerRecord> put_workers;
  std::vector<std::string> delete_workers;
  std::map<std::string, std::string> put_specs;  // by job: a serialized v1::JobSpec; once, with the job's first record
  std::vector<JobRecord> put_jobs;
  std::vector<std::string> delete_jobs;  // with their specs
  int64_t epoch_floor = 0;               // CoordinatorState::epoch_floor; a smaller value changes nothing

  bool empty() const;
};

struct StoreContents {
  std::map<std::string, WorkerRecord> workers;
  std::map<std::string, JobRecord> jobs;
  std::map<std::string, std::string> specs;
  int64_t epoch_floor = 0;
};

class Store {
 public:
  virtual ~Store() = default;

  // On OK the batch survives the death of the process (SQLite: and of the machine). On an error nothing of it was
  // written; the message has the reason. ResourceExhausted: the disk is full. Unavailable: all others.
  virtual absl::Status Write(const StoreBatch& batch) = 0;

  // Everything written so far. DataLoss: what is stored makes no sense; the message says what and where.
  virtual absl::StatusOr<StoreContents> Load() = 0;

  // Looks whether what was written is still where the next process will look for it, and puts it there again if it was
  // removed. A log line, if there was something to do; else "". ResourceExhausted: the disk is full. Unavailable: it is
  // somewhere else, or it cannot be put there; the message says what to do. Until then nothing more is written.
  virtual absl::StatusOr<std::string> Check() { return std::string(); }
};

// Forgets with the process. For tests, and for services that live no longer than their job.
std::unique_ptr<Store> NewMemoryStore();

// One SQLite file (synchronous=FULL), made if it is not there, locked for this process alone. All that was written is
// in that one file between two writes, so that a copy of it has everything. One that an older version wrote is upgraded
// in place; that version does not read it any more. Another program's file is not touched.
//   FailedPrecondition: written by a newer version (both schema versions are named), or by another program.
//   DataLoss: empty, cut, not a SQLite database, or damaged. AlreadyExists: another process has it open.
//   ResourceExhausted: no space. Unavailable: the file or its folder cannot be opened or written (named, with SQLite's
//   reason).
absl::StatusOr<std::unique_ptr<Store>> NewSqliteStore(const std::string& path);

}  // namespace shardmesh
