#include "bench/memory_speed.h"

#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace shardmesh::bench {
namespace {
constexpr int kWords = 8;  // of a cache line
}  // namespace

void StreamingCopy(void* to, const void* from, int64_t num_bytes) {
#if defined(__x86_64__)
  auto* out = static_cast<__m128i*>(to);
  const auto* in = static_cast<const __m128i*>(from);
  for (int64_t i = 0; i < num_bytes / 16; i += 4) {
    const __m128i a = _mm_load_si128(in + i), b = _mm_load_si128(in + i + 1);
    const __m128i c = _mm_load_si128(in + i + 2), d = _mm_load_si128(in + i + 3);
    _mm_stream_si128(out + i, a);
    _mm_stream_si128(out + i + 1, b);
    _mm_stream_si128(out + i + 2, c);
    _mm_stream_si128(out + i + 3, d);
  }
  _mm_sfence();
#else
  std::memcpy(to, from, num_bytes);
#endif
}

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
