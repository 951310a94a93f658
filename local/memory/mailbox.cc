#include "local/memory/mailbox.h"

#include <algorithm>
#include <cstring>

namespace shardmesh {

bool PutMessage(Message& message, absl::string_view bytes) {
  const uint32_t number = message.number.load(std::memory_order_relaxed);
  if (bytes.size() > kMaxMessageBytes || message.taken.load(std::memory_order_acquire) != number) return false;
  std::memcpy(message.bytes, bytes.data(), bytes.size());
  message.num_bytes.store(static_cast<uint32_t>(bytes.size()), std::memory_order_relaxed);
  message.number.store(number + 1, std::memory_order_seq_cst);
  return true;
}

bool TakeMessage(Message& message, std::string& bytes) {
  const uint32_t number = message.number.load(std::memory_order_seq_cst);
  if (message.taken.load(std::memory_order_relaxed) == number) return false;
  const uint32_t size = std::min(message.num_bytes.load(std::memory_order_relaxed), kMaxMessageBytes);
  bytes.assign(message.bytes, size);
  message.taken.store(number, std::memory_order_release);
  return true;
}

}  // namespace shardmesh
