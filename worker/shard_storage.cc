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

}  // namespace

void ShardStorage::CutRanges(const Plan& plan, int shard) {
  for (int b = 0; b < static_cast<int>(plan.buckets().size()); ++b) {
    const Bucket& bucket = plan.buckets()[b];
    const int64_t begin = shard * bucket.shard_elements, end = begin + bucket.shard_elements;
    for (int64_t at = begin; at < end; at += kRangeElements) {
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
}

absl::StatusOr<ShardStorage> ShardStorage::Open(Memory& memory, const std::string& name, const Plan& plan, int shard) {
  ShardStorage storage;
  storage.CutRanges(plan, shard);
  const int64_t progress_bytes = kProgressStride * static_cast<int64_t>(storage.ranges_.size());
  const int64_t moment_bytes = storage.stream_elements_ * static_cast<int64_t>(sizeof(float));
  storage.weights_at_ = Staggered(progress_bytes, 0, storage.weight_bytes_);
  storage.moment1_at_ = Staggered(storage.weights_at_ + storage.weight_bytes_, 1, moment_bytes);
  storage.moment2_at_ = Staggered(storage.moment1_at_ + moment_bytes, 2, moment_bytes);
  ASSIGN_OR_RETURN(storage.segment_, memory.Open(name, std::max(storage.moment2_at_ + moment_bytes, kPageBytes), 0));
  return storage;
}

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
