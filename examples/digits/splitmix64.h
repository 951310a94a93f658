// SplitMix64: a tiny seeded generator whose numbers are the same with every compiler and library.
//
// Not for secrets and not for large simulations. A value type; not thread-safe, one per use.
// Formula: G. L. Steele, D. Lea, C. H. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
#pragma once

#include <cstdint>

namespace shardmesh::digits {

class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}

  // An independent stream for each (seed, stream) pair.
  SplitMix64(uint64_t seed, uint64_t stream) : state_(seed) { state_ = Next() ^ (stream * 0xD1342543DE82EF95ull); }

  uint64_t Next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }

  // In [0, bound). The bias is below bound / 2^32. REQUIRES: 1 <= bound <= 2^32.
  uint64_t Below(uint64_t bound) { return ((Next() >> 32) * bound) >> 32; }

  // In (-1, 1), symmetric, an odd multiple of 2^-24: exact in fp32.
  float Symmetric() {
    const int64_t k = static_cast<int64_t>(Next() >> 40);  // 24 bits
    return static_cast<float>(2 * k + 1 - (int64_t{1} << 24)) * (1.0f / (1 << 24));
  }

 private:
  uint64_t state_;
};

}  // namespace shardmesh::digits
