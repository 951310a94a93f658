#include "worker/transport/streaming_copy.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace shardmesh {

void StreamingCopy(void* to, const void* from, int64_t bytes) {
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
#if defined(__x86_64__)
  constexpr int64_t kLine = 64;
  const int64_t head = std::min<int64_t>(bytes, -reinterpret_cast<int64_t>(out) & (kLine - 1));
  std::memcpy(out, in, head);
  const int64_t lines = (bytes - head) / kLine;
  auto* line = reinterpret_cast<__m128i*>(out + head);
  const auto* source = reinterpret_cast<const __m128i*>(in + head);
  for (int64_t i = 0; i < 4 * lines; i += 4) {
    const __m128i a = _mm_loadu_si128(source + i), b = _mm_loadu_si128(source + i + 1);
    const __m128i c = _mm_loadu_si128(source + i + 2), d = _mm_loadu_si128(source + i + 3);
    _mm_stream_si128(line + i, a);
    _mm_stream_si128(line + i + 1, b);
    _mm_stream_si128(line + i + 2, c);
    _mm_stream_si128(line + i + 3, d);
  }
  _mm_sfence();
  const int64_t done = head + kLine * lines;
  out += done;
  in += done;
  bytes -= done;
#endif
  std::memcpy(out, in, bytes);
}

}  // namespace shardmesh
