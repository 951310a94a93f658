// StepView: what the rules of a step are about: a job's control block on a host (control_block.h), and which member
// looks at it. The rules are in the parts of StepProtocol, each of which is made of a view when it is asked for.
//
// A value. What it points to outlives it.
#pragma once

#include <string>
#include <vector>

#include "core/base/ids.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "local/memory/futex.h"
#include "worker/control/control_block.h"
#include "worker/control/group_table.h"
#include "worker/control/host_ranks.h"
#include "worker/control/trace.h"
#include "worker/step/pulled_slots.h"

namespace shardmesh {

struct StepView {
  ControlBlock* control;
  std::atomic<uint32_t>* notifier;  // the word that the lead waits on
  const JobSpec* job;
  const Plan* plan;
  std::vector<std::string> names;  // the members' worker names by rank, for messages
  HostRanks local;                 // the ranks whose host's control block this is
  Rank self;                       // the member that looks
  Epoch epoch;                     // of the job
  Trace* trace;                    // gets what is declared; may be null

  uint64_t decided() const { return control->decided.load(std::memory_order_acquire); }
  uint64_t committed() const { return control->committed.load(std::memory_order_acquire); }
  Step committed_step() const { return Step(control->committed_step_plus_one.load(std::memory_order_acquire) - 1); }
  const Command& command() const { return control->commands[decided() % 2]; }

  int num_buckets() const { return plan->bucketed() ? static_cast<int>(plan->buckets().size()) : 0; }
  GroupTable Groups() const { return GroupTable(control, *plan); }
  PulledSlots Pulled() const { return PulledSlots(control, *job, *plan, committed_step().value() + 1); }
};

// Notes that slots of a step are declared; with bucket residency one bucket of them.
inline void Traced(Trace* trace, const std::vector<Slot>& slots, Step step, int bucket) {
  if (trace == nullptr) return;
  const int64_t now = MonotonicNanos();
  for (const Slot slot : slots) trace->Add({"declared", step.value(), bucket, slot.value(), 0, now, now});
}

}  // namespace shardmesh
