#include "core/base/digest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "absl/strings/str_format.h"

namespace shardmesh {

void Hasher::Add(absl::string_view text) {
  Add(static_cast<int64_t>(text.size()));
  framed_.append(text.data(), text.size());
}

void Hasher::Add(int64_t value) {
  char bytes[8];  // little-endian on every machine
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(static_cast<uint64_t>(value) >> (8 * i));
  framed_.append(bytes, sizeof(bytes));
}

std::string Hasher::Hex() const {
  const XXH128_hash_t hash = XXH3_128bits(framed_.data(), framed_.size());
  return absl::StrFormat("%016x%016x", hash.high64, hash.low64);
}

}  // namespace shardmesh
