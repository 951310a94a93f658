// TcpRelay: a line between hosts, for tests: forwards TCP connections of this machine with a delay and at a limited
// rate, and stops or drops them on command. Linux. Thread-safe; its own thread looks every two milliseconds.
#pragma once

#include <netinet/in.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/sync.h"
#include "local/descriptor/fd.h"

namespace shardmesh::testing {

class TcpRelay {
 public:
  TcpRelay();
  ~TcpRelay();
  TcpRelay(const TcpRelay&) = delete;
  TcpRelay& operator=(const TcpRelay&) = delete;

  // Forwards what connects to the address that is returned: the same host, another port. `side`: which of the two
  // hosts, 0 or 1, `to` is on.
  absl::StatusOr<sockaddr_in> Route(const sockaddr_in& to, int side = 0);

  // For bytes that come from now on: all connections share what the line carries towards a side.
  void SetLine(absl::Duration delay, double bytes_per_second);
  // Forwards nothing any more; connections stay open.
  void Stop();
  // Resets all connections.
  void Drop();
  int64_t forwarded_bytes() const;

 private:
  struct Chunk {
    absl::Time due;
    std::string bytes;
  };
  struct Way {
    std::deque<Chunk> chunks;
    int64_t waiting = 0;  // bytes
    bool ended = false;
  };
  struct Connection {
    UniqueFd ends[2];
    Way ways[2];   // from ends[i] to the other one
    int side = 0;  // that ends[1] is on
  };
  struct Listener {
    UniqueFd fd;
    sockaddr_in to;
    int side;
  };

  void Run();
  void AcceptLocked(const Listener& listener) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReadLocked(Connection& connection, int from) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void WriteLocked(Connection& connection, int from) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  CondVar changed_;
  std::vector<Listener> listeners_ ABSL_GUARDED_BY(mu_);
  std::vector<std::unique_ptr<Connection>> connections_ ABSL_GUARDED_BY(mu_);
  absl::Duration delay_ ABSL_GUARDED_BY(mu_);
  double bytes_per_second_ ABSL_GUARDED_BY(mu_) = 1e12;
  absl::Time free_[2] ABSL_GUARDED_BY(mu_);  // by side: when the line has taken in what came for it
  int64_t forwarded_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace shardmesh::testing
