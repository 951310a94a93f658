// ThreePasses: the same step as the engine's, done the way a trainer without fusion does it: a reduce pass that writes
// the summed gradient in fp32, a step pass over the local shard, and a gather that copies the whole new weights into
// each process's own memory; a barrier after each of the first two. The arithmetic is the product's own (kernels/), so
// both must give the same bits.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/harness/worker_team.h"
#include "bench/step/step_job.h"
#include "kernels/optimizer_step.h"
#include "kernels/sum/slot_sum.h"
#include "local/memory/segment.h"
#include "worker/control/control_block.h"

namespace shardmesh::bench {

class ThreePasses {
 public:
  // Before the workers are forked: the memory that they share. `job` outlives the object.
  static absl::StatusOr<std::unique_ptr<ThreePasses>> Create(const StepJob& job);

  // In the parent: the weights become those of the job's window, states zero.
  void Initialize();

  // In a worker: the process's own copy of all weights, huge pages asked for.
  static char* NewPrivateCopy(const StepJob& job);

  // One step, from the gradients of the job's slots.
  void Step(WorkerTeam::Member& member, int64_t step, char* private_copy);

  // Whether the private copy holds the shared weights.
  bool Gathered(const char* private_copy) const;
  // In the parent. Internal: weights or states differ from the job's; the message says where.
  absl::Status CompareWithJob(int parity) const;

 private:
  struct Piece {  // a run of one tensor in a shard
    int bucket;
    Run run;
    int64_t at;  // elements before it in the shard's flat states
  };
  explicit ThreePasses(const StepJob& job) : job_(job) {}
  absl::Status CompareShard(int rank, int parity) const;

  const StepJob& job_;
  const SlotSumFn reduce_ = BestSlotSum();
  const OptimizerStepFn step_ = BestOptimizerStep();
  Segment weights_;                               // all of them, as the job's window
  std::vector<Segment> moment1_, moment2_, sum_;  // by rank
  std::vector<std::vector<Piece>> pieces_;        // by rank
};

// One fused step in which every output is its own input, chunk by chunk as the engine walks, weights into the window
// too: what rotating storage is compared with.
void StepInPlace(StepJob& job, int rank, const Command& command);

}  // namespace shardmesh::bench
