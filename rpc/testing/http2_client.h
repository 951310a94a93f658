// RawClient: a TCP socket that writes HTTP/2 frames, right or wrong, as a hostile peer would. Tests only.
// Every read and write gives up after the time it is told, or 10 s. Not thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "local/descriptor/fd.h"

namespace shardmesh::testing {

struct Frame {
  uint8_t type = 0xff;  // 0xff: none came; the connection was closed, or time was up
  uint8_t flags = 0;
  uint32_t stream = 0;
  std::string payload;
  bool valid() const { return type != 0xff; }
};

enum FrameType : uint8_t {
  kData = 0,
  kHeaders = 1,
  kRstStream = 3,
  kSettings = 4,
  kPing = 6,
  kGoAway = 7,
  kWindowUpdate = 8,
  kContinuation = 9
};
inline constexpr uint8_t kEndStream = 1;
inline constexpr uint8_t kAck = 1;
inline constexpr uint8_t kEndHeaders = 4;

class RawClient {
 public:
  // Not connected (connected() is false) when the server refuses or does not answer.
  explicit RawClient(int port);
  bool connected() const { return fd_.valid(); }
  int fd() const { return fd_.get(); }
  // The last read or write found that the server has closed or reset the connection.
  bool closed() const { return closed_; }

  // All of `bytes`; false when the server closed the connection or reads nothing for 10 s. What the server sends
  // meanwhile is kept for ReadFrame.
  bool Write(absl::string_view bytes);
  // The client's preface with empty settings.
  bool StartHttp2();
  Frame ReadFrame(absl::Duration timeout = absl::Seconds(10));
  // Closed by the server within `timeout`? What it sent before is thrown away.
  bool WaitForClose(absl::Duration timeout);

 private:
  bool FillBuffer(absl::Duration timeout);

  UniqueFd fd_;
  std::string received_;
  bool closed_ = false;
};

std::string EncodeFrame(uint8_t type, uint8_t flags, uint32_t stream, absl::string_view payload);
// A literal header field, never indexed, no Huffman code.
std::string EncodeHeader(absl::string_view name, absl::string_view value);
// An HPACK integer of `prefix_bits` after `first_byte`'s pattern.
std::string EncodeInteger(uint8_t first_byte, int prefix_bits, uint64_t value);
// The headers of a call of `path`, "/package.Service/Method", with a deadline of 60 s.
std::string CallHeaders(absl::string_view path);
std::string BigEndian32(uint32_t value);

}  // namespace shardmesh::testing
