// ResidencyTable: the words of a job with bucket residency, behind the control block (control_block.h).
//
// Gradients. A trainer declares a bucket when its gradients are complete, in any order, while others are still written.
// When all slots have declared it, the lead decides kReduceBucket: every worker sums its shard into memory of its own
// (worker/memory/gradient_sums.h), and the lead gives the slots' pages of that bucket back. The step is decided when
// every bucket is summed and every slot declared, and reads the sums.
// With pulled slots (pulled_words.h) nothing is declared by bucket: kMerge sums whole slots, and the lead then gives
// the pages of their windows back.
//
// Weights. A trainer acquires a bucket before it reads it. Of a bucket that is used and not held, the lead decides
// kGatherBucket: every worker writes its part of the committed version into the parameter window. Steps rewrite the
// buckets that are held. When nobody uses one any more, the lead gives its pages back.
//
// These words outlive a worker whose memory is retained. So a use belongs to whoever may still have it after the worker
// was killed: that of an attached session to its first slot, or to its seat, until that is given back; that of a call
// to the rank that answers it, whose next incarnation takes it back. A word of a session says which request changed it
// last: the session repeats a request that a killed worker did not answer, and it counts once.
//
// A view: no memory of its own. All words are lock-free atomics, zero at creation.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/job/plan.h"
#include "worker/control/control_block.h"

namespace shardmesh {

// Uses and `held` are changed as a reader's pin and a publication's version: who acquires counts itself and then looks
// whether the bucket is held; the lead takes `held` away and then looks for uses. With sequentially consistent order
// one of them sees the other. The next incarnation of a lead that is killed meanwhile goes on from the state that it
// finds.
inline constexpr int32_t kBucketAbsent = 0;   // its pages are given back
inline constexpr int32_t kBucketHeld = 1;     // the window has the committed version of it
inline constexpr int32_t kBucketAsked = 2;    // it has that still, and the lead looks for uses
inline constexpr int32_t kBucketLeaving = 3;  // there were none: its pages are being given back

struct alignas(64) BucketWords {
  std::atomic<int32_t> held;     // one of these
  std::atomic<int64_t> reduced;  // newest step for which every worker has summed it, and its pages were given back
  // Of a job on several hosts, while a command is executed: 1: another host's window gets it and this one does not hold
  // it, so this host's members write it there for the other one; afterwards its pages are given back.
  std::atomic<int32_t> lent;
  std::atomic<uint64_t> takers;  // and the hosts whose windows get it, bit h: host h's
};

// Uses of a bucket by one session: how many, and the request that made them so many.
inline constexpr int kMaxUses = 0xffff;
constexpr uint64_t UseWord(uint64_t request, int count) { return request << 16 | static_cast<uint64_t>(count); }
constexpr int UsesIn(uint64_t word) { return static_cast<int>(word & kMaxUses); }

class ResidencyTable {
 public:
  // Bytes behind the maxima; 0 with full residency.
  static int64_t NumBytes(const Plan& plan) {
    if (!plan.bucketed()) return 0;
    const auto buckets = static_cast<int64_t>(plan.buckets().size());
    const int64_t gradient_shards = buckets * plan.slots().num_slots * plan.num_shards(),
                  uses = buckets * UsersOf(plan);
    const int64_t waiting = int64_t{kMaxSlots} * plan.num_ranks() + kMaxSlots;
    return kAlignment + buckets * static_cast<int64_t>(sizeof(BucketWords)) +
           static_cast<int64_t>(sizeof(std::atomic<int64_t>)) *
               (uses + waiting + gradient_shards + buckets * plan.slots().num_slots);
  }

  // REQUIRES: a control block of NumBytes more than control block, sums of squares and maxima; plan.bucketed(). The
  // plan outlives the object.
  ResidencyTable(ControlBlock* control, const Plan& plan) : plan_(plan) {
    const auto end = reinterpret_cast<uintptr_t>(Maxima(control, plan) + plan.scales().num_maxima);
    buckets_ = reinterpret_cast<BucketWords*>((end + kAlignment - 1) / kAlignment * kAlignment);
    uses_ = reinterpret_cast<std::atomic<uint64_t>*>(buckets_ + plan.buckets().size());
    const auto buckets = static_cast<int64_t>(plan.buckets().size());
    waiting_ = reinterpret_cast<std::atomic<int64_t>*>(uses_ + buckets * UsersOf(plan));
    waiting_elsewhere_ = waiting_ + int64_t{kMaxSlots} * plan.num_ranks();
    gradient_shards_ = waiting_elsewhere_ + kMaxSlots;
    elsewhere_ =
        gradient_shards_ + static_cast<int64_t>(plan.buckets().size()) * plan.slots().num_slots * plan.num_shards();
  }

  BucketWords& bucket(int bucket) const { return buckets_[bucket]; }
  // A UseWord: of the session of this host whose first slot it is; with pulled slots: whose seat.
  std::atomic<uint64_t>& session_uses(int bucket, int writer) const {
    return uses_[int64_t{bucket} * UsersOf(plan_) + writer];
  }
  // How many uses calls have that the rank answers.
  std::atomic<uint64_t>& call_uses(int bucket, int rank) const {
    return uses_[int64_t{bucket} * UsersOf(plan_) + plan_.slots().num_writers() + rank];
  }
  // Whether anybody on this host uses it.
  bool IsUsed(int bucket) const {
    for (int w = 0; w < plan_.slots().num_writers(); ++w) {
      if (UsesIn(session_uses(bucket, w).load()) != 0) return true;
    }
    for (int r = 0; r < plan_.num_ranks(); ++r) {
      if (call_uses(bucket, r).load() != 0) return true;
    }
    return false;
  }
  // More than 0: a call that the rank answers for the slot's trainer waits until fewer of its buckets are ahead of the
  // sums.
  std::atomic<int64_t>& waiting(int slot, int rank) const { return waiting_[int64_t{slot} * plan_.num_ranks() + rank]; }
  bool Waits(int slot) const {
    for (int r = 0; r < plan_.num_ranks(); ++r) {
      if (waiting(slot, r).load() != 0) return true;
    }
    return false;
  }
  std::atomic<int64_t>& waiting_elsewhere(int slot) const { return waiting_elsewhere_[slot]; }  // on another host
  // Of a job on several hosts: newest step for which, as far as is known here, all gradient shards of a slot's bucket
  // lie on some host.
  std::atomic<int64_t>& elsewhere(int bucket, int slot) const {
    return elsewhere_[int64_t{bucket} * plan_.slots().num_slots + slot];
  }
  // Newest step whose gradient shard of a bucket lies in a slot's window. Those of a bucket are neighbours: they are
  // looked at together.
  std::atomic<int64_t>& gradient_shard(int bucket, int slot, int shard) const {
    return gradient_shards_[(int64_t{bucket} * plan_.slots().num_slots + slot) * plan_.num_shards() + shard];
  }

 private:
  static constexpr int64_t kAlignment = 64;
  static int64_t UsersOf(const Plan& plan) { return plan.slots().num_writers() + plan.num_ranks(); }

  const Plan& plan_;
  BucketWords* buckets_;
  std::atomic<uint64_t>* uses_;
  std::atomic<int64_t>* waiting_;
  std::atomic<int64_t>* waiting_elsewhere_;
  std::atomic<int64_t>* gradient_shards_;
  std::atomic<int64_t>* elsewhere_;
};

}  // namespace shardmesh
