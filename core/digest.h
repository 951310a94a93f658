// Digests: 64-bit and 128-bit hashes that are the same on every machine (XXH3, stable since xxHash 0.8), for plan
// hashes and for comparing weights and states. Not a defence against an adversary. Pure and thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace shardmesh {

// A 128-bit hash of a sequence of values; every value is framed, so ("ab","c") and ("a","bc") differ.
class Hasher {
 public:
  void Add(absl::string_view text);
  void Add(int64_t value);
  void Add(int value) { Add(static_cast<int64_t>(value)); }
  std::string Hex() const;  // 32 lower-case hexadecimal digits

 private:
  std::string framed_;
};

// The digest of a stretch of one tensor's stream, cut in groups of kGroupElements: each group is hashed with its place
// (tensor, stream, group index) as seed and the hashes are added modulo 2^64. So digests of disjoint stretches add up
// to the digest of their union, in any order and for any mesh.
//   stream: 0 weights, 1 first moment, 2 second moment. first_element: a multiple of kGroupElements.
//   num_elements: a multiple of kGroupElements; bytes_per_element of the stream's format.
uint64_t DigestRun(int tensor, int stream, int64_t first_element, const void* data, int64_t num_elements,
                   int bytes_per_element);

}  // namespace shardmesh
