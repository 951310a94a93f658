// VersionBoard: what readers that map publications see of a job: a small segment that the job's workers write and
// readers map read-only.
//
// A reader takes a version without asking anybody: it looks for it here, holds its publication's memory (file_hold.h),
// and looks here again. The lead of the job takes the version off the board before it looks whether the memory is held,
// and writes into memory only when it is not; with sequentially consistent order one of them sees the other. All words
// are lock-free atomics, zero at creation.
#pragma once

#include <atomic>
#include <cstdint>

namespace shardmesh {

inline constexpr int kBoardPublications = 8;  // of one job on one host, at most

// Whether versions still come. It only grows.
enum class BoardOver : uint32_t {
  kNo = 0,
  kEnded = 1,   // the job's epoch has ended; its versions are the newest until there is a later epoch
  kClosed = 2,  // the job was deleted, or is elsewhere: its versions are left behind
};

struct VersionBoard {
  alignas(64) std::atomic<uint32_t> notifier;  // waited on (futex): a word below changed
  std::atomic<uint32_t> over;              // BoardOver, as a number
  alignas(64) std::atomic<int64_t> version_plus_one[kBoardPublications];  // by publication: its step + 1; 0: none
};

static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

}  // namespace shardmesh
