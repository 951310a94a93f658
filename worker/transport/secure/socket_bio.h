// SocketBuffer: what OpenSSL reads from and writes to in place of a socket. One system call moves several records of
// TLS (OpenSSL alone makes two for each that it reads and one for each that it writes), and none ends the process with
// SIGPIPE. Nothing here waits. Not thread-safe.
#pragma once

#include <openssl/bio.h>

#include <cstddef>
#include <vector>

namespace shardmesh {

class SocketBuffer {
 public:
  // The socket does not block and outlives the object.
  explicit SocketBuffer(int fd) : fd_(fd), in_(kBytes), out_(kBytes) {}

  // A new BIO over this buffer, which outlives it; null: no memory.
  BIO* NewBio();

  // Sends what was written; false: some of it could not go now, or never can: then failed() is true.
  bool Flush();
  bool flushed() const { return out_begin_ == out_end_; }
  int failed() const { return failed_; }  // the errno of a write; 0: none

 private:
  friend struct SocketBio;
  static constexpr size_t kBytes = 72 << 10;  // four records of 16 KiB, and what is around them

  // As read and write of a BIO: > 0, or -1 with errno.
  int Read(char* to, int bytes);
  int Write(const char* from, int bytes);

  const int fd_;
  std::vector<char> in_, out_;
  size_t in_begin_ = 0, in_end_ = 0, out_begin_ = 0, out_end_ = 0;
  int failed_ = 0;
};

}  // namespace shardmesh
