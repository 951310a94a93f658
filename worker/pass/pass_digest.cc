// Of Pass: digests of what is stored, and copies of it for whoever saves it.
#include <cstring>

#include "core/format/stream_digest.h"
#include "worker/pass/pass.h"
#include "worker/transport/streaming_copy.h"

namespace shardmesh {

uint64_t Pass::DigestRun(int range, int parity, const ChunkRun& run, const ShardStorage* copy) const {
  const StorageRange& r = storage_.ranges()[range];
  uint64_t digest = 0;
  const auto add = [&](int stream, bool extra, const void* data, void* to) {
    const PartLayout& layout = r.parts[StreamOf(stream, extra)];
    if (layout.bytes == 0) return;
    digest += DigestPart(DigestKey(static_cast<uint32_t>(run.tensor), stream, extra ? 1 : 0), layout,
                         static_cast<uint64_t>(run.first_element), data, run.num_elements);
    if (to == nullptr) return;  // else while it is in the cache
    if (stream_copies_) {
      StreamingCopy(to, data, layout.BytesOf(run.num_elements));
    } else {
      std::memcpy(to, data, layout.BytesOf(run.num_elements));
    }
  };
  const int num_states = plan_.buckets()[r.bucket].num_states;
  const auto at = [&](const ShardStorage& storage, int stream) {
    return stream == 0 ? storage.weights(range, parity, run.offset)
                       : storage.state(stream - 1, range, parity, run.offset);
  };
  for (int stream = 0; stream <= num_states; ++stream) {
    const StoredRun stored = at(storage_, stream), copied = copy != nullptr ? at(*copy, stream) : StoredRun{};
    add(stream, false, stored.codes, copied.codes);
    add(stream, true, stored.extra, copied.extra);
  }
  return digest;
}

uint64_t Pass::DigestRange(const Command& command, int range) const {
  const ShardStorage* const copy = snapshot_ != nullptr ? &snapshot_->storage() : nullptr;
  uint64_t digest = 0;
  for (const ChunkRun& run : storage_.runs(range)) digest += DigestRun(range, command.parity, run, copy);
  return digest;
}

}  // namespace shardmesh
