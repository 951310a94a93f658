// The work of bench/collectives: ranks as processes, each with a vector of fp32, that reduce-scatter and all-gather
// through SymmetricGroup (worker/transport/symmetric_group.h). Tasks are for a WorkerTeam, all ranks at once.
//
// The group's memory is mapped before the ranks are forked, so that other programs can read slots and result through
// the parent's descriptor. For one thread of the parent.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "bench/harness/worker_team.h"
#include "local/memory/segment.h"
#include "worker/transport/symmetric_memory.h"

namespace shardmesh::bench {

class CollectivesJob {
 public:
  enum Task {
    kReady,
    kCopy,     // each rank's vector into private memory, with streaming stores: the bound
    kShared,   // slots in the heaps; one result in the shared heap
    kPrivate,  // slots in the heaps; a copy of the result in each rank's private memory
    kStaged,   // slots in private memory; private copies
    // That the result is the tree sum of core/base/reduction.h, bit by bit, wherever the last of the above put it.
    kCheckShared,
    kCheckPrivate,
    // kCalls calls each.
    kSpinningBarrier,
    kSleepingBarrier,
    kSpinningGather,
    kSleepingGather,
  };
  static constexpr int kCalls = 2000;
  static constexpr int64_t kGatherBytes = 64;

  // `elements` of a rank's vector, a multiple of 64 * ranks. ResourceExhausted: not enough memory.
  static absl::StatusOr<std::unique_ptr<CollectivesJob>> Create(int ranks, int64_t elements);

  int ranks() const { return ranks_; }
  int64_t bytes() const { return elements_ * 4; }  // of a rank's vector

  // The seconds until every rank has done it. Internal: one of them failed, as it says on standard error.
  absl::StatusOr<double> Run(Task task) { return team_->Run(task); }

  // Processor time that the ranks have used so far.
  double ProcessorSeconds() const { return team_->ProcessorSeconds(); }

  // Where a program of the same user finds the memory, and in it, in bytes: result, slot of rank 0, of rank 1, ...
  std::string MemoryPath() const;
  std::string Places() const;  // "0,4096,..."

 private:
  struct Words;  // that the ranks write for the parent
  class Worker;

  CollectivesJob(int ranks, int64_t elements) : ranks_(ranks), elements_(elements) {}
  absl::Status Start();

  const int ranks_;
  const int64_t elements_;
  std::shared_ptr<SymmetricMemory> bulk_, spinning_, sleeping_;
  Segment words_memory_;
  Words* words_ = nullptr;
  std::unique_ptr<WorkerTeam> team_;
};

}  // namespace shardmesh::bench
