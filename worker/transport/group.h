// Group: ranks that gather and reduce together. Every rank has a Group of its own, and all of them make the same calls
// in the same order with the same sizes.
//
// Exact mode only: implementations move bytes; every floating-point sum is made here, by the fixed tree of
// core/base/reduction.h, so a result depends on the slots and on nothing else. A call returns when this rank's outputs
// are complete and its inputs may be written again.
//
// Pieces of any size, from memory to memory: exchange_group.h.
//
// Every call has a time limit, and carries the group's epoch, its own number, and what it is: a rank that calls
// something else, with another size or in another epoch, ends in an error that says so, on every rank that met it.
// After an error other than InvalidArgument the group is over: every further call, of every rank, returns the reason
// (Aborted). Form a new group under a new epoch.
//
//   InvalidArgument      an argument is wrong; nothing was sent, the group goes on
//   FailedPrecondition   a peer calls something else, or in another epoch: both are named
//   Unavailable          a peer did not come within the time limit, or is gone: it is named
//   Aborted              the group was ended before, by this rank or another: the message says why
//
// One call at a time, on any thread; Abort at any time, on any thread. Asynchronous calls: group_queue.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/format/format.h"

namespace shardmesh {

// The most ranks of a group, and the most slots of one reduction.
inline constexpr int kMaxGroupRanks = 1024;
inline constexpr int kMaxReducedSlots = 4096;

// What is summed. `holders[s]` is the rank that has slot s; `mine` has the slots of this rank, in the order of their
// numbers, each of size() * elements numbers: piece r, for rank r, begins at element r * elements.
struct SlotSum {
  Format format = Format::kFp32;  // kFp32 or kBf16
  absl::Span<const int> holders;
  absl::Span<const void* const> mine;
  int64_t elements = 0;  // of one piece
};

// What a call is, as its peers see it.
enum class CallKind : uint32_t { kBarrier = 1, kAllGather, kAllToAll, kBroadcast, kReduceScatter, kExchange, kAllocate };
absl::string_view CallKindName(CallKind kind);

// The same on every rank, or the call fails.
struct CallHeader {
  uint64_t epoch = 0;
  uint64_t number = 0;  // 1 for a group's first call
  CallKind kind = CallKind::kBarrier;
  uint32_t detail = 0;  // the root, or a hash of a reduction's format and holders, or of an exchange's transfers
  int64_t bytes = 0;    // that a rank has for a rank
};

// What messages call the ranks of a group that is part of a larger one.
struct RankNames {
  int first = 0, step = 1;
  int operator()(int rank) const { return first + rank * step; }
};

class Group {
 public:
  // REQUIRES: 1 <= size <= kMaxGroupRanks, 0 <= rank < size.
  Group(int rank, int size, uint64_t epoch, RankNames names = {})
      : rank_(rank), size_(size), epoch_(epoch), names_(names) {}
  virtual ~Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  uint64_t epoch() const { return epoch_; }
  virtual absl::string_view name() const = 0;
  int NameOf(int rank) const { return names_(rank); }

  // all[r] = rank r's `mine`, `bytes` each. `mine` may be this rank's place in `all`, and overlaps it in no other way.
  absl::Status AllGather(const void* mine, void* all, int64_t bytes, absl::Duration timeout);

  // theirs[r] = the piece that rank r has for this rank: its mine[rank()]. No overlap.
  absl::Status AllToAll(const void* mine, void* theirs, int64_t bytes, absl::Duration timeout);

  // piece[i] = the tree sum over slots of element rank() * elements + i. `piece` overlaps no slot.
  absl::Status ReduceScatter(const SlotSum& sum, float* piece, absl::Duration timeout);

  // values[i] = the largest of all ranks'; NaN where one is NaN. For short vectors.
  absl::Status AllReduceMax(absl::Span<float> values, absl::Duration timeout);
  // values[i] = the tree sum over ranks. For short vectors.
  absl::Status AllReduceSum(absl::Span<float> values, absl::Duration timeout);

  // Everybody's `bytes` become the root's.
  absl::Status Broadcast(void* memory, int64_t bytes, int root, absl::Duration timeout);

  absl::Status Barrier(absl::Duration timeout);

  // Ends the group for all ranks, as far as they can be reached. The first reason counts.
  virtual void Abort(absl::string_view reason) = 0;

 protected:
  // The calls, with arguments that were checked and a header that is this rank's. Errors as above.
  virtual absl::Status DoBarrier(const CallHeader& header, absl::Duration timeout) = 0;
  virtual absl::Status DoAllGather(const CallHeader& header, const char* mine, char* all, absl::Duration timeout) = 0;
  virtual absl::Status DoAllToAll(const CallHeader& header, const char* mine, char* theirs, absl::Duration timeout) = 0;
  virtual absl::Status DoBroadcast(const CallHeader& header, char* memory, int root, absl::Duration timeout) = 0;
  // Here: one AllToAll for every slot that a rank holds, then this rank's own sums.
  virtual absl::Status DoReduceScatter(const CallHeader& header, const SlotSum& sum, float* piece,
                                       absl::Duration timeout);

  CallHeader NextHeader(CallKind kind, int64_t bytes, uint32_t detail = 0) {
    return {epoch_, ++calls_, kind, detail, bytes};
  }

 private:
  absl::Status CheckSum(const SlotSum& sum, const float* piece) const;
  template <class Combine>
  absl::Status AllReduce(absl::Span<float> values, absl::Duration timeout, const Combine& combine);

  const int rank_, size_;
  const uint64_t epoch_;
  const RankNames names_;
  uint64_t calls_ = 0;
  std::vector<char> gathered_;  // of short vectors, and of slots' pieces
};

// FailedPrecondition: `theirs`, of rank `peer`, is not `mine`. Ranks are named as given, here and below.
absl::Status CheckHeader(const CallHeader& mine, const CallHeader& theirs, int rank, int peer);
std::string DescribeCall(const CallHeader& header);
// Unavailable: those ranks did not come to the call in time. REQUIRES: there are some.
absl::Status MissingRanks(absl::Span<const int> ranks, const CallHeader& header, absl::Duration timeout);
// Whether it says that a rank is gone: its connection ended, here or at a rank that told it.
bool IsGone(const absl::Status& status);
// What every call of a group returns that was ended before.
absl::Status GroupEnded(absl::string_view reason);

// The first rank that an error of a group names beside `self`; -1: none. It reads the words "rank 3" or "ranks 3, 4".
int NamedRank(absl::string_view message, int self);

// piece[i] = the tree sum over slots of slots[s][i], in fp32. No overlap. `streamed`: past the caches, for what is part
// of more than they hold.
void SumSlots(Format format, absl::Span<const void* const> slots, int64_t elements, float* piece,
              bool streamed = false);

}  // namespace shardmesh
