// Pass: executes commands on one worker's shard: the fused reduce -> step -> gather over the host's shared memory, the
// placing of initial weights, and the digest.
//
// One pass per step: for each chunk of rotating storage, read every slot's gradient of my shard through mapped memory,
// sum in tree order, run the optimizer in the formats of its weights and states, store both where the last chunk lay,
// and write the new weights into the parameter window and, when this version is published, into its publication.
// Nothing is read or written twice. Replicas of a shard all step it, and share the writing of the window: chunk c is
// written by replica c mod R. Frozen weights are placed with the initial weights, in the window and every publication,
// and not read or written again.
//
// Weights that are gathered in codes (core/gather_format.h) are not copied by the step: it raises the largest
// magnitudes of their scales while they are in cache, and kGather, when those of all shards are in, reads them again
// and codes them.
//
// Ranges of the shard are spread over threads; results do not depend on how many. Execute is for one thread at a time.
// No allocation in a step.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/job.h"
#include "core/layout.h"
#include "kernels/gathered.h"
#include "kernels/optimizer_step.h"
#include "worker/control_page.h"
#include "worker/host_memory.h"
#include "worker/shard_storage.h"
#include "worker/thread_team.h"
#include "worker/trace.h"

namespace shardmesh {

class Pass {
 public:
  // All arguments are borrowed and outlive the object. `threads` >= 1. `trace` gets a span for each range; may be null.
  Pass(const JobSpec& job, const Plan& plan, ShardPlace place, HostMemory& host, ShardStorage& storage, int threads,
       Trace* trace = nullptr);

  // Executes a command; running it again gives the same bytes. `initial` is this shard's piece of initial weights
  // (shard.proto), needed by kInit only. Returns the shard's digest for kDigest, else 0.
  uint64_t Execute(const Command& command, uint64_t seq, const float* initial);

  // Bytes of weights, without their scales, that steps wrote into the parameter window since construction. Thread-safe.
  int64_t gathered_bytes() const { return gathered_bytes_.load(std::memory_order_relaxed); }

 private:
  // Whether a command has anything to do in a range.
  bool Works(const Command& command, int range) const;
  void StepRange(const Command& command, uint64_t seq, int range);
  // The sums of squares of a range's gradients; replicas share the chunks.
  void SquareRange(const Command& command, int range);
  void StepChunk(const Command& command, int range, int64_t chunk);
  // Of new weights in a coded bucket: raises the maxima; writes codes and scales.
  void RaiseRun(int range, int parity, const ChunkRun& run);
  void GatherRange(const Command& command, int range);
  GatheredRun GatheredOf(int range, int parity, const ChunkRun& run) const;
  // Where the slots' gradients of a bucket's element lie.
  void Gradients(const Bucket& bucket, int64_t element, const void* (&gradients)[kMaxSlots]) const;
  // What all runs of a bucket and a parameter group share.
  OptimizerContext ContextOf(const Command& command, const Bucket& bucket, int group) const;
  // Weights as pushed, states of zeros.
  void PlaceInitial(const Command& command, int range, const float* initial);
  void PlaceRun(const Command& command, int range, const ChunkRun& run, const float* weights);
  uint64_t DigestRange(const Command& command, int range) const;
  // Whether this worker is the replica that writes what shards share of a chunk.
  bool Writes(int64_t chunk) const { return chunk % plan_.num_replicas() == place_.replica; }
  // The places that get the new weights of a chunk, at element `offset` of the range; returns how many: the window and
  // the command's publication, if any; of frozen weights, which are placed once, every publication.
  int Copies(const Command& command, int range, int64_t chunk, int64_t offset, void** copies) const;

  const JobSpec& job_;
  const Plan& plan_;
  const ShardPlace place_;
  HostMemory& host_;
  ShardStorage& storage_;
  Trace* const trace_;
  const OptimizerStepFn step_, squares_;
  const float divide_scale_;
  const std::vector<float> zeros_;      // of a chunk
  std::vector<int64_t> initial_begin_;  // by range: elements before it in the piece of initial weights
  std::atomic<int64_t> gathered_bytes_{0};
  ThreadTeam team_;
};

}  // namespace shardmesh
