#include "local/mailbox.h"

#include <algorithm>
#include <cstring>

namespace shardmesh {

bool PutLetter(Letter& letter, absl::string_view bytes) {
  const uint32_t number = letter.number.load(std::memory_order_relaxed);
  if (bytes.size() > kMaxLetterBytes || letter.taken.load(std::memory_order_acquire) != number) return false;
  std::memcpy(letter.bytes, bytes.data(), bytes.size());
  letter.num_bytes.store(static_cast<uint32_t>(bytes.size()), std::memory_order_relaxed);
  letter.number.store(number + 1, std::memory_order_seq_cst);
  return true;
}

bool TakeLetter(Letter& letter, std::string& bytes) {
  const uint32_t number = letter.number.load(std::memory_order_seq_cst);
  if (letter.taken.load(std::memory_order_relaxed) == number) return false;
  const uint32_t size = std::min(letter.num_bytes.load(std::memory_order_relaxed), kMaxLetterBytes);
  bytes.assign(letter.bytes, size);
  letter.taken.store(number, std::memory_order_release);
  return true;
}

}  // namespace shardmesh
