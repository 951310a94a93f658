// SymmetricGroup: ranks of one host, in one process or in many, that read each other's memory (symmetric_memory.h).
//
// Buffers in the heaps are read where they lie: a reduce-scatter is one pass over the slots, an all-gather one copy. A
// result in the shared heap is everybody's at once: each rank writes its own part, and a piece that lies at its place
// there is not copied at all. Buffers elsewhere go through staging, a part at a time; one rank's are enough for that.
//
// A peer that dies is found by its presence (local/process/presence.h) and named at once, not when the time is up.
#pragma once

#include <memory>

#include "local/process/presence.h"
#include "worker/transport/group.h"
#include "worker/transport/symmetric_memory.h"

namespace shardmesh {

class SymmetricGroup final : public Group {
 public:
  // `memory`: mapped by this rank, shared with other users of the same process. `spin`: how long a rank polls before it
  // sleeps: worth it where every rank has a core of its own.
  // AlreadyExists: another process is this rank. FailedPrecondition: a group has used this memory before.
  static absl::StatusOr<std::unique_ptr<SymmetricGroup>> Join(std::shared_ptr<SymmetricMemory> memory, int rank,
                                                              uint64_t epoch,
                                                              absl::Duration spin = absl::ZeroDuration(),
                                                              RankNames names = {});

  absl::string_view name() const override { return "symmetric"; }
  SymmetricMemory& memory() { return *memory_; }
  void Abort(absl::string_view reason) override;

 protected:
  absl::Status DoBarrier(const CallHeader& header, absl::Duration timeout) override;
  absl::Status DoAllGather(const CallHeader& header, const char* mine, char* all, absl::Duration timeout) override;
  absl::Status DoAllToAll(const CallHeader& header, const char* mine, char* theirs, absl::Duration timeout) override;
  absl::Status DoBroadcast(const CallHeader& header, char* memory, int root, absl::Duration timeout) override;
  absl::Status DoReduceScatter(const CallHeader& header, const SlotSum& sum, float* piece,
                               absl::Duration timeout) override;

 private:
  // A call under way: what it is, and until when its waits may last.
  struct Call {
    const CallHeader& header;
    absl::Duration timeout;
    int64_t until_nanos;
  };

  SymmetricGroup(std::shared_ptr<SymmetricMemory> memory, Presence presence, int rank, uint64_t epoch,
                 absl::Duration spin, RankNames names);

  // Shows `post`, meets all peers and checks that they make the same call.
  absl::Status Begin(const Call& call, const SymmetricPost& post);
  // Returns when every rank has met as often as this one.
  absl::Status Meet(const Call& call);
  absl::Status AwaitSleeping(const Call& call);
  absl::Status Late(const Call& call) const;
  bool AllHere() const;
  bool Ended() const { return page().ended.load(std::memory_order_acquire) != 0; }
  absl::Status WhyEnded() const;
  absl::Status End(const absl::Status& status);

  SymmetricPage& page() const { return memory_->page(); }
  const SymmetricPost& PostOf(int peer) const { return page().ranks[peer].posts[meetings_ % 2]; }
  // A peer's bytes at a place that it gave. FailedPrecondition: they lie outside of the heaps.
  absl::StatusOr<const char*> BytesAt(int peer, int64_t place, int64_t bytes) const;

  // Whether no rank's input lies elsewhere.
  bool AllDirect() const;
  // Moves `bytes` of every rank in parts: fill(begin, bytes, staging) puts this rank's in, drain(peer, begin, bytes,
  // staging) takes a peer's out. A part has no more than `part` bytes.
  template <class Fill, class Drain>
  absl::Status Staged(const Call& call, int64_t bytes, int64_t part, const Fill& fill, const Drain& drain);

  absl::Status GatherDirectly(const Call& call, const char* mine, char* all);
  absl::Status ReduceDirectly(const Call& call, const SlotSum& sum, float* piece);
  absl::Status ReduceStaged(const Call& call, const SlotSum& sum, float* piece);
  absl::StatusOr<bool> ShowSlots(const Call& call, const SlotSum& sum);

  const std::shared_ptr<SymmetricMemory> memory_;
  const Presence presence_;
  const absl::Duration spin_;
  uint64_t meetings_ = 0;
  uint64_t parts_ = 0;  // staged
};

}  // namespace shardmesh
