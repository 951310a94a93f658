// The engine over a StepJob, as shardmesh-worker has it: what a worker process of a benchmark runs, and what its parent
// does in place of the trainers.
#pragma once

#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "bench/step/step_job.h"
#include "worker/lead/engine.h"
#include "worker/lead/one_host.h"
#include "worker/pass/pass.h"
#include "worker/step/step_protocol.h"

namespace shardmesh::bench {

// Another object over the job's control block. `job` outlives it.
std::unique_ptr<StepProtocol> NewStepProtocol(const StepJob& job);

// One worker's, with a pass of one thread; begins to run when made, with its shard of initial weights. For the thread
// that made it.
struct StepEngine {
  // `job` outlives the object.
  StepEngine(StepJob& job, int rank);

  std::unique_ptr<StepProtocol> protocol;
  std::unique_ptr<Pass> pass;
  std::optional<OneHostLead> lead;
  std::unique_ptr<Engine> engine;
  bool staged = false;  // the initial weights were taken
};

// Declares every slot complete for `step`; the seconds from the declaration to the commit. Errors of StepProtocol.
absl::StatusOr<double> DeclareAndAwait(StepProtocol& protocol, const StepJob& job, Step step);

}  // namespace shardmesh::bench
