// StepProtocol: the rules over a ControlBlock (control_block.h), as seen by one member. Each part has one subject:
//
//   declarations()  what trainers say of a step, and whether they may
//   slots()         who may write a slot
//   buckets()       of jobs with bucket residency: what is declared, summed, used and held
//   pulling()       of jobs whose slots are pulled: taking and finishing them
//   outcomes()      what became of a step, and what one waits for
//   commands()      what members say of executing the lead's commands
//   tickets()       digests and versions that somebody asks for
//   members()       who is there, why the job was aborted, and a member's next incarnation
//
// No threads, and no memory but what a trainer of a pulled slot has finished and the lead has not said yet: every
// object over the same control block is a view of the same state.
//
// Thread-safe between threads and processes, but for StepPulling, which is for the lead's thread. Calls that wait take
// a time limit and end early on abort.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "worker/step/step_buckets.h"
#include "worker/step/step_commands.h"
#include "worker/step/step_declarations.h"
#include "worker/step/step_members.h"
#include "worker/step/step_outcomes.h"
#include "worker/step/step_pulling.h"
#include "worker/step/step_slots.h"
#include "worker/step/step_tickets.h"
#include "worker/step/step_view.h"
#include "worker/versions/publications.h"

namespace shardmesh {

class StepProtocol {
 public:
  // `control`, `notifier`, `job` and `plan` must outlive the object. `notifier`: the word that the lead waits on, the
  // same one for all objects over a control block. `names` are the members' worker names by rank, for messages.
  // `local`: the ranks whose host's control block this is; by default all. `self`: the member that the object works
  // for. `trace` may be null: then nothing that is declared is traced.
  StepProtocol(ControlBlock* control, std::atomic<uint32_t>* notifier, const JobSpec* job, const Plan* plan,
               std::vector<std::string> names, std::optional<HostRanks> local = std::nullopt, Rank self = Rank(0),
               Epoch epoch = Epoch(0), Trace* trace = nullptr)
      : view_{control, notifier, job,  plan, std::move(names), local.value_or(HostRanks::OneHost(plan->num_ranks())),
              self,    epoch,    trace},
        publications_(control, job, self),
        seat_requests_(job->num_trainers) {}

  // Parts are made when they are asked for, and must not outlive the object.
  StepDeclarations declarations() const { return StepDeclarations(view_); }
  StepSlots slots() const { return StepSlots(view_); }
  StepBuckets buckets() const { return StepBuckets(view_); }
  StepPulling pulling() { return StepPulling(view_, seat_requests_); }
  StepOutcomes outcomes() const { return StepOutcomes(view_); }
  StepCommands commands() const { return StepCommands(view_); }
  StepTickets tickets() const { return StepTickets(view_, publications_); }
  StepMembers members() const { return StepMembers(view_); }
  Publications& publications() { return publications_; }
  const Publications& publications() const { return publications_; }

  // In a member's next incarnation, before anything else: StepMembers::TakeOver.
  void TakeOver() { members().TakeOver(publications_); }

  uint64_t decided() const { return view_.decided(); }
  uint64_t committed() const { return view_.committed(); }
  Step committed_step() const { return view_.committed_step(); }
  const Command& command() const { return view_.command(); }

  ControlBlock* control() const { return view_.control; }
  const JobSpec& job() const { return *view_.job; }
  const Plan& plan() const { return *view_.plan; }
  std::atomic<uint32_t>& notifier() const { return *view_.notifier; }
  int num_ranks() const { return view_.plan->num_ranks(); }
  const HostRanks& local() const { return view_.local; }

 private:
  const StepView view_;
  Publications publications_;
  std::vector<SeatRequest> seat_requests_;  // of a job with pulled slots on several hosts
};

}  // namespace shardmesh
