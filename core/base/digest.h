// Digests of values: 128-bit hashes that are the same on every machine (XXH3, stable since xxHash 0.8), for plans and
// keys. Weights and states have theirs: core/format/stream_digest.h. Not a defence against an adversary. Pure and
// thread-safe.
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

}  // namespace shardmesh
