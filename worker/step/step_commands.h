// StepCommands: what the lead decides and commits, and what members say of executing it. What follows from the state of
// the control block is a pure function (decide.h). A part of StepProtocol; Issue and Commit are for the lead's thread.
#pragma once

#include <vector>

#include "worker/step/facts.h"
#include "worker/step/step_view.h"
#include "worker/versions/publications.h"

namespace shardmesh {

class StepCommands {
 public:
  StepCommands(const StepView& view, Publications& publications) : view_(view), publications_(publications) {}

  // The decision point: writes the command to the control block and decides it. `publication`: that it writes; -1:
  // none. False: it cannot be (the scalars of a group, which were checked when they were declared). REQUIRES: all are
  // done with the one before.
  bool Issue(Command command, const Facts& facts, int publication) const;
  // Whether every member of this host has executed the newest command.
  bool AllDone() const;
  std::vector<int> NotDone() const;
  // Publishes, records the outcome and commits the newest command; a step that quantized weights are to be gathered of
  // is committed with the command that quantizes them. REQUIRES: AllDone().
  void Commit() const;

  // What a member says: it has its initial weights; it has loaded its shard of a checkpoint of that step, with which
  // the job begins when all have the same; it has executed a command.
  void InitialShardReady(Rank rank, uint64_t push_id) const;
  void LoadedReady(Rank rank, uint64_t load_id, Step step) const;
  void Done(Rank rank, uint64_t seq) const;

  // Of a job on several hosts: waits until the slots' gradients of a bucket are on this host. False: aborted.
  bool AwaitGradients(Step step, int bucket) const;
  // The lead says that those of so many first buckets are; a member, that it is done with so many.
  void GradientsHere(Step step, int buckets) const;
  void BucketsDone(Rank rank, uint64_t seq, int buckets) const;
  // Whether every member of this host is done with so many first buckets of a command.
  bool AllBucketsDone(uint64_t seq, int buckets) const;

 private:
  // Fills in what a step computes with. False: a learning rate that no step can have.
  bool WriteScalars(const Command& command, const Facts& facts) const;
  void CommitStep(const Command& command) const;

  const StepView& view_;
  Publications& publications_;
};

}  // namespace shardmesh
