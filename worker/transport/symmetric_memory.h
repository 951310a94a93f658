// SymmetricMemory: one segment that all ranks of a group map, on one host. It has a page of words through which they
// meet, a heap for each rank, which all can read, and a heap that all share.
//
//   page | staging of each rank | heap of each rank | shared heap
//
// Ranks that allocate in the same order get the same places, each in its own heap: a peer's buffer is found by
// arithmetic. What a peer writes into the page is checked before it is used. Allocation is for one thread; everything
// else is thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "local/memory/segment.h"
#include "worker/transport/group.h"

namespace shardmesh {

inline constexpr int kMaxSymmetricRanks = 64;

// What a rank shows its peers during a call.
struct SymmetricPost {
  CallHeader header;
  int64_t in = -1;   // where in the segment its input lies; -1: elsewhere
  int64_t out = -1;  // and its output
};

// One rank's words.
struct SymmetricRank {
  alignas(64) std::atomic<uint64_t> arrived;  // how often it has met its peers
  std::atomic<uint32_t> joined;               // 1: it has been there (then a presence that ended means it is gone)
  alignas(64) SymmetricPost posts[2];         // of odd and even meetings
  int64_t slots[2][kMaxReducedSlots];         // of a reduction: where they lie; -1: elsewhere
};

struct SymmetricPage {
  alignas(64) std::atomic<uint32_t> notifier;  // what sleeping ranks wait on
  alignas(64) std::atomic<uint32_t> sleepers;  // how many may wait
  alignas(64) std::atomic<uint32_t> ended;     // 0, 1: the reason is being written, 2: it is there
  char reason[240];                            // ends with 0
  SymmetricRank ranks[kMaxSymmetricRanks];
};

class SymmetricMemory {
 public:
  // Of every rank's own heap, and of the shared one, in bytes. Staging moves what lies in no heap.
  struct Sizes {
    int64_t own = 0, shared = 0, staging = 1 << 20;
  };

  // InvalidArgument: sizes. ResourceExhausted: there is not so much memory.
  static absl::StatusOr<SymmetricMemory> Create(int ranks, const Sizes& sizes);
  // Maps another rank's memory from its descriptor. InvalidArgument: it is not of these sizes.
  static absl::StatusOr<SymmetricMemory> Map(UniqueFd fd, int ranks, const Sizes& sizes);

  int ranks() const { return ranks_; }
  int64_t staging_bytes() const { return sizes_.staging; }
  int fd() const { return segment_.fd(); }
  SymmetricPage& page() const { return *reinterpret_cast<SymmetricPage*>(segment_.data()); }
  char* staging(int rank) const { return At(staging_begin_ + rank * sizes_.staging); }

  // Memory in the heap of `rank` (as every rank allocates it for itself), or in the shared one. Streams of one pass get
  // different places modulo 2 MiB. ResourceExhausted: the heap is full.
  absl::StatusOr<char*> Allocate(int rank, int64_t bytes);
  absl::StatusOr<char*> AllocateShared(int64_t bytes);

  // Where `bytes` at `memory` lie in the segment's heaps; -1: not there.
  int64_t PlaceOf(const void* memory, int64_t bytes) const;
  // The memory of a place that a peer gave, or null where `bytes` there are not all in the heaps.
  char* AtPlace(int64_t place, int64_t bytes) const;

 private:
  SymmetricMemory(Segment segment, int ranks, const Sizes& sizes);
  static int64_t TotalBytes(int ranks, const Sizes& sizes);
  char* At(int64_t offset) const { return segment_.data() + offset; }
  absl::StatusOr<char*> Take(int64_t& used, int64_t begin, int64_t size, int64_t bytes, const char* heap);

  Segment segment_;
  int ranks_ = 0;
  Sizes sizes_;
  int64_t staging_begin_ = 0, heaps_begin_ = 0, shared_begin_ = 0;
  int64_t own_used_ = 0, shared_used_ = 0;
  int streams_ = 0;  // allocated
};

}  // namespace shardmesh
