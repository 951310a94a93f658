#include "worker/lead/hosts/command_data.h"

#include <algorithm>

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

CommandData::CommandData(const JobSpec& job, const Plan& plan, const HostRanks& ranks)
    : job_(job), plan_(plan), num_hosts_(ranks.num_hosts), source_(plan.num_shards()) {
  for (int h = 0; h < num_hosts_; ++h) {
    for (int p = 0; p < plan.num_shards(); ++p) has_.push_back(HostHas(plan, ranks, h, p));
  }
  for (int p = 0; p < plan.num_shards(); ++p) {
    while (!Has(source_[p], p)) ++source_[p];
  }
  for (size_t b = 0; b < plan.buckets().size(); ++b) parts_.push_back(PartsOf(static_cast<int>(b)));
}

std::vector<CommandData::Part> CommandData::PartsOf(int bucket) const {
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

void CommandData::AddNf4Parts(std::vector<Part>& parts, int shard, int64_t scales, int64_t num_blocks, int64_t first,
                              int64_t last) {
  constexpr int64_t kBytes = sizeof(float);
  const int64_t begin = (first + kNf4FactorBlocks - 1) / kNf4FactorBlocks;
  const int64_t end = (last + kNf4FactorBlocks - 1) / kNf4FactorBlocks;
  if (begin < end) {
    parts.push_back({shard, scales + Nf4FactorsOffset(num_blocks) + begin * kBytes, (end - begin) * kBytes});
  }
  if (first == 0) parts.push_back({shard, scales + Nf4MeanOffset(num_blocks), kBytes});
}

void CommandData::Add(const DataPart& part) {
  if (part.bytes > 0) data_.push_back(part);
}

void CommandData::AddForOthers(int shard, HostSet takers, DataPart part) {
  part.from = source_[shard];
  for (part.to = 0; part.to < num_hosts_; ++part.to) {
    if (!Has(part.to, shard) && (takers >> part.to & 1) != 0) Add(part);
  }
}

absl::Span<const DataPart> CommandData::Gradients(AllHostWords words, absl::Span<const int> buckets) {
  data_.clear();
  const int64_t width = BytesPerElement(plan_.gradient_format());
  for (int s = 0; s < job_.num_slots; ++s) {
    if (buckets[s] < 0) continue;
    const Bucket& b = plan_.buckets()[buckets[s]];
    for (int p = 0; p < plan_.num_shards(); ++p) {
      const int from = HostOfShard(words, s, p, plan_.bucketed() ? buckets[s] : -1);
      for (int h = 0; h < num_hosts_; ++h) {
        if (h == from || !Has(h, p)) continue;
        Add({from, h, DataPlace::kSlot, s, b.gradient_offset + b.begin(p) * width, b.gradients(p) * width});
      }
    }
  }
  return data_;
}

absl::Span<const DataPart> CommandData::Results(absl::Span<const SeatWindow> windows, int bucket) {
  data_.clear();
  const int64_t width = BytesPerElement(plan_.gradient_format());
  const Bucket& b = plan_.buckets()[bucket];
  for (const SeatWindow& result : windows) {
    for (int p = 0; p < plan_.num_shards(); ++p) {
      for (int h = 0; h < num_hosts_; ++h) {
        if (h == result.host || !Has(h, p)) continue;
        const int64_t window = result.window * plan_.gradient_window_bytes();
        Add({result.host, h, DataPlace::kSlot, result.seat, window + b.gradient_offset + b.begin(p) * width,
             b.gradients(p) * width});
      }
    }
  }
  return data_;
}

absl::Span<const DataPart> CommandData::Squares() {
  data_.clear();
  constexpr int64_t kBytes = sizeof(float);
  for (const Bucket& b : plan_.buckets()) {
    for (int p = 0; p < plan_.num_shards(); ++p) {
      if (b.frozen) continue;
      const int64_t first = b.first_block + b.begin(p) / kBlockElements;
      AddForOthers(p, ~HostSet{0}, {0, 0, DataPlace::kSquares, 0, first * kBytes, b.size(p) / kBlockElements * kBytes});
    }
  }
  return data_;
}

absl::Span<const DataPart> CommandData::Weights(int bucket, HostSet takers) {
  data_.clear();
  for (const Part& part : parts_[bucket]) {
    AddForOthers(part.shard, takers, {0, 0, DataPlace::kWeights, 0, part.offset, part.bytes});
  }
  return data_;
}

absl::Span<const DataPart> CommandData::Maxima() {
  data_.clear();
  const int64_t bytes = plan_.scales().num_maxima * static_cast<int64_t>(sizeof(uint32_t));
  for (int from = 0; from < num_hosts_; ++from) {
    for (int to = 0; to < num_hosts_; ++to) {
      if (from != to) Add({from, to, DataPlace::kMaxima, 0, 0, bytes});
    }
  }
  return data_;
}

}  // namespace shardmesh
