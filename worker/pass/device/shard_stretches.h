// What of a shard on a device is digested, as stretches of its streams (kernels/cuda/stretch_digest.h). Pure functions.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/cuda/stretch_digest.h"
#include "worker/memory/shard_storage.h"

namespace shardmesh {

// Where a range's streams lie on a device.
using StreamAddresses = std::array<const uint8_t*, kStreams>;

inline StreamAddresses AddressesOf(const ShardStorage& cut, int range, const uint8_t* storage) {
  StreamAddresses addresses = {};
  for (int s = 0; s < kStreams; ++s) addresses[s] = storage + cut.StreamAt(range, s);
  return addresses;
}

// Adds those of a run, placed by either parity, of all streams that there are. `before`: elements of the range that are
// not at the addresses, a whole number of chunks.
inline void AddStretches(const StorageRange& range, const ChunkRun& run, const StreamAddresses& addresses,
                         int64_t before, std::vector<DigestStretch>* stretches) {
  for (int s = 0; s < kStreams; ++s) {
    const PartLayout& part = range.parts[s];
    if (part.bytes == 0) continue;
    DigestStretch& stretch = stretches->emplace_back();
    for (const int parity : {0, 1}) {
      stretch.data[parity] = addresses[s] + part.BytesOf(range.Base(parity) + run.offset - before);
    }
    const bool extra = s > kStates;
    stretch.key = DigestKey(static_cast<uint32_t>(run.tensor), s % (1 + kStates), extra ? 1 : 0);
    // As DigestPart counts words (core/format/stream_digest.h).
    stretch.word_bytes = static_cast<int32_t>(DigestWordBytes(part));
    stretch.first_word = static_cast<uint64_t>(run.first_element / part.elements * part.bytes / stretch.word_bytes);
    stretch.bytes = part.BytesOf(run.num_elements);
  }
}

}  // namespace shardmesh
