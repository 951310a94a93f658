// ChildServer: an echo_server process, for tests. Killed by the destructor.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace shardmesh::testing {

class ChildServer {
 public:
  // `descriptor_limit` 0: the test's own.
  static absl::StatusOr<std::unique_ptr<ChildServer>> Start(const std::string& listen, int descriptor_limit);
  ~ChildServer();
  const std::string& address() const { return address_; }
  int port() const;
  pid_t pid() const { return pid_; }
  // Resident memory now, and its highest value so far.
  int64_t rss_bytes() const { return StatusBytes("VmRSS:"); }
  int64_t peak_rss_bytes() const { return StatusBytes("VmHWM:"); }
  int open_descriptors() const;
  int threads() const { return static_cast<int>(StatusBytes("Threads:") >> 10); }
  bool alive() const;
  // SIGTERM, then its exit status; -1 when it did not end within 10 s or by a signal.
  int Terminate();

 private:
  ChildServer(pid_t pid, std::string address) : pid_(pid), address_(std::move(address)) {}
  int64_t StatusBytes(const std::string& key) const;

  pid_t pid_;
  std::string address_;
};

}  // namespace shardmesh::testing
