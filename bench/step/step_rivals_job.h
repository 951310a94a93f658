// The work of bench/step_rivals: a StepJob of one pair of formats, a slot of fp32 gradients for each rank, and a
// process with the engine for each of them. For one thread of the parent.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "bench/harness/worker_team.h"
#include "bench/step/step_engine.h"

namespace shardmesh::bench {

class RivalsJob {
 public:
  enum Task {
    kReady,
    kUpdate,       // each rank's slot in place: the bound
    kCheckFinite,  // each rank's slot, as its trainer's client does before a step
  };

  // Forks the ranks and waits for the initial weights. REQUIRES: the calling process has one thread, elements are a
  // multiple of StepJob::kTensorElements. ResourceExhausted: not enough memory.
  static absl::StatusOr<std::unique_ptr<RivalsJob>> Start(int ranks, int64_t elements, WeightFormat weights,
                                                          StateFormat states);

  // A step of the engine, from the declaration to the commit: seconds.
  absl::StatusOr<double> TakeStep() { return DeclareAndAwait(*protocol_, *job_, Step(next_step_++)); }
  // The seconds until every rank has done it.
  absl::StatusOr<double> Run(Task task) { return team_->Run(task); }

  // Takes a step. Internal: weights, states or window are not, bit for bit, what OptimizerStepReference makes of what
  // was there before; the message says where.
  absl::Status VerifyStep();

  double ProcessorSeconds() const { return team_->ProcessorSeconds(); }
  std::string Formats() const;      // "bf16_sr + dyn8"
  int64_t bytes() const;            // of a slot
  double MovedBytes() const;        // by a step, all ranks: every input read once, every output written once
  std::string WeightsFile() const;  // where a program of the same user finds the window,
  std::string Places() const;       // at which place, and the slots: "0,FILE:4096,FILE:8192"

 private:
  explicit RivalsJob(StepFormats formats) : formats_(formats) {}

  const StepFormats formats_;
  std::unique_ptr<Memory> memory_ = NewProcessMemory();
  std::unique_ptr<StepJob> job_;
  std::unique_ptr<WorkerTeam> team_;
  std::unique_ptr<StepProtocol> protocol_;
  int64_t next_step_ = 1;
};

}  // namespace shardmesh::bench
