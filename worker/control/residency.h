// ResidencyTable: the words of a job with bucket residency, behind the control block (control_block.h).
//
// Gradients. A trainer declares a bucket when its gradients are complete, in any order, while others are still written.
// When all slots have declared it, the lead decides kReduceBucket: every worker sums its shard into memory of its own
// (worker/memory/gradient_sums.h), and the lead gives the slots' pages of that bucket back. The step is decided when
// every bucket is summed and every slot declared, and reads the sums.
//
// Weights. A trainer acquires a bucket before it reads it. Of a bucket that is used and not held, the lead decides
// kGatherBucket: every worker writes its part of the committed version into the parameter window. Steps rewrite the
// buckets that are held. When nobody uses one any more, the lead gives its pages back.
//
// A view: no memory of its own. All words are lock-free atomics, zero at creation.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/job/plan.h"
#include "worker/control/control_block.h"

namespace shardmesh {

// `uses` and `held` are changed as a reader's pin and a publication's version: who acquires counts itself and then
// looks whether the bucket is held; the lead takes `held` away and then looks at the count. With sequentially
// consistent order one of them sees the other.
struct alignas(64) BucketWords {
  std::atomic<int32_t> uses;     // of all trainers of the host
  std::atomic<int32_t> held;     // 1: the window holds the committed version of it
  std::atomic<int64_t> reduced;  // newest step for which every worker has summed it, and its pages were given back
  // Of a job on several hosts, while a command is executed: 1: another host's window gets it and this one does not hold
  // it, so this host's members write it there for the other one; afterwards its pages are given back.
  std::atomic<int32_t> lent;
};

class ResidencyTable {
 public:
  // Bytes behind the maxima; 0 with full residency.
  static int64_t NumBytes(const Plan& plan) {
    if (!plan.bucketed()) return 0;
    const auto buckets = static_cast<int64_t>(plan.buckets().size());
    const int64_t gradient_shards = buckets * plan.num_slots() * plan.num_shards();
    return kAlignment + buckets * static_cast<int64_t>(sizeof(BucketWords)) +
           static_cast<int64_t>(sizeof(std::atomic<int64_t>)) *
               (2 * kMaxSlots + gradient_shards + buckets * plan.num_slots());
  }

  // REQUIRES: a control block of NumBytes more than control block, sums of squares and maxima; plan.bucketed(). The
  // plan outlives the object.
  ResidencyTable(ControlBlock* control, const Plan& plan) : plan_(plan) {
    const auto end = reinterpret_cast<uintptr_t>(Maxima(control, plan) + plan.num_maxima());
    buckets_ = reinterpret_cast<BucketWords*>((end + kAlignment - 1) / kAlignment * kAlignment);
    waiting_ = reinterpret_cast<std::atomic<int64_t>*>(buckets_ + plan.buckets().size());
    waiting_elsewhere_ = waiting_ + kMaxSlots;
    gradient_shards_ = waiting_elsewhere_ + kMaxSlots;
    elsewhere_ = gradient_shards_ + static_cast<int64_t>(plan.buckets().size()) * plan.num_slots() * plan.num_shards();
  }

  BucketWords& bucket(int bucket) const { return buckets_[bucket]; }
  // More than 0: the slot's trainer waits until fewer of its buckets are ahead of the sums.
  std::atomic<int64_t>& waiting(int slot) const { return waiting_[slot]; }
  std::atomic<int64_t>& waiting_elsewhere(int slot) const { return waiting_elsewhere_[slot]; }  // on another host
  // Of a job on several hosts: newest step for which, as far as is known here, all gradient shards of a slot's bucket
  // lie on some host.
  std::atomic<int64_t>& elsewhere(int bucket, int slot) const {
    return elsewhere_[int64_t{bucket} * plan_.num_slots() + slot];
  }
  // Newest step whose gradient shard of a bucket lies in a slot's window. Those of a bucket are neighbours: they are
  // looked at together.
  std::atomic<int64_t>& gradient_shard(int bucket, int slot, int shard) const {
    return gradient_shards_[(int64_t{bucket} * plan_.num_slots() + slot) * plan_.num_shards() + shard];
  }

 private:
  static constexpr int64_t kAlignment = 64;

  const Plan& plan_;
  BucketWords* buckets_;
  std::atomic<int64_t>* waiting_;
  std::atomic<int64_t>* waiting_elsewhere_;
  std::atomic<int64_t>* gradient_shards_;
  std::atomic<int64_t>* elsewhere_;
};

}  // namespace shardmesh
