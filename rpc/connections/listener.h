// Listener: a bound and listening stream socket, TCP or UNIX. Owns the socket, and for UNIX the file: the destructor
// removes it if it is still the one made here. For one thread.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "local/descriptor/fd.h"
#include "rpc/base/address.h"

namespace shardmesh {

class Listener {
 public:
  // Non-blocking, close-on-exec, SO_REUSEADDR; port 0 has the kernel choose one. A name is looked up and its first
  // address taken ("localhost" is 127.0.0.1). A UNIX socket file is made with mode 0600; one that nobody answers on is
  // replaced.
  //   AlreadyExists: the port or the socket file is in use. InvalidArgument: no such host or address on this machine, a
  //   file that is no socket stands in the way, or its folder is missing. PermissionDenied: a port or folder that needs
  //   other rights. Internal or ResourceExhausted: the kernel refused (errno in the message).
  static absl::StatusOr<std::unique_ptr<Listener>> Open(const Address& address);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Whether the path of a UNIX socket still leads here: a cleaner of temporary folders may have removed the file, and
  // then nobody can connect. True of TCP.
  bool IsReachable() const;
  // Listens at the same address anew, in place of a socket that cannot be reached; fd() is another one then. Errors of
  // Open; then nothing changed.
  absl::Status ListenAgain();

  int fd() const { return fd_.get(); }
  // With the port that was chosen.
  const Address& address() const { return address_; }

 private:
  Listener(UniqueFd fd, Address address);

  UniqueFd fd_;
  Address address_;
  dev_t file_device_ = 0;
  ino_t file_inode_ = 0;
};

}  // namespace shardmesh
