#include "worker/lead/hosts/host_transfers.h"

#include <cstring>

namespace shardmesh {

HostTransfers::HostTransfers(const JobSpec& job, const Plan& plan, const HostRanks& ranks, HostMemory& memory,
                             bool maxima)
    : plan_(plan), ranks_(ranks), memory_(memory), data_(job, plan, ranks), maxima_(ranks.num_hosts) {
  for (int h = 0; h < ranks.num_hosts; ++h) {
    if (maxima && h != ranks.host) maxima_[h].resize(plan.scales().num_maxima);
  }
}

char* HostTransfers::Begin(const DataPart& part, const Segment* weights) {
  switch (part.place) {
    case DataPlace::kSlot:
      return memory_.slot(part.index).data();
    case DataPlace::kSquares:
      return reinterpret_cast<char*>(SquareSums(memory_.control()));
    case DataPlace::kMaxima:
      if (part.from != ranks_.host) return reinterpret_cast<char*>(maxima_[part.from].data());
      return reinterpret_cast<char*>(shardmesh::Maxima(memory_.control(), plan_));
    case DataPlace::kWeights:
      break;
  }
  return weights->data();
}

absl::Span<const PeerTransfer> HostTransfers::InMemory(absl::Span<const DataPart> data, const Segment* weights) {
  transfers_.clear();
  for (const DataPart& part : data) {
    transfers_.push_back({part.from, part.to, Begin(part, weights) + part.offset, part.bytes});
  }
  return transfers_;
}

absl::Span<const PeerTransfer> HostTransfers::Gradients(AllHostWords words, absl::Span<const int> buckets) {
  return InMemory(data_.Gradients(words, buckets));
}

absl::Span<const PeerTransfer> HostTransfers::Results(absl::Span<const SeatWindow> windows, int bucket) {
  return InMemory(data_.Results(windows, bucket));
}

absl::Span<const PeerTransfer> HostTransfers::Squares() { return InMemory(data_.Squares()); }

absl::Span<const PeerTransfer> HostTransfers::Weights(int bucket, const Segment& memory, HostSet takers) {
  return InMemory(data_.Weights(bucket, takers), &memory);
}

absl::Span<const PeerTransfer> HostTransfers::Maxima() { return InMemory(data_.Maxima()); }

void HostTransfers::CopyWeights(int bucket, const Segment& from, const Segment& to) {
  for (const DataPart& part : data_.Weights(bucket, HostSet{1} << ranks_.host)) {
    std::memcpy(to.data() + part.offset, from.data() + part.offset, static_cast<size_t>(part.bytes));
  }
}

void HostTransfers::TakeMaxima() {
  std::atomic<uint32_t>* const mine = shardmesh::Maxima(memory_.control(), plan_);
  for (int h = 0; h < ranks_.num_hosts; ++h) {
    for (int64_t i = 0; i < plan_.scales().num_maxima && h != ranks_.host; ++i) {
      if (maxima_[h][i] > mine[i].load(std::memory_order_relaxed)) mine[i].store(maxima_[h][i]);
    }
  }
}

}  // namespace shardmesh
