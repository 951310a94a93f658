#include "worker/shard_storage.h"

#include <algorithm>

#include "core/status.h"

namespace shardmesh {
namespace {

constexpr int64_t kProgressStride = 64;  // a cache line for each range's word
constexpr int kChunkBits = 20;           // kRangeElements / kGroupElements chunks at the very most
constexpr int64_t kHuge = 2 << 20;

// The first place at or after `at` that is `stream` staggers past a multiple of 2 MiB; small streams just align.
int64_t Staggered(int64_t at, int stream, int64_t bytes) {
  if (bytes < kHuge) return (at + 4095) / 4096 * 4096;
  return (at + kHuge - 1) / kHuge * kHuge + StreamOffset(stream);
}

// Which stagger a stream has: those of one pass that are as long as the weights differ from each other, and from those
// of windows and slots (worker/host_memory.cc).
constexpr int kStagger[kStreams] = {0, 1, 2, 24, 25, 26, 27, 28};

std::array<PartLayout, kStreams> PartsOf(const Bucket& bucket, int num_states) {
  std::array<PartLayout, kStreams> parts;
  for (int k = 0; k <= (bucket.frozen ? 0 : num_states); ++k) {
    const StoredLayout layout = k == 0 ? LayoutOf(bucket.weights) : LayoutOf(bucket.states);
    parts[StreamOf(k, false)] = layout.codes;
    parts[StreamOf(k, true)] = layout.extra;
  }
  return parts;
}

// Where a shard's streams begin in its segment, and the bytes of all.
struct SegmentLayout {
  std::array<int64_t, kStreams> streams_at = {};
  int64_t num_bytes = 0;
};

SegmentLayout SegmentOf(const Plan& plan) {
  int64_t ranges = 0;
  std::array<int64_t, kStreams> bytes = {};
  for (const Bucket& bucket : plan.buckets()) {
    const std::array<PartLayout, kStreams> parts = PartsOf(bucket, plan.num_states());
    for (int64_t at = 0; at < bucket.shard_elements; at += kRangeElements, ++ranges) {
      const int64_t elements = std::min(kRangeElements, bucket.shard_elements - at);
      for (int s = 0; s < kStreams; ++s) bytes[s] += parts[s].BytesOf(elements + SpareOf(bucket.frozen));
    }
  }
  SegmentLayout layout;
  int64_t at = kProgressStride * ranges;
  for (int s = 0; s < kStreams; ++s) {
    layout.streams_at[s] = Staggered(at, kStagger[s], bytes[s]);
    if (bytes[s] > 0) at = layout.streams_at[s] + bytes[s];
  }
  layout.num_bytes = std::max(at, kPageBytes);
  return layout;
}

}  // namespace

absl::Status ShardStorage::CutRanges(const Plan& plan, int shard, const std::atomic<bool>* cancelled) {
  std::array<int64_t, kStreams> bytes = {};  // of the ranges before
  for (int b = 0; b < static_cast<int>(plan.buckets().size()); ++b) {
    const Bucket& bucket = plan.buckets()[b];
    const int64_t begin = shard * bucket.shard_elements, end = begin + bucket.shard_elements;
    for (int64_t at = begin; at < end; at += kRangeElements) {
      if (cancelled != nullptr && cancelled->load()) return absl::CancelledError("the storage is not wanted any more");
      StorageRange range{b, at, std::min(kRangeElements, end - at), PartsOf(bucket, plan.num_states()), bytes};
      range.frozen = bucket.frozen;
      for (int stream = 0; stream < kStreams; ++stream) {
        bytes[stream] += range.parts[stream].BytesOf(range.num_elements + range.spare());
        spare_bytes_ += range.parts[stream].BytesOf(range.spare());
      }
      ranges_.push_back(range);
      std::vector<ChunkRun> runs;
      std::vector<int> first;
      for (int64_t chunk = 0; chunk < range.num_chunks(); ++chunk) {
        first.push_back(static_cast<int>(runs.size()));
        const int64_t from = at + chunk * kChunkElements;
        for (const Run& run : plan.RunsIn(b, from, std::min(from + kChunkElements, at + range.num_elements))) {
          runs.push_back({run.tensor, run.first_element, run.bucket_offset - at, run.num_elements});
        }
      }
      first.push_back(static_cast<int>(runs.size()));
      runs_.push_back(std::move(runs));
      first_run_.push_back(std::move(first));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<ShardStorage> ShardStorage::Open(Memory& memory, const std::string& name, const Plan& plan, int shard,
                                                const std::atomic<bool>* cancelled) {
  ShardStorage storage;
  RETURN_IF_ERROR(storage.CutRanges(plan, shard, cancelled));
  const SegmentLayout layout = SegmentOf(plan);
  storage.streams_at_ = layout.streams_at;
  ASSIGN_OR_RETURN(storage.segment_, memory.Open(name, layout.num_bytes, 0));
  return storage;
}

int64_t ShardStorage::NumBytes(const Plan& plan) { return SegmentOf(plan).num_bytes; }

int64_t ShardStorage::StreamBytes(int range, int stream) const {
  const StorageRange& r = ranges_[range];
  return r.parts[stream].BytesOf(r.num_elements + r.spare());
}

StoredRun ShardStorage::At(int state_plus_one, int range, int parity, int64_t offset) const {
  const int64_t element = ranges_[range].Base(parity) + offset;
  const auto part = [&](bool extra) -> char* {
    const int stream = StreamOf(state_plus_one, extra);
    const PartLayout& layout = ranges_[range].parts[stream];
    return layout.bytes == 0 ? nullptr : At(range, stream) + layout.BytesOf(element);
  };
  return {part(false), part(true)};
}

std::atomic<uint64_t>* ShardStorage::progress(int range) const {
  return reinterpret_cast<std::atomic<uint64_t>*>(segment_.data() + range * kProgressStride);
}

int64_t ShardStorage::Progress(int range, uint64_t seq) const {
  const uint64_t word = progress(range)->load(std::memory_order_acquire);
  return word >> kChunkBits == (seq & ((uint64_t{1} << (64 - kChunkBits)) - 1))
             ? static_cast<int64_t>(word & ((1 << kChunkBits) - 1))
             : 0;
}

void ShardStorage::SetProgress(int range, uint64_t seq, int64_t chunks) {
  progress(range)->store(seq << kChunkBits | static_cast<uint64_t>(chunks), std::memory_order_release);
}

}  // namespace shardmesh
