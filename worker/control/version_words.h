// The words of a job's published versions on a host's control block (control_block.h): which publication holds which
// version, and who keeps it there. The rules over them: publications.h and version_leases.h.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/job/job.h"

namespace shardmesh {

inline constexpr int kMaxLeases = 256;   // of one job on one host at a time
inline constexpr int kMaxReaders = 256;  // that map publications of one job on one host at a time

// One publication (one for the host).
struct alignas(64) PublicationWords {
  // step + 1 of the whole version it holds; 0: none. With kTaken: the lead has taken it away, for the next version.
  std::atomic<int64_t> version_plus_one;
  std::atomic<int64_t> pins[kMaxHostRanks];  // by rank: reads under way in that process
  std::atomic<int64_t> written;              // 1: a version was written there, so its pages take memory
};
inline constexpr int64_t kTaken = int64_t{1} << 62;

// A lease that a worker granted over RPC. Only the worker that took the row changes it.
struct alignas(64) LeaseWords {
  std::atomic<int32_t> owner;   // rank + 1; 0: free
  std::atomic<uint64_t> id;     // random, never 0
  // The caller's, and known to it alone: the same request again gets the same lease; who renews or releases shows it.
  std::atomic<uint64_t> nonce;
  std::atomic<int64_t> step;
  std::atomic<int64_t> buffer;         // the publication
  std::atomic<int64_t> expires_nanos;  // MonotonicNanos; 0: released
};

// A reader that maps publications, attached to the worker that took the row, whose number is the reader's place. What
// it holds the kernel knows (local/memory/file_hold.h).
struct alignas(64) ReaderWords {
  std::atomic<int32_t> owner;        // rank + 1; 0: free
  std::atomic<int64_t> pid;          // 0: not known
  std::atomic<int64_t> heard_nanos;  // of its last message
  std::atomic<int64_t> ttl_nanos;    // silent for longer, what it holds is abandoned
  std::atomic<int64_t> gone;         // 1: its connection has ended; free when it holds nothing
};

}  // namespace shardmesh
