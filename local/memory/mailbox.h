// Mailbox: messages between two processes of a host, in memory that both map: one at a time each way, without a system
// call and without a copy in the kernel. Each way has one writer and one reader, and one message at a time.
//
// Thread-safe as far as that. What a hostile other side may write is bounded: a length is checked before it is used,
// and the bytes are copied before anything reads them.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace shardmesh {

inline constexpr uint32_t kMaxMessageBytes = 40'000;  // a learning rate of each parameter group, and some

// One way. Zeros: no message yet.
struct Message {
  alignas(64) std::atomic<uint32_t> number;  // of the newest; a futex word
  std::atomic<uint32_t> taken;               // of the newest that was taken
  std::atomic<uint32_t> num_bytes;
  char bytes[kMaxMessageBytes];
};

struct Mailbox {
  Message request, reply;
  alignas(64) std::atomic<uint32_t> answered;  // number of the newest request that was answered

  // Whether a request waits for its answer.
  bool open() const { return request.number.load() != answered.load(); }
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && alignof(Mailbox) == 64);

// REQUIRES: room for a Mailbox, at a multiple of 64 bytes, that was zeros at first.
inline Mailbox& MailboxAt(char* memory) { return *reinterpret_cast<Mailbox*>(memory); }

// Writes a message, unless the last one was not taken yet, or it is too long: false. Does not wake anybody.
bool PutMessage(Message& message, absl::string_view bytes);

// The message that was not taken yet: its bytes, and from now on it is. False: there is none.
bool TakeMessage(Message& message, std::string& bytes);

}  // namespace shardmesh
