#include "rpc/testing/http2_client.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"

namespace shardmesh::testing {
namespace {

constexpr int kWaitMs = 10000;

uint32_t ReadBigEndian(absl::string_view bytes) {
  uint32_t value = 0;
  for (char c : bytes) value = value << 8 | static_cast<unsigned char>(c);
  return value;
}

}  // namespace

RawClient::RawClient(int port) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const timeval limit = {10, 0};
  setsockopt(fd_.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));  // bounds connect
  if (connect(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    fd_.reset();
  } else {
    fcntl(fd_.get(), F_SETFL, fcntl(fd_.get(), F_GETFL) | O_NONBLOCK);
  }
}

bool RawClient::Write(absl::string_view bytes) {
  while (!bytes.empty()) {
    if (closed_) return false;
    pollfd poll_fd = {fd_.get(), POLLIN | POLLOUT, 0};
    if (poll(&poll_fd, 1, kWaitMs) <= 0) return false;
    if ((poll_fd.revents & POLLIN) != 0) FillBuffer(absl::ZeroDuration());
    if ((poll_fd.revents & POLLOUT) == 0) {
      if ((poll_fd.revents & (POLLERR | POLLHUP)) != 0) return false;
      continue;
    }
    const ssize_t sent = send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) bytes.remove_prefix(static_cast<size_t>(sent));
    if (sent < 0 && errno != EAGAIN && errno != EINTR) return false;
  }
  return true;
}

bool RawClient::StartHttp2() {
  return Write(absl::StrCat("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", EncodeFrame(kSettings, 0, 0, "")));
}

bool RawClient::FillBuffer(absl::Duration timeout) {
  pollfd poll_fd = {fd_.get(), POLLIN, 0};
  if (closed_ || poll(&poll_fd, 1, static_cast<int>(absl::ToInt64Milliseconds(timeout))) <= 0) return false;
  char buffer[1 << 16];
  const ssize_t got = recv(fd_.get(), buffer, sizeof(buffer), 0);
  if (got > 0) received_.append(buffer, static_cast<size_t>(got));
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) closed_ = true;
  return got > 0;
}

Frame RawClient::ReadFrame(absl::Duration timeout) {
  const absl::Time until = MonotonicNow() + timeout;
  for (;;) {
    if (received_.size() >= 9) {
      const size_t length = ReadBigEndian(absl::string_view(received_).substr(0, 3));
      if (received_.size() >= 9 + length) {
        Frame frame;
        frame.type = static_cast<uint8_t>(received_[3]);
        frame.flags = static_cast<uint8_t>(received_[4]);
        frame.stream = ReadBigEndian(absl::string_view(received_).substr(5, 4)) & 0x7fffffff;
        frame.payload = received_.substr(9, length);
        received_.erase(0, 9 + length);
        return frame;
      }
    }
    const absl::Duration left = until - MonotonicNow();
    if (closed_ || left < absl::ZeroDuration()) return {};
    FillBuffer(left);
  }
}

bool RawClient::WaitForClose(absl::Duration timeout) {
  const absl::Time until = MonotonicNow() + timeout;
  while (!closed_ && MonotonicNow() < until) {
    received_.clear();
    FillBuffer(until - MonotonicNow());
  }
  return closed_;
}

std::string BigEndian32(uint32_t value) {
  std::string out;
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(value >> shift & 0xff);
  return out;
}

std::string EncodeFrame(uint8_t type, uint8_t flags, uint32_t stream, absl::string_view payload) {
  std::string frame = BigEndian32(static_cast<uint32_t>(payload.size())).substr(1);
  frame += static_cast<char>(type);
  frame += static_cast<char>(flags);
  return absl::StrCat(frame, BigEndian32(stream), payload);
}

std::string EncodeInteger(uint8_t first_byte, int prefix_bits, uint64_t value) {
  const uint64_t max = (uint64_t{1} << prefix_bits) - 1;
  if (value < max) return std::string(1, static_cast<char>(first_byte | value));
  std::string out(1, static_cast<char>(first_byte | max));
  for (value -= max; value >= 128; value >>= 7) out += static_cast<char>(value % 128 + 128);
  out += static_cast<char>(value);
  return out;
}

std::string EncodeHeader(absl::string_view name, absl::string_view value) {
  return absl::StrCat(absl::string_view("\x10", 1), EncodeInteger(0, 7, name.size()), name,
                      EncodeInteger(0, 7, value.size()), value);
}

std::string CallHeaders(absl::string_view path) {
  return absl::StrCat(EncodeHeader(":method", "POST"), EncodeHeader(":scheme", "http"), EncodeHeader(":path", path),
                      EncodeHeader(":authority", "test"), EncodeHeader("te", "trailers"),
                      EncodeHeader("content-type", "application/grpc"), EncodeHeader("grpc-timeout", "60S"));
}

}  // namespace shardmesh::testing
