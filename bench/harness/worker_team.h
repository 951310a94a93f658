// WorkerTeam: forked processes that each do a numbered task when told to, all at once; for benchmarks of several
// workers on one host. The processes are the caller's children, pinned round-robin on the cores, and killed with it.
//
// Memory that the parent mapped as shared before Start is seen by all. For one thread of the parent.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardmesh::bench {

class WorkerTeam {
 public:
  // What a child sees of its team.
  class Member {
   public:
    int rank() const { return rank_; }
    // Returns when every member came here. Ends the process when that takes longer than a minute.
    void Barrier();

   private:
    friend class WorkerTeam;
    Member(WorkerTeam& team, int rank) : team_(team), rank_(rank) {}
    WorkerTeam& team_;
    const int rank_;
  };
  // Does task `task`; false: its result was wrong.
  using Work = std::function<bool(int task)>;
  // Called in each child, before its first task.
  using Setup = std::function<Work(Member& member)>;

  // Forks. REQUIRES: the calling process has one thread.
  static absl::StatusOr<std::unique_ptr<WorkerTeam>> Start(int size, Setup setup);
  ~WorkerTeam();  // ends the children

  // Has every member do `task`; returns the seconds until the last one was done.
  // Internal: a member ended, or said that its result is wrong. DeadlineExceeded: longer than two minutes.
  absl::StatusOr<double> Run(int task);

  // Processor time that the members have used so far, by all of their threads, in seconds.
  double ProcessorSeconds() const;

 private:
  struct Page {
    alignas(64) std::atomic<uint32_t> go, done, barrier;
    alignas(64) std::atomic<int> task, finished, wrong, arrived;
  };
  WorkerTeam() = default;
  void ChildLoop(int rank, const Setup& setup);
  absl::Status CheckChildren();

  Page* page_ = nullptr;
  int size_ = 0;
  std::vector<pid_t> children_;
};

}  // namespace shardmesh::bench
