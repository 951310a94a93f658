#include "worker/lead/host_transfers.h"

#include <algorithm>
#include <cstring>

namespace shardmesh {
namespace {

// The element, in its tensor, that a block of scales begins with. Ascends with the blocks.
int64_t FirstElement(const ScaleBlocks& blocks, int64_t block) {
  const int64_t row = block / blocks.across(), column = block % blocks.across();
  return row * blocks.block_rows * blocks.columns + column * blocks.block_columns;
}

// The first block that begins at `element` or behind it.
int64_t FirstBlockFrom(const ScaleBlocks& blocks, int64_t element) {
  int64_t low = 0, high = blocks.num_blocks;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (FirstElement(blocks, middle) < element) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace

HostTransfers::HostTransfers(const JobSpec& job, const Plan& plan, const HostRanks& ranks, HostMemory& memory,
                             bool maxima)
    : job_(job), plan_(plan), ranks_(ranks), memory_(memory), source_(plan.num_shards()) {
  for (int h = 0; h < ranks.num_hosts; ++h) {
    for (int p = 0; p < plan.num_shards(); ++p) has_.push_back(HostHas(plan, ranks, h, p));
  }
  for (int p = 0; p < plan.num_shards(); ++p) {
    while (!Has(source_[p], p)) ++source_[p];
  }
  for (size_t b = 0; b < plan.buckets().size(); ++b) parts_.push_back(PartsOf(static_cast<int>(b)));
  maxima_.resize(ranks.num_hosts);
  for (int h = 0; h < ranks.num_hosts; ++h) {
    if (maxima && h != ranks.host) maxima_[h].resize(plan.num_maxima());
  }
}

std::vector<HostTransfers::Part> HostTransfers::PartsOf(int bucket) const {
  const Bucket& b = plan_.buckets()[bucket];
  std::vector<Part> parts;
  for (int p = 0; p < plan_.num_shards(); ++p) {
    const int64_t begin = b.begin(p), end = b.end(p);
    parts.push_back({p, b.weight_offset + b.CodeOffset(begin), b.CodeOffset(end) - b.CodeOffset(begin)});
    for (size_t t = 0; t < plan_.placements().size() && b.gather != GatherFormat::kStored; ++t) {
      const Placement& at = plan_.placements()[t];
      if (at.bucket != bucket || !job_.parameters[t].tied_to.empty() || at.num_elements == 0) continue;
      const int64_t first = FirstBlockFrom(at.scales, std::max<int64_t>(begin - at.offset, 0));
      const int64_t last = FirstBlockFrom(at.scales, std::clamp<int64_t>(end - at.offset, 0, at.num_elements));
      const int64_t bytes = GatheredScaleBytes(b.gather);
      if (first >= last) continue;
      const int64_t scales = b.weight_offset + at.scale_offset;
      parts.push_back({p, scales + first * bytes, (last - first) * bytes});
      if (b.gather == GatherFormat::kNf4) AddNf4Parts(parts, p, scales, at.scales.num_blocks, first, last);
    }
  }
  return parts;
}

void HostTransfers::AddNf4Parts(std::vector<Part>& parts, int shard, int64_t scales, int64_t num_blocks, int64_t first,
                                int64_t last) {
  constexpr int64_t kBytes = sizeof(float);
  const int64_t begin = (first + kNf4FactorBlocks - 1) / kNf4FactorBlocks;
  const int64_t end = (last + kNf4FactorBlocks - 1) / kNf4FactorBlocks;
  if (begin < end) {
    parts.push_back({shard, scales + Nf4FactorsOffset(num_blocks) + begin * kBytes, (end - begin) * kBytes});
  }
  if (first == 0) parts.push_back({shard, scales + Nf4MeanOffset(num_blocks), kBytes});
}

void HostTransfers::Add(int from, int to, char* memory, int64_t bytes) {
  if (bytes > 0) transfers_.push_back({from, to, memory, bytes});
}

void HostTransfers::AddForOthers(int shard, char* memory, int64_t bytes, HostSet takers) {
  for (int h = 0; h < ranks_.num_hosts; ++h) {
    if (!Has(h, shard) && (takers >> h & 1) != 0) Add(SourceOf(shard), h, memory, bytes);
  }
}

absl::Span<const PeerTransfer> HostTransfers::Pieces(AllHostWords words, absl::Span<const int> buckets) {
  transfers_.clear();
  const int64_t width = BytesPerElement(plan_.gradient_format());
  for (int s = 0; s < job_.num_slots; ++s) {
    if (buckets[s] < 0) continue;
    const Bucket& b = plan_.buckets()[buckets[s]];
    for (int p = 0; p < plan_.num_shards(); ++p) {
      const int from = HostOfShard(words, s, p, plan_.bucketed() ? buckets[s] : -1);
      for (int h = 0; h < ranks_.num_hosts; ++h) {
        if (h == from || !Has(h, p)) continue;
        Add(from, h, memory_.slot(s).data() + b.gradient_offset + b.begin(p) * width, b.gradients(p) * width);
      }
    }
  }
  return transfers_;
}

absl::Span<const PeerTransfer> HostTransfers::Results(absl::Span<const SeatWindow> windows, int bucket) {
  transfers_.clear();
  const int64_t width = BytesPerElement(plan_.gradient_format());
  const Bucket& b = plan_.buckets()[bucket];
  for (const SeatWindow& result : windows) {
    for (int p = 0; p < plan_.num_shards(); ++p) {
      for (int h = 0; h < ranks_.num_hosts; ++h) {
        if (h == result.host || !Has(h, p)) continue;
        char* const window = memory_.slot(result.seat).data() + result.window * plan_.gradient_window_bytes();
        Add(result.host, h, window + b.gradient_offset + b.begin(p) * width, b.gradients(p) * width);
      }
    }
  }
  return transfers_;
}

absl::Span<const PeerTransfer> HostTransfers::Squares() {
  transfers_.clear();
  for (const Bucket& b : plan_.buckets()) {
    for (int p = 0; p < plan_.num_shards(); ++p) {
      if (b.frozen) continue;
      const int64_t blocks = b.size(p) / kBlockElements;
      float* const first = SquareSums(memory_.control()) + b.first_block + b.begin(p) / kBlockElements;
      AddForOthers(p, reinterpret_cast<char*>(first), blocks * static_cast<int64_t>(sizeof(float)), ~HostSet{0});
    }
  }
  return transfers_;
}

absl::Span<const PeerTransfer> HostTransfers::Weights(int bucket, const Segment& memory, HostSet takers) {
  transfers_.clear();
  for (const Part& part : parts_[bucket]) AddForOthers(part.shard, memory.data() + part.offset, part.bytes, takers);
  return transfers_;
}

void HostTransfers::CopyWeights(int bucket, const Segment& from, const Segment& to) {
  for (const Part& part : parts_[bucket]) {
    if (Has(ranks_.host, part.shard)) continue;
    std::memcpy(to.data() + part.offset, from.data() + part.offset, static_cast<size_t>(part.bytes));
  }
}

absl::Span<const PeerTransfer> HostTransfers::Maxima() {
  transfers_.clear();
  const int64_t bytes = plan_.num_maxima() * static_cast<int64_t>(sizeof(uint32_t));
  for (int from = 0; from < ranks_.num_hosts; ++from) {
    for (int to = 0; to < ranks_.num_hosts; ++to) {
      if (from == to) continue;
      char* const mine = reinterpret_cast<char*>(shardmesh::Maxima(memory_.control(), plan_));
      Add(from, to, from == ranks_.host ? mine : reinterpret_cast<char*>(maxima_[from].data()), bytes);
    }
  }
  return transfers_;
}

void HostTransfers::TakeMaxima() {
  std::atomic<uint32_t>* const mine = shardmesh::Maxima(memory_.control(), plan_);
  for (int h = 0; h < ranks_.num_hosts; ++h) {
    for (int64_t i = 0; i < plan_.num_maxima() && h != ranks_.host; ++i) {
      if (maxima_[h][i] > mine[i].load(std::memory_order_relaxed)) mine[i].store(maxima_[h][i]);
    }
  }
}

}  // namespace shardmesh
