// HostFleet: hosts as network namespaces on one bridge, a shardmesh-node with workers on each, and a coordinator beside
// them, all over TLS. A whole host can be killed and started again. Needs root. For one thread.
//
//   ASSIGN_OR_RETURN(const auto fleet, HostFleet::Create({}));
//   RETURN_IF_ERROR(fleet->Start());
//   ASSIGN_OR_RETURN(const double killed, fleet->KillHost(1));
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "bench/harness/folder.h"
#include "bench/harness/process.h"
#include "client/cpp/client.h"

namespace shardmesh::bench {

struct HostFleetOptions {
  int hosts = 3;
  int workers = 2;  // of each host
  // Silence after which the coordinator counts a worker as lost. Heartbeats come six times as often. Both are as the
  // coordinator has them of its own.
  absl::Duration heartbeat_timeout = absl::Seconds(3);
};

class HostFleet {
 public:
  // The namespaces, the bridge and the certificates; no process yet. PermissionDenied: there can be none here, and why.
  // FailedPrecondition: the openssl program could not make certificates.
  static absl::StatusOr<std::unique_ptr<HostFleet>> Create(const HostFleetOptions& options);
  ~HostFleet();  // kills all processes
  HostFleet(const HostFleet&) = delete;
  HostFleet& operator=(const HostFleet&) = delete;

  // Starts the coordinator, and every host. Workers join by themselves: a job waits for them. Errors of Process.
  absl::Status Start();
  // Starts the node of a host that was killed, which starts its workers.
  absl::Status StartHost(int host);
  // Kills the host's node and all of its workers with SIGKILL, one directly after the other. Returns MonotonicSeconds()
  // at the first signal. Internal: the host has another number of workers, and nothing was killed.
  absl::StatusOr<double> KillHost(int host);
  // Starts a program on a host, which then has the host's network. Errors of Process.
  absl::StatusOr<std::unique_ptr<Process>> StartOn(int host, std::vector<std::string> command) const;

  absl::StatusOr<Client> Connect() const { return Connect(coordinator_address_, folder_->path()); }
  // For a process that StartOn started, which was told folder() and coordinator_address().
  static absl::StatusOr<Client> Connect(const std::string& coordinator, const std::string& folder);
  const std::string& folder() const { return folder_->path(); }
  const std::string& coordinator_address() const { return coordinator_address_; }
  const HostFleetOptions& options() const { return options_; }
  const std::string& name(int host) const { return names_[host]; }  // of its namespace
  std::string address(int host) const;

 private:
  explicit HostFleet(const HostFleetOptions& options);
  absl::Status CreateHosts();
  absl::Status MakeCertificates() const;
  std::vector<pid_t> WorkersOf(int host) const;
  void Kill(int host, const std::vector<pid_t>& workers);

  const HostFleetOptions options_;
  const std::string bridge_;
  std::vector<std::string> names_;
  std::unique_ptr<Folder> folder_;
  std::string coordinator_address_;
  std::unique_ptr<Process> coordinator_;
  std::vector<std::unique_ptr<Process>> nodes_;  // by host; null: it does not run
};

}  // namespace shardmesh::bench
