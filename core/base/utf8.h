// UTF-8 (RFC 3629, section 4), as protocol buffers demand it of every string. Pure, thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace shardmesh {

// The smallest code point that needs `length` bytes: shorter ones written so long are overlong.
inline constexpr uint32_t kFirstOfLength[] = {0, 0, 0x80, 0x800, 0x10000};

// Bytes of the UTF-8 sequence at the front of `text`, 0 when there is none (RFC 3629, section 4). REQUIRES: not empty.
inline size_t Utf8Length(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char head = byte(0);
  if (head < 0x80) return 1;
  const size_t length = head >= 0xF8 ? 0 : head >= 0xF0 ? 4 : head >= 0xE0 ? 3 : head >= 0xC0 ? 2 : 0;
  if (length == 0 || length > text.size()) return 0;
  uint32_t point = head & (0x7F >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
    point = point << 6 | (byte(i) & 0x3F);
  }
  const bool surrogate = point >= 0xD800 && point <= 0xDFFF;
  return point < kFirstOfLength[length] || point > 0x10FFFF || surrogate ? 0 : length;
}

inline bool IsUtf8(absl::string_view text) {
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

}  // namespace shardmesh
