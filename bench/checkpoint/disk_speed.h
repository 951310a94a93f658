// DiskSpeed: what files and memory cost at best on this machine: files written from memory and synced, files read from
// the page cache, and memory touched first, by some processes at once, each its own. The bound of checkpoints. For one
// thread; removes what it wrote.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "bench/harness/worker_team.h"

namespace shardmesh::bench {

class DiskSpeed {
 public:
  // Forks. REQUIRES: the calling process has one thread. Errors of WorkerTeam; those of files end a measurement.
  static absl::StatusOr<std::unique_ptr<DiskSpeed>> Start(int processes, const std::string& folder);

  // Seconds until `bytes`, in equal parts, are in the processes' files and on the disk.
  absl::StatusOr<double> Write(int64_t bytes);
  // Seconds in which they read as many bytes of files that are in the page cache, into memory that they have.
  absl::StatusOr<double> ReadCached(int64_t bytes);
  // Seconds in which they take as much fresh memory, and touch it; given back. On a virtual machine that gives free
  // memory back to its host, the next ones to take memory within a second or two find it there.
  absl::StatusOr<double> TouchMemory(int64_t bytes);

 private:
  DiskSpeed() = default;
  absl::StatusOr<double> Run(int task, int64_t bytes);

  int64_t* bytes_ = nullptr;  // of one process; shared with them
  int processes_ = 0;
  std::unique_ptr<WorkerTeam> team_;
};

}  // namespace shardmesh::bench
