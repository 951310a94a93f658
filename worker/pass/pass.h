// Pass: executes commands on one worker's shard: the fused reduce -> step -> gather over the host's shared memory, the
// placing of initial weights, and the digest.
//
// One pass per step: for each chunk of rotating storage, read every slot's gradient of my shard through mapped memory,
// sum in tree order, run the optimizer in the formats of its weights and states, store both where the last chunk lay,
// and write the new weights into the parameter window and, when this version is published, into its publication.
// Nothing is read or written twice. Replicas of a shard all step it, and those of one host share the writing of its
// window: of R of them, the (c mod R)-th writes chunk c. Frozen weights are placed with the initial weights, in the
// window and every publication, and not read or written again. A kernel writes each copy with the weights; where the
// window is larger than caches are, the pass copies each chunk behind it, while it is in cache, past the caches.
//
// Matrices that Muon steps are whole at this worker (core/job/plan.h). They are stepped one after the other, behind all
// else: first all threads make the update in the storage's scratch, then the chunks follow as everywhere. A worker that
// is killed on the way makes the update again from the old momentum, or goes on with the complete one.
//
// Weights of int8_row that are gathered as they are stored are copied, and beside them their rows' scales.
// Weights that are gathered in other codes (core/format/gather_format.h) are not copied by the step: it raises the
// largest magnitudes of their scales while they are in cache, and kQuantize, when those of all shards are in, reads
// them again and codes them.
//
// With bucket residency (residency.h) the step reads, in place of the slots, the sums that kReduceBucket made of them:
// one slot in fp32 whose sum is already there, so the bits are the same. The window is written where it holds the
// bucket, and kGatherBucket writes a bucket of the committed version into it. A version on demand (kPublish) is a copy
// of the window, or, where that lacks buckets, written as kGatherBucket would.
//
// With pulled slots (pulled_words.h) the same, of sums that kMerge made: results of slots in the windows of trainers
// and sums of some slots become one sum, in a copy of its own, so kMerge can be executed again.
//
// A job with check_every is looked over while it steps (pass_check.cc): one of so many chunks, drawn anew for each
// step, is computed twice, and its digest kept until the step that reads it next.
//
// Who wants a copy of the shard (snapshot.h) gets it with the next digest, which reads every byte anyway.
//
// Ranges of the shard are spread over threads; results do not depend on how many. Execute is for one thread at a time.
// No allocation in a step, but what a thread's first step of int8_row weights needs for its rows.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/sync.h"
#include "core/job/absent_weights.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "kernels/encode/gathered.h"
#include "kernels/muon/muon.h"
#include "kernels/optimizer_step.h"
#include "kernels/sum/slot_sum.h"
#include "worker/control/control_block.h"
#include "worker/control/damage.h"
#include "worker/control/group_table.h"
#include "worker/control/host_ranks.h"
#include "worker/control/trace.h"
#include "worker/memory/gradient_sums.h"
#include "worker/memory/host_memory.h"
#include "worker/memory/shard_storage.h"
#include "worker/pass/snapshot.h"
#include "worker/pass/step_pass.h"
#include "worker/pass/thread_team.h"

namespace shardmesh {

class Pass final : public StepPass {
 public:
  // All arguments are borrowed and outlive the object. `threads` >= 1. `trace` gets a span for each range; may be null.
  // `sums`: of a job that has them. `ranks`: those of this host; by default all are on it.
  Pass(const JobSpec& job, const Plan& plan, ShardPlace place, HostMemory& host, ShardStorage& storage, int threads,
       Trace* trace = nullptr, GradientSums* sums = nullptr, std::optional<HostRanks> ranks = std::nullopt);

  // As Run, but for what is damaged.
  uint64_t Execute(const Command& command, uint64_t seq, const float* initial, BucketGate* gate = nullptr);

  absl::StatusOr<uint64_t> Run(const Command& command, uint64_t seq, const float* initial, BucketGate* gate) override;
  // Another kernel than the best of this machine, such as one that errs. For tests.
  void UseKernel(OptimizerStepFn step) { step_ = step; }
  // Where a digest finds the copy of the shard that somebody wants, if any.
  void TakeSnapshots(SnapshotPort* port) { snapshots_ = port; }
  // Called again and again from Execute's thread while it sums what trainers have finished, for others that wait.
  void WhileMerging(std::function<void()> call) { while_merging_ = std::move(call); }
  // Whether copies go past the caches, whatever the window's size. For tests.
  void StreamCopies(bool stream) { stream_copies_ = stream; }

  absl::Status GiveBackGradients(const Command& command) override;
  absl::Status GiveBackWeights(int bucket) override;
  int64_t gathered_bytes() const override { return gathered_bytes_.load(std::memory_order_relaxed); }
  int64_t shard_bytes() const override { return storage_.num_bytes(); }

 private:
  // False: the gate said no.
  bool AwaitGradients(const Command& command, int range, BucketGate* gate) const;
  void RangeDone(uint64_t seq, int bucket, BucketGate& gate);
  // Whether a command steps a range that is a matrix, which takes all threads.
  bool StepsMatrix(const Command& command, int range) const {
    return command.kind == CommandKind::kStep && storage_.ranges()[range].matrix >= 0;
  }
  // Whether a command has anything to do in a range.
  bool Works(const Command& command, int range) const;
  // Returns the range's digest for kDigest, else 0.
  uint64_t ExecuteRange(const Command& command, uint64_t seq, int range, const float* initial);
  // A range that is a matrix, on all threads.
  void StepMatrix(const Command& command, uint64_t seq, int range);
  MuonMatrix MatrixOf(const Command& command, int tensor) const;
  void StepRange(const Command& command, uint64_t seq, int range);
  // The sums of squares of a range's gradients; replicas share the chunks.
  void SquareRange(const Command& command, int range);
  int64_t StepChunk(const Command& command, int range, int64_t chunk);  // bytes that went into the window
  // Of a job with check_every: StepChunk, with what is looked at before and behind it.
  int64_t StepChecked(const Command& command, int range, int64_t chunk);
  void Damaged(Damage::What what, int range, int64_t chunk);
  // After a command that has read a run's gradients, with the sums of squares that it told: whether they are finite
  // still, as all are that are declared.
  void LookAgain(int range, int64_t chunk, const OptimizerRun& run);
  uint64_t DigestChunk(int range, int parity, int64_t chunk) const;  // never 0
  // Of new weights in a quantized bucket: raises the maxima; writes codes and scales.
  void RaiseRun(int range, int parity, const ChunkRun& run);
  void QuantizeRange(const Command& command, int range);
  // Of bucket residency: sums the slots; writes the weights as they are stored into the window.
  void ReduceRange(int range);
  void GatherRange(const Command& command, int range);
  // Of pulled slots (pass_merge.cc): sums what is finished of a subtree.
  class Merger;
  void MergeRange(const Command& command, int range);
  absl::Status GiveBackWindows(const Command& command);
  bool InWindow(int bucket) const;  // whether the parameter window holds it
  GatheredRun GatheredOf(int range, int parity, const ChunkRun& run) const;
  // Of tensors that are gathered as nf4, before kQuantize or kGatherBucket codes them: what their scales share.
  void FindNf4Means(const Command& command);
  // A step of a run, but for copies and what it tells. `gradients` are its slots'.
  OptimizerRun RunOf(const Command& command, int range, const ChunkRun& run, const void* (&gradients)[kMaxSlots]) const;
  // Where the slots' gradients of a bucket's element lie, or their sum; how many there are.
  int Gradients(const Command& command, int bucket, int64_t element, const void* (&gradients)[kMaxSlots]) const;
  // What all runs of a bucket and a parameter group share.
  OptimizerContext ContextOf(const Command& command, const Bucket& bucket, int group) const;
  // Weights as pushed, states of zeros.
  void PlaceFirst(const Command& command, int range, const float* initial);
  void PlaceRun(const Command& command, int range, const ChunkRun& run, const float* weights);
  uint64_t DigestRange(const Command& command, int range) const;  // and copies it, where somebody wants that
  uint64_t DigestRun(int range, int parity, const ChunkRun& run, const ShardStorage* copy = nullptr) const;
  // Whether this worker is the replica that writes what shards share of a chunk.
  bool Writes(int64_t chunk) const { return chunk % share_.count == share_.index; }
  void PublishShare(const Command& command);
  // What gets the new weights of a bucket; returns how many: the window and the command's publication, if any; of
  // frozen weights, which are placed once, every publication.
  int Places(const Command& command, int bucket, const Segment** places) const;
  // Those that get the weights of a chunk, at element `offset` of the range.
  int Copies(const Command& command, int range, int64_t chunk, int64_t offset, void** copies) const;
  // Of int8_row weights that lie at `parity`: their scales.
  void CopyScales(const Command& command, int range, int parity, const ChunkRun& run) const;

  const JobSpec& job_;
  const Plan& plan_;
  const AbsentWeights absent_;
  const Rank rank_;
  const HostRanks ranks_;
  const ReplicaShare share_;
  HostMemory& host_;
  const GroupTable groups_;
  ShardStorage& storage_;
  Trace* const trace_;
  GradientSums* const sums_;  // null: a step reads slots
  OptimizerStepFn step_;
  const OptimizerStepFn squares_;
  const SlotSumFn sum_;
  bool stream_copies_;
  std::vector<float> zeros_;            // of the longest chunk
  std::vector<int64_t> initial_begin_;  // by range: elements before it in the shard of initial weights
  std::vector<int> nf4_tensors_;        // of which this shard has a part and which are gathered as nf4, ascending
  std::vector<float> nf4_means_;        // by tensor; empty: there is none
  std::atomic<int64_t> gathered_bytes_{0};
  std::function<void()> while_merging_;
  SnapshotPort* snapshots_ = nullptr;
  std::shared_ptr<Snapshot> snapshot_;  // that the command fills
  std::thread::id executing_;           // Execute's thread
  const int threads_;
  MuonScratch scratch_;
  Mutex gate_mu_;
  std::vector<int> ranges_left_ ABSL_GUARDED_BY(gate_mu_);  // by bucket, of the command that is executed
  int buckets_done_ ABSL_GUARDED_BY(gate_mu_) = 0;          // the first ones
  ThreadTeam team_;
};

}  // namespace shardmesh
