// One pass over the bytes of a name that checks it and drops the wrapper segments that mean the same under all rules
// (_orig_mod, _checkpoint_wrapped_module, _fsdp_wrapped_module): what nearly every name needs, 16 bytes at a time.
// Whatever it cannot do, core/names/names.cc does at its leisure.
// Pure and thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/strings/string_view.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace shardmesh::internal {

inline constexpr absl::string_view kWrapperSegments[] = {"_orig_mod", "_checkpoint_wrapped_module",
                                                         "_fsdp_wrapped_module"};

// 16 bytes, compared all at once: bit i of a mask is about byte i.
struct PlainChunk {
  static constexpr size_t kBytes = 16;
  char bytes[kBytes];

  static PlainChunk Load(const char* from) {
    PlainChunk chunk;
    std::memcpy(chunk.bytes, from, kBytes);
    return chunk;
  }
  void Store(char* to) const { std::memcpy(to, bytes, kBytes); }
  uint32_t Equal(char c) const {
    uint32_t mask = 0;
    for (size_t i = 0; i < kBytes; ++i) mask |= uint32_t{bytes[i] == c} << i;
    return mask;
  }
  uint32_t NotAscii() const {  // NUL counts
    uint32_t mask = 0;
    for (size_t i = 0; i < kBytes; ++i) mask |= uint32_t{static_cast<signed char>(bytes[i]) <= 0} << i;
    return mask;
  }
};

#ifdef __SSE2__
struct SimdChunk {
  static constexpr size_t kBytes = 16;
  __m128i bytes;

  static SimdChunk Load(const char* from) { return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))}; }
  void Store(char* to) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes); }
  uint32_t Equal(char c) const { return _mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(c))); }
  uint32_t NotAscii() const { return _mm_movemask_epi8(_mm_cmplt_epi8(bytes, _mm_set1_epi8(1))); }
};
using NameChunk = SimdChunk;
#else
using NameChunk = PlainChunk;
#endif

// Room that ScanName needs at `out` for a name of `size` bytes.
constexpr size_t ScanRoom(size_t size) { return size + NameChunk::kBytes; }

// The bytes of the wrapper segment at the front of `text` with the "." behind it, 0 when there is none or nothing
// follows it.
inline size_t WrapperAt(absl::string_view text) {
  for (const absl::string_view wrapper : kWrapperSegments) {
    const size_t size = wrapper.size();
    if (text.size() > size + 1 && text[size] == '.' && std::memcmp(text.data(), wrapper.data(), size) == 0) {
      return size + 1;
    }
  }
  return 0;
}

// Writes `name` without its wrapper segments to `out`, at most ScanRoom(name.size()) bytes, and returns the end.
// nullptr: the name is empty, not ASCII, or has a NUL or an empty segment.
template <typename Chunk = NameChunk>
char* ScanName(absl::string_view name, char* out) {
  constexpr size_t kBytes = Chunk::kBytes;
  if (name.empty() || name.back() == '.') return nullptr;
  uint32_t after_dot = 1;  // bit 0: the next byte starts a segment
  uint32_t bad = 0;
  const char* at = name.data();
  const char* const end = at + name.size();
  while (at < end) {
    const size_t left = static_cast<size_t>(end - at);
    size_t taken = left < kBytes ? left : kBytes;
    Chunk chunk;
    if (left >= kBytes) {
      chunk = Chunk::Load(at);
    } else {
      char tail[kBytes];
      std::memset(tail, 'a', kBytes);
      std::memcpy(tail, at, left);
      chunk = Chunk::Load(tail);
    }
    chunk.Store(out);
    const uint32_t dots = chunk.Equal('.');
    const uint32_t starts = (dots << 1) | after_dot;
    uint32_t found = chunk.NotAscii() | (starts & dots);
    after_dot = dots >> (kBytes - 1) & 1;
    for (uint32_t marks = starts & chunk.Equal('_'); marks != 0; marks &= marks - 1) {
      const auto kept = static_cast<size_t>(__builtin_ctz(marks));
      const size_t dropped = WrapperAt(absl::string_view(at + kept, left - kept));
      if (dropped == 0) continue;
      found &= (uint32_t{1} << kept) - 1;  // the bytes behind the wrapper are looked at again
      after_dot = 1;
      out += kept;
      at += kept + dropped;
      taken = 0;
      break;
    }
    bad |= found;
    at += taken;
    out += taken;
  }
  return bad == 0 ? out : nullptr;
}

}  // namespace shardmesh::internal
