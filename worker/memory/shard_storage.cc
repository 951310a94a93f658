#include "worker/memory/shard_storage.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/algorithm/container.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

constexpr int64_t kProgressStride = 64;  // a cache line for each range's word
constexpr int64_t kGuardBytes = 16;      // of a chunk's two places
constexpr int kChunkBits = 20;           // more than a range has chunks, or a shard matrices
static_assert(kMaxMuonElements / kChunkElements < 1 << kChunkBits && kMaxParameters < 1 << kChunkBits);
constexpr int64_t kHuge = 2 << 20;

// The first place at or after `at` that is `stream` staggers past a multiple of 2 MiB; small streams just align.
int64_t Staggered(int64_t at, int stream, int64_t bytes) {
  if (bytes < kHuge) return (at + 4095) / 4096 * 4096;
  return (at + kHuge - 1) / kHuge * kHuge + StreamOffset(stream);
}

// Which stagger a stream has: those of one pass that are as long as the weights differ from each other, and from those
// of windows and slots (worker/memory/host_memory.cc).
constexpr int kStagger[kStreams] = {0, 1, 2, 24, 25, 26, 27, 28};

std::array<PartLayout, kStreams> PartsOf(const Bucket& bucket) {
  std::array<PartLayout, kStreams> parts;
  for (int k = 0; k <= bucket.num_states; ++k) {
    const StoredLayout layout = k == 0 ? LayoutOf(bucket.weights, bucket.row_elements) : LayoutOf(bucket.states);
    parts[StreamOf(k, false)] = layout.codes;
    parts[StreamOf(k, true)] = layout.extra;
  }
  return parts;
}

// The ranges of a shard's part of a bucket, but for where they lie in the segment. `visit` returns a status.
template <class Visit>
absl::Status ForEachRange(const Plan& plan, int b, int shard, const StorageCut& cut, const Visit& visit) {
  const Bucket& bucket = plan.buckets()[b];
  StorageRange range;
  range.bucket = b;
  range.parts = PartsOf(bucket);
  range.frozen = bucket.frozen;
  range.chunk_elements = ChunkElementsOf(bucket, cut);
  if (bucket.owned()) {
    for (const Run& run : plan.RunsIn(b, bucket.begin(shard), bucket.end(shard))) {
      range.bucket_begin = run.bucket_offset;
      range.num_elements = (run.num_elements + kBlockElements - 1) / kBlockElements * kBlockElements;
      RETURN_IF_ERROR(visit(range, &run));
    }
    return absl::OkStatus();
  }
  const int64_t end = bucket.end(shard), most = RangeElementsOf(bucket, cut);
  for (int64_t at = bucket.begin(shard); at < end; at += most) {
    range.bucket_begin = at;
    range.num_elements = std::min(most, end - at);
    RETURN_IF_ERROR(visit(range, nullptr));
  }
  return absl::OkStatus();
}

// Where a shard's streams and scratch begin in its segment, and the bytes of all.
struct SegmentLayout {
  std::array<int64_t, kStreams> streams_at = {};
  MuonSpace scratch;
  int64_t guards_at = 0, scratch_at = 0;
  int64_t num_bytes = 0;
};

SegmentLayout SegmentOf(const Plan& plan, int shard, const StorageCut& cut) {
  int64_t ranges = 0, chunks = 0;
  std::array<int64_t, kStreams> bytes = {};
  SegmentLayout layout;
  for (int b = 0; b < static_cast<int>(plan.buckets().size()); ++b) {
    (void)ForEachRange(plan, b, shard, cut, [&](const StorageRange& range, const Run* matrix) {
      ++ranges;
      chunks += range.num_chunks();
      for (int s = 0; s < kStreams; ++s) bytes[s] += range.parts[s].BytesOf(range.num_elements + range.spare());
      if (matrix == nullptr) return absl::OkStatus();
      const auto [rows, columns] = plan.MatrixOf(matrix->tensor);
      layout.scratch.Include(rows, columns);
      return absl::OkStatus();
    });
  }
  layout.guards_at = kProgressStride * (ranges + 1);
  int64_t at = layout.guards_at + (cut.guards ? kGuardBytes * chunks : 0);
  for (int s = 0; s < kStreams; ++s) {
    layout.streams_at[s] = Staggered(at, kStagger[s], bytes[s]);
    if (bytes[s] > 0) at = layout.streams_at[s] + bytes[s];
  }
  layout.scratch_at = (at + kPageBytes - 1) / kPageBytes * kPageBytes;
  if (layout.scratch.num_bytes() > 0) at = layout.scratch_at + layout.scratch.num_bytes();
  layout.num_bytes = std::max(at, kPageBytes);
  return layout;
}

}  // namespace

int64_t ChunkElementsOf(const Bucket& bucket, const StorageCut& cut) {
  return std::max(cut.chunk_elements / bucket.granule_elements, int64_t{1}) * bucket.granule_elements;
}

int64_t RangeElementsOf(const Bucket& bucket, const StorageCut& cut) {
  const int64_t chunk = ChunkElementsOf(bucket, cut);
  return std::max(cut.range_elements / chunk, int64_t{1}) * chunk;
}

absl::Status ShardStorage::CutRanges(const Plan& plan, int shard, const StorageCut& cut,
                                     const std::atomic<bool>* cancelled) {
  std::array<int64_t, kStreams> bytes = {};  // of the ranges before
  int64_t chunks = 0;
  int matrices = 0;
  const auto add = [&](StorageRange range, const Run* matrix) {
    if (cancelled != nullptr && cancelled->load()) return absl::CancelledError("the storage is not wanted any more");
    range.begin = bytes;
    range.first_chunk = chunks;
    chunks += range.num_chunks();
    if (matrix != nullptr) range.matrix = matrices++;
    for (int stream = 0; stream < kStreams; ++stream) {
      bytes[stream] += range.parts[stream].BytesOf(range.num_elements + range.spare());
      spare_bytes_ += range.parts[stream].BytesOf(range.spare());
    }
    CutChunks(plan, range);
    ranges_.push_back(range);
    return absl::OkStatus();
  };
  for (int b = 0; b < static_cast<int>(plan.buckets().size()); ++b) {
    RETURN_IF_ERROR(ForEachRange(plan, b, shard, cut, add));
  }
  return absl::OkStatus();
}

void ShardStorage::CutChunks(const Plan& plan, const StorageRange& range) {
  std::vector<ChunkRun> runs;
  std::vector<int> first;
  const int64_t end = range.bucket_begin + range.num_elements;
  for (int64_t from = range.bucket_begin; from < end; from += range.chunk_elements) {
    first.push_back(static_cast<int>(runs.size()));
    for (const Run& run : plan.RunsIn(range.bucket, from, std::min(from + range.chunk_elements, end))) {
      runs.push_back({run.tensor, run.first_element, run.bucket_offset - range.bucket_begin, run.num_elements});
    }
  }
  first.push_back(static_cast<int>(runs.size()));
  runs_.push_back(std::move(runs));
  first_run_.push_back(std::move(first));
}

absl::StatusOr<ShardStorage> ShardStorage::Open(Memory& memory, const std::string& name, const Plan& plan, int shard,
                                                const std::atomic<bool>* cancelled, const StorageCut& cut) {
  ASSIGN_OR_RETURN(ShardStorage storage, Cut(plan, shard, cut, cancelled));
  ASSIGN_OR_RETURN(storage.segment_, memory.Open(name, storage.segment_bytes_, 0));
  return storage;
}

absl::StatusOr<ShardStorage> ShardStorage::Cut(const Plan& plan, int shard, const StorageCut& cut,
                                               const std::atomic<bool>* cancelled) {
  ShardStorage storage;
  RETURN_IF_ERROR(storage.CutRanges(plan, shard, cut, cancelled));
  const SegmentLayout layout = SegmentOf(plan, shard, cut);
  storage.streams_at_ = layout.streams_at;
  storage.scratch_space_ = layout.scratch;
  storage.scratch_at_ = layout.scratch_at;
  storage.guards_at_ = layout.guards_at;
  storage.segment_bytes_ = layout.num_bytes;
  return storage;
}

int64_t ShardStorage::ProgressAt(int range) const { return range * kProgressStride; }

int64_t ShardStorage::NumBytes(const Plan& plan, int shard) { return SegmentOf(plan, shard, {}).num_bytes; }

// Shards differ in the matrices that they own alone.
int64_t StorageBytesOfAll(const Plan& plan) {
  const bool differ = absl::c_any_of(plan.buckets(), [](const Bucket& bucket) { return bucket.owned(); });
  int64_t bytes = 0, sum = 0;
  for (int shard = 0; shard < (differ ? plan.num_shards() : 1); ++shard) {
    if (__builtin_add_overflow(bytes, ShardStorage::NumBytes(plan, shard), &bytes)) {
      return std::numeric_limits<int64_t>::max();
    }
  }
  const int64_t times = differ ? plan.num_replicas() : plan.num_ranks();
  return __builtin_mul_overflow(bytes, times, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}

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
  return reinterpret_cast<std::atomic<uint64_t>*>(segment_.data() + ProgressAt(range));
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

// Of the same form as the ranges': the command, and which matrix, counted from 1.
bool ShardStorage::UpdateIsReady(int range, uint64_t seq) const {
  return Progress(static_cast<int>(ranges_.size()), seq) == ranges_[range].matrix + 1;
}

void ShardStorage::SetUpdateReady(int range, uint64_t seq) {
  SetProgress(static_cast<int>(ranges_.size()), seq, ranges_[range].matrix + 1);
}

void ShardStorage::Populate(int range) const {
  for (int stream = 0; stream < kStreams; ++stream) {
    segment_.Populate(StreamAt(range, stream), StreamBytes(range, stream));
  }
}

}  // namespace shardmesh
