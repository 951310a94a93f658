// The digest of bytes in memory of a CUDA device, where they lie: one kernel for any number of stretches
// (core/format/stream_digest.h), a block a stretch. Plain values, the same for g++ and nvcc; all pointers are the device's.
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

inline constexpr int kStretchThreads = 256;  // of a block

// A thread's share of a stretch's digest: shares add up to it.
SHARDMESH_RULE uint64_t ShareOfDigest(const DigestStretch& stretch, int parity, int thread, int num_threads) {
  return DigestWords(stretch.key, stretch.first_word, stretch.word_bytes, stretch.data[parity], stretch.bytes, thread,
                     num_threads);
}

}  // namespace shardmesh
