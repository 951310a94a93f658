// Bytes in memory of a CUDA device, where they lie: the digest of any number of stretches (core/format/stream_digest.h),
// and copies of any number of them, one kernel each, a block a stretch. Plain values, the same for g++ and nvcc; all
// pointers are the device's.
#pragma once

#include <cstdint>

#include "core/base/host_device.h"
#include "core/format/stream_digest.h"

namespace shardmesh {

// Whole words of one part of a stream, but that the last may have fewer bytes.
struct DigestStretch {
  const uint8_t* data[2] = {nullptr, nullptr};  // by parity: where they lie (worker/memory/shard_storage.h)
  uint64_t key = 0;                             // DigestKey of the part
  uint64_t first_word = 0;                      // counted from the tensor's start
  int64_t bytes = 0;
  int32_t word_bytes = 8;
};

// One launch. digests[i] becomes the digest of stretch i.
struct StretchDigests {
  const DigestStretch* stretches = nullptr;
  int32_t num_stretches = 0;
  int32_t parity = 0;
  uint64_t* digests = nullptr;
};

struct StretchCopy {
  uint8_t* to = nullptr;
  const uint8_t* from = nullptr;
  int64_t bytes = 0;
};

struct StretchCopies {
  const StretchCopy* copies = nullptr;
  int32_t num_copies = 0;
};

inline constexpr int kStretchThreads = 256;  // of a block

// A thread's share of a stretch's digest: shares add up to it.
SHARDMESH_RULE uint64_t ShareOfDigest(const DigestStretch& stretch, int parity, int thread, int num_threads) {
  return DigestWords(stretch.key, stretch.first_word, stretch.word_bytes, stretch.data[parity], stretch.bytes, thread,
                     num_threads);
}

// A thread's share of a copy: in words of 8 bytes where both sides allow it.
SHARDMESH_RULE void CopyShare(const StretchCopy& copy, int thread, int num_threads) {
  using Word = uint64_t __attribute__((may_alias));
  int64_t words = 0;
  if ((reinterpret_cast<uintptr_t>(copy.to) | reinterpret_cast<uintptr_t>(copy.from)) % sizeof(Word) == 0) {
    words = copy.bytes / static_cast<int64_t>(sizeof(Word));
  }
  for (int64_t i = thread; i < words; i += num_threads) {
    reinterpret_cast<Word*>(copy.to)[i] = reinterpret_cast<const Word*>(copy.from)[i];
  }
  for (int64_t i = words * static_cast<int64_t>(sizeof(Word)) + thread; i < copy.bytes; i += num_threads) {
    copy.to[i] = copy.from[i];
  }
}

}  // namespace shardmesh
