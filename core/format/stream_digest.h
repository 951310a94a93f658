// The digest of stored streams: 64 bits that are the same exactly where weights and states are (but for one case in
// 2^64), and that parts of a tensor add up to, whoever has them.
//
// The bytes of a stream's part (core/format/numeric_formats.h) are cut in words, counted from the tensor's start: of 8
// bytes, little-endian, where every 256 elements have a whole number of them; else (the scales of some formats) of one
// entry each. A tensor's last word is filled up with zeros. Word j becomes Mix64(word ^ (key + j * kDigestStep)), where
// the key is of (tensor, stream, part), and these are added modulo 2^64. So digests of disjoint stretches add up to
// that of their union in any order, for any mesh, any tile. Mix64 is a bijection, so a change of one word always
// changes the sum. Not a defence against an adversary.
//
// Source: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): its step
// makes the words' keys, its finalizer mixes. Element rules for CPU and GPU; pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/base/host_device.h"
#include "core/base/philox.h"
#include "core/format/numeric_formats.h"

namespace shardmesh {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as they lie in memory");

inline constexpr uint64_t kDigestStep = 0x9E3779B97F4A7C15u;  // 2^64 over the golden ratio, odd

// stream: 0 weights, 1 to 3 the states in their order. part: 0 codes, 1 remainder or scales.
SHARDMESH_RULE uint64_t DigestKey(uint32_t tensor, int stream, int part) {
  return Mix64(kDigestStep + (uint64_t{tensor} << 8 | static_cast<uint64_t>(2 * stream + part)));
}

SHARDMESH_RULE int64_t DigestWordBytes(const PartLayout& layout) {
  const bool fits = 256 % layout.elements == 0 && 256 / layout.elements * layout.bytes % 8 == 0;
  return fits ? 8 : layout.bytes;
}

// Words [first_word, ...) of a part: `bytes` at `data`, of which the last word may have fewer. Of `lanes` threads that
// do it together each gets its share, to be added.
SHARDMESH_RULE uint64_t DigestWords(uint64_t key, uint64_t first_word, int64_t word_bytes, const void* data,
                                    int64_t bytes, int64_t lane = 0, int64_t lanes = 1) {
  const auto* from = static_cast<const uint8_t*>(data);
  const uint64_t step = static_cast<uint64_t>(lanes) * kDigestStep;
  key += (first_word + static_cast<uint64_t>(lane)) * kDigestStep;
  uint64_t digest = 0;
  int64_t j = lane;
  if (word_bytes == 8) {
    for (const int64_t whole = bytes / 8; j < whole; j += lanes, key += step) {
      uint64_t word;
      memcpy(&word, from + 8 * j, sizeof(word));
      digest += Mix64(word ^ key);
    }
  }
  for (; j * word_bytes < bytes; j += lanes, key += step) {
    uint64_t word = 0;
    for (int64_t b = 0; b < word_bytes && j * word_bytes + b < bytes; ++b) {
      word |= uint64_t{from[j * word_bytes + b]} << (8 * b);
    }
    digest += Mix64(word ^ key);
  }
  return digest;
}

// Elements [first_element, first_element + num_elements) of a part, which lie at `data`. REQUIRES: the stretch begins
// where a word does (a multiple of 256 always does) and ends so, or with its tensor.
SHARDMESH_RULE uint64_t DigestPart(uint64_t key, const PartLayout& layout, uint64_t first_element, const void* data,
                                   int64_t num_elements) {
  const int64_t word_bytes = DigestWordBytes(layout);
  const uint64_t entries = first_element / static_cast<uint64_t>(layout.elements);
  const uint64_t first_word = entries * static_cast<uint64_t>(layout.bytes) / static_cast<uint64_t>(word_bytes);
  return DigestWords(key, first_word, word_bytes, data, layout.BytesOf(num_elements));
}

// Both parts of a stream; `extra` may be null where there is none.
SHARDMESH_RULE uint64_t DigestStream(uint32_t tensor, int stream, const StoredLayout& layout, uint64_t first_element,
                                     const void* codes, const void* extra, int64_t num_elements) {
  return DigestPart(DigestKey(tensor, stream, 0), layout.codes, first_element, codes, num_elements) +
         DigestPart(DigestKey(tensor, stream, 1), layout.extra, first_element, extra, num_elements);
}

}  // namespace shardmesh
