// Stream: bytes both ways over one TCP connection, in the clear or inside of TLS (tls_stream.h). Nothing here waits.
// Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "local/descriptor/fd.h"

namespace shardmesh {

class Stream {
 public:
  // Why nothing more comes.
  enum class End {
    kNone,     // more may come
    kClosed,   // the peer or the network ended the connection
    kRefused,  // one side does not accept the other's certificate, or what came is not TLS, or was altered
  };
  enum class Shaken { kDone, kLater, kEnded };

  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // What has to come before bytes do. REQUIRES: the connection is there.
  virtual Shaken Shake() { return Shaken::kDone; }

  // How many of at most `bytes` were read or written; 0: none now, wait for the descriptor; -1: none ever, end() and
  // why() say the reason. What was written may lie here until Flush. A write that could not be made now is tried again
  // with the same bytes. Reading stays possible after a write that failed: what came before is still there.
  virtual int64_t Read(char* to, int64_t bytes) = 0;
  virtual int64_t Write(const char* from, int64_t bytes) = 0;
  // Sends what was written; false: some is left. end(): it never goes.
  virtual bool Flush() { return true; }
  virtual bool flushed() const { return true; }
  // Whether what could not be done now waits to write, though it was a read, say.
  virtual bool WantsToWrite() const { return false; }

  // 32 bytes that both ends of this connection know, and nobody else can have in another one; in the clear they are
  // zero. REQUIRES: Shake is done.
  virtual std::string Binding() const { return std::string(32, '\0'); }
  // "clear", or what protects the bytes. REQUIRES: Shake is done.
  virtual std::string Protection() const { return "clear"; }

  int fd() const { return fd_.get(); }
  End end() const { return end_; }
  const std::string& why() const { return why_; }

 protected:
  explicit Stream(UniqueFd fd) : fd_(std::move(fd)) {}

  int64_t Ended(End end, std::string why) {
    end_ = end;
    why_ = std::move(why);
    return -1;
  }

 private:
  UniqueFd fd_;
  End end_ = End::kNone;
  std::string why_;
};

// In the clear. REQUIRES: a socket that does not block.
std::unique_ptr<Stream> NewClearStream(UniqueFd fd);

}  // namespace shardmesh
