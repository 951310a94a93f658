#include "core/job/absent_weights.h"

#include <algorithm>
#include <cstring>

namespace shardmesh {

AbsentWeights::AbsentWeights(const Plan& plan) : spans_(plan.buckets().size()) {
  for (const Placement& placement : plan.placements()) {
    const Bucket& bucket = plan.buckets()[placement.bucket];
    const int64_t begin = bucket.weight_offset + bucket.CodeOffset(placement.offset);
    const int64_t bytes = GatheredCodeBytes(bucket.format(), bucket.gather, placement.num_elements);
    const int64_t page_end = (begin / kPageBytes + 1) * kPageBytes;
    if (bytes > 0) spans_[placement.bucket].emplace_back(begin, std::min(begin + bytes, page_end));
  }
  for (auto& spans : spans_) {
    std::sort(spans.begin(), spans.end());
    spans.erase(std::unique(spans.begin(), spans.end()), spans.end());  // of tied parameters
  }
}

void AbsentWeights::Show(int bucket, char* window) const {
  for (const auto& [begin, end] : spans_[bucket]) std::memset(window + begin, 0xff, static_cast<size_t>(end - begin));
}

int64_t AbsentWeights::PageBytes(int bucket) const {
  int64_t pages = 0, last = -1;
  for (const auto& [begin, end] : spans_[bucket]) {
    pages += begin / kPageBytes != last;
    last = begin / kPageBytes;
  }
  return pages * kPageBytes;
}

}  // namespace shardmesh
