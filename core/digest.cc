#include "core/digest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "absl/strings/str_format.h"
#include "core/format.h"

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

uint64_t DigestRun(int tensor, int stream, int64_t first_element, const void* data, int64_t num_elements,
                   int bytes_per_element) {
  const size_t group_bytes = static_cast<size_t>(kGroupElements) * bytes_per_element;
  const char* bytes = static_cast<const char*>(data);
  uint64_t digest = 0;
  for (int64_t i = 0; i < num_elements; i += kGroupElements, bytes += group_bytes) {
    const int64_t place[3] = {tensor, stream, (first_element + i) / kGroupElements};
    digest += XXH3_64bits_withSeed(bytes, group_bytes, XXH3_64bits(place, sizeof(place)));
  }
  return digest;
}

}  // namespace shardmesh
