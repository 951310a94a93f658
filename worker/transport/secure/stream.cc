#include "worker/transport/secure/stream.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace shardmesh {
namespace {

class ClearStream final : public Stream {
 public:
  explicit ClearStream(UniqueFd fd) : Stream(std::move(fd)) {}

  int64_t Read(char* to, int64_t bytes) override {
    while (true) {
      const ssize_t got = recv(fd(), to, static_cast<size_t>(bytes), 0);
      if (got > 0) return got;
      if (got == 0) return Ended(End::kClosed, "the connection was closed");
      if (errno != EINTR) return Failed();
    }
  }

  int64_t Write(const char* from, int64_t bytes) override {
    while (true) {
      const ssize_t sent = send(fd(), from, static_cast<size_t>(bytes), MSG_NOSIGNAL);
      if (sent >= 0) return sent;
      if (errno != EINTR) return Failed();
    }
  }

 private:
  int64_t Failed() {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    return Ended(End::kClosed, std::strerror(errno));
  }
};

}  // namespace

std::unique_ptr<Stream> NewClearStream(UniqueFd fd) { return std::make_unique<ClearStream>(std::move(fd)); }

}  // namespace shardmesh
