#include "bench/harness/memory_speed.h"

namespace shardmesh::bench {
namespace {
constexpr int kWords = 8;  // of a cache line
}  // namespace

void UpdateInPlace(void* data, int64_t num_bytes, uint64_t mask) {
  auto* words = static_cast<uint64_t*>(data);
  for (int64_t i = 0; i < num_bytes / 8; i += kWords) {
    for (int j = 0; j < kWords; ++j) words[i + j] ^= mask;
  }
}

uint64_t ReadInPlace(const void* data, int64_t num_bytes) {
  const auto* words = static_cast<const uint64_t*>(data);
  uint64_t sums[kWords] = {};
  for (int64_t i = 0; i < num_bytes / 8; i += kWords) {
    for (int j = 0; j < kWords; ++j) sums[j] ^= words[i + j];
  }
  uint64_t sum = 0;
  for (uint64_t s : sums) sum ^= s;
  return sum;
}

}  // namespace shardmesh::bench
