// Service: a coordinator and workers as processes of their own, and a client of them, for benchmarks.
// Killed with the object. Not thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/harness/folder.h"
#include "bench/harness/process.h"
#include "client/cpp/client.h"

namespace shardmesh::bench {

class Service {
 public:
  // All processes on `core` (Process), each worker listening on `worker_listen`. `folder` is for their files. `spin`:
  // of workers and of the client. `hosts`: as which the workers count, equally many on each: they meet on loopback in the
  // clear. Errors of Process and of the client.
  static absl::StatusOr<std::unique_ptr<Service>> Start(const std::string& folder, const std::string& worker_listen,
                                                        int core, absl::Duration spin = absl::ZeroDuration(),
                                                        int workers = 1, int hosts = 1);

  Client& client() { return *client_; }
  const std::string& address() const { return address_; }  // the coordinator's
  void KillWorker(int number) { workers_[number].reset(); }
  // A worker's so far. REQUIRES: it was not killed.
  double WorkerSeconds(int number = 0) const { return workers_[number]->ProcessorSeconds(); }
  double WorkerPeakBytes(int number) const { return workers_[number]->PeakBytes(); }

 private:
  Service() = default;
  std::string address_;
  std::unique_ptr<Process> coordinator_;
  std::vector<std::unique_ptr<Process>> workers_;
  std::unique_ptr<Client> client_;
};

}  // namespace shardmesh::bench
