// StepCommands: what members say of executing the lead's commands (worker/lead/lead.h), and what the lead says of the
// bytes that they need. A part of StepProtocol; thread-safe.
#pragma once

#include <vector>

#include "worker/step/step_view.h"

namespace shardmesh {

class StepCommands {
 public:
  explicit StepCommands(const StepView& view) : view_(view) {}

  // Whether every member of this host has executed the newest command.
  bool AllDone() const;
  std::vector<int> NotDone() const;

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
  const StepView& view_;
};

}  // namespace shardmesh
