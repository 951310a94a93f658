// How fast this machine moves memory: the physical bound of a pass. Two ways, of which a bound takes the faster one: a
// copy with streaming stores, and an update in place. Pure functions over the caller's memory, thread-safe.
#pragma once

#include <cstdint>

#include "worker/transport/streaming_copy.h"

namespace shardmesh::bench {

using shardmesh::StreamingCopy;  // 2 * bytes move

// Reads every word and writes it back, combined with `mask` by exclusive or: 2 * num_bytes move. With mask 0 nothing
// changes.
void UpdateInPlace(void* data, int64_t num_bytes, uint64_t mask);

// Reads every word once: num_bytes move. The exclusive or of all words.
uint64_t ReadInPlace(const void* data, int64_t num_bytes);

}  // namespace shardmesh::bench
