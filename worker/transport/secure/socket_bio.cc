#include "worker/transport/secure/socket_bio.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace shardmesh {

// The functions of such a BIO, as OpenSSL calls them.
struct SocketBio {
  static SocketBuffer& Of(BIO* bio) { return *static_cast<SocketBuffer*>(BIO_get_data(bio)); }
  static bool IsLater() { return errno == EAGAIN || errno == EWOULDBLOCK; }

  static int Read(BIO* bio, char* to, int bytes) {
    BIO_clear_retry_flags(bio);
    const int got = Of(bio).Read(to, bytes);
    if (got < 0 && IsLater()) BIO_set_retry_read(bio);
    return got;
  }
  static int Write(BIO* bio, const char* from, int bytes) {
    BIO_clear_retry_flags(bio);
    const int sent = Of(bio).Write(from, bytes);
    if (sent < 0 && IsLater()) BIO_set_retry_write(bio);
    return sent;
  }
  static long Control(BIO* bio, int command, long, void*) {
    if (command == BIO_CTRL_DUP || command == BIO_CTRL_PUSH || command == BIO_CTRL_POP) return 1;
    if (command != BIO_CTRL_FLUSH) return 0;
    BIO_clear_retry_flags(bio);
    if (Of(bio).Flush()) return 1;
    if (Of(bio).failed() == 0) BIO_set_retry_write(bio);
    return -1;
  }
  static BIO_METHOD* Method() {
    BIO_METHOD* const method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "buffered socket");
    if (method == nullptr) return nullptr;
    BIO_meth_set_read(method, Read);
    BIO_meth_set_write(method, Write);
    BIO_meth_set_ctrl(method, Control);
    return method;
  }
};

BIO* SocketBuffer::NewBio() {
  static BIO_METHOD* const method = SocketBio::Method();  // of all, for as long as the process lives
  BIO* const bio = method != nullptr ? BIO_new(method) : nullptr;
  if (bio == nullptr) return nullptr;
  BIO_set_data(bio, this);
  BIO_set_init(bio, 1);
  return bio;
}

int SocketBuffer::Read(char* to, int bytes) {
  if (in_begin_ == in_end_) {
    ssize_t got = 0;
    do {
      got = recv(fd_, in_.data(), in_.size(), 0);
    } while (got < 0 && errno == EINTR);
    if (got <= 0) return static_cast<int>(got);
    in_begin_ = 0;
    in_end_ = static_cast<size_t>(got);
  }
  const size_t taken = std::min(static_cast<size_t>(bytes), in_end_ - in_begin_);
  std::memcpy(to, &in_[in_begin_], taken);
  in_begin_ += taken;
  return static_cast<int>(taken);
}

int SocketBuffer::Write(const char* from, int bytes) {
  if (out_.size() - out_end_ < static_cast<size_t>(bytes) && !Flush()) {
    errno = failed_ != 0 ? failed_ : EAGAIN;
    return -1;
  }
  const size_t taken = std::min(static_cast<size_t>(bytes), out_.size() - out_end_);
  std::memcpy(&out_[out_end_], from, taken);
  out_end_ += taken;
  return static_cast<int>(taken);
}

bool SocketBuffer::Flush() {
  while (out_begin_ < out_end_ && failed_ == 0) {
    const ssize_t sent = send(fd_, &out_[out_begin_], out_end_ - out_begin_, MSG_NOSIGNAL);
    if (sent >= 0) {
      out_begin_ += static_cast<size_t>(sent);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return false;
    } else if (errno != EINTR) {
      failed_ = errno;
    }
  }
  if (failed_ != 0) return false;
  out_begin_ = out_end_ = 0;
  return true;
}

}  // namespace shardmesh
