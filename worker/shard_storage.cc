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

// Where a shard's streams begin in its segment, and the bytes of all.
struct Layout {
  int64_t weights_at = 0, moment1_at = 0, moment2_at = 0, num_bytes = 0;
};

Layout LayoutOf(const Plan& plan) {
  int64_t ranges = 0, stream_elements = 0, weight_bytes = 0;
  for (const Bucket& bucket : plan.buckets()) {
    const int64_t cut = (bucket.shard_elements + kRangeElements - 1) / kRangeElements;
    const int64_t places = bucket.shard_elements + cut * kChunkElements;
    ranges += cut;
    stream_elements += places;
    weight_bytes += places * BytesPerElement(bucket.format);
  }
  const int64_t moment_bytes = stream_elements * static_cast<int64_t>(sizeof(float));
  Layout layout;
  layout.weights_at = Staggered(kProgressStride * ranges, 0, weight_bytes);
  layout.moment1_at = Staggered(layout.weights_at + weight_bytes, 1, moment_bytes);
  layout.moment2_at = Staggered(layout.moment1_at + moment_bytes, 2, moment_bytes);
  layout.num_bytes = std::max(layout.moment2_at + moment_bytes, kPageBytes);
  return layout;
}

}  // namespace

absl::Status ShardStorage::CutRanges(const Plan& plan, int shard, const std::atomic<bool>* cancelled) {
  for (int b = 0; b < static_cast<int>(plan.buckets().size()); ++b) {
    const Bucket& bucket = plan.buckets()[b];
    const int64_t begin = shard * bucket.shard_elements, end = begin + bucket.shard_elements;
    for (int64_t at = begin; at < end; at += kRangeElements) {
      if (cancelled != nullptr && cancelled->load()) return absl::CancelledError("the storage is not wanted any more");
      StorageRange range{b, at, std::min(kRangeElements, end - at), stream_elements_, weight_bytes_};
      const int64_t places = range.num_elements + kChunkElements;
      stream_elements_ += places;
      weight_bytes_ += places * BytesPerElement(bucket.format);
      spare_bytes_ += kChunkElements * (BytesPerElement(bucket.format) + 8);
      ranges_.push_back(range);
      bytes_per_weight_.push_back(BytesPerElement(bucket.format));
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
  const Layout layout = LayoutOf(plan);
  storage.weights_at_ = layout.weights_at;
  storage.moment1_at_ = layout.moment1_at;
  storage.moment2_at_ = layout.moment2_at;
  ASSIGN_OR_RETURN(storage.segment_, memory.Open(name, layout.num_bytes, 0));
  return storage;
}

int64_t ShardStorage::NumBytes(const Plan& plan) { return LayoutOf(plan).num_bytes; }

char* ShardStorage::weights(int range, int parity, int64_t offset) const {
  return segment_.data() + weights_at_ + ranges_[range].weight_begin +
         (StorageRange::Base(parity) + offset) * bytes_per_weight_[range];
}

float* ShardStorage::moment1(int range, int parity, int64_t offset) const {
  return reinterpret_cast<float*>(segment_.data() + moment1_at_) + ranges_[range].stream_begin +
         StorageRange::Base(parity) + offset;
}

float* ShardStorage::moment2(int range, int parity, int64_t offset) const {
  return reinterpret_cast<float*>(segment_.data() + moment2_at_) + ranges_[range].stream_begin +
         StorageRange::Base(parity) + offset;
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
