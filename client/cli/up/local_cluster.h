// LocalCluster: a coordinator and a shardmesh-node with its workers (or the workers themselves) as child processes of
// this one. Not thread-safe. Every wait ends at a deadline or when `stop` is asked for.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cli/up/node_workers.h"
#include "client/cli/up/owned_folder.h"
#include "local/process/child_process.h"
#include "local/process/restarts.h"
#include "rpc/base/main_support.h"
#include "rpc/tls/tls.h"

namespace shardmesh {

struct ClusterOptions {
  std::string coordinator_binary, worker_binary, node_binary;  // paths; the last one for `keep`
  int num_workers = 1;
  std::string mesh;  // the default mesh of jobs; unset: none
  std::string listen = "127.0.0.1:7000";
  std::string advertise;  // the host that others dial, of coordinator and workers; unset: that of `listen`
  std::string state = ":memory:";
  std::string log_dir;  // a NAME.log for every process; unset: their logs go to standard error
  std::string log_level = "info";
  int threads = 1;                             // of a worker's step
  std::vector<std::string> devices = {"cpu"};  // of the workers, in turn: cpu or cuda:N
  int heartbeat_interval_ms = 500, heartbeat_timeout_ms = 3000;
  std::vector<std::string> checkpoint_roots;  // of the workers
  TlsOptions tls;                             // of every process
  absl::Duration start_timeout = absl::Seconds(30);
  absl::Duration stop_grace = absl::Seconds(10);  // from SIGTERM to SIGKILL
  // The workers are those of a shardmesh-node, which starts them again, with the memory of their jobs, when they are
  // killed. If not, they are children of this process.
  bool keep = true;
  // Starts again what of its children ended by itself, but for a coordinator whose state was in its memory.
  bool restart = false;
};

// What happens to a process, as it happens.
struct ClusterEvents : NodeWorkers::Events {
  std::function<void(const std::string& name, const absl::Status& error)> not_restarted;  // it is tried again
};

class LocalCluster {
 public:
  // Starts all processes and waits until every worker has joined.
  // DeadlineExceeded: some process was not ready in time. Unavailable: one ended before (named, with its log), or the
  // folder for what they tell cannot be made. Cancelled: `stop` was asked for. Errors of ChildProcess::Start.
  // On any error all are stopped.
  static absl::StatusOr<std::unique_ptr<LocalCluster>> Start(ClusterOptions options, ClusterEvents events,
                                                             StopSignal& stop);
  // As Stop().
  ~LocalCluster();

  const std::string& address() const { return address_; }  // of the coordinator

  // Reports what ends, and starts it again if the options say so, until `stop` is asked for (OK). Unavailable: every
  // process has ended by itself.
  absl::Status Supervise(StopSignal& stop);

  // Ends the workers, then the coordinator: SIGTERM, and after the grace SIGKILL.
  void Stop();

 private:
  // A process, and how it is started.
  struct Child {
    ChildOptions options;
    std::unique_ptr<ChildProcess> process;
    absl::Time started, again = absl::InfiniteFuture();
    bool reported = false;  // that it ended
    Restarts restarts;
  };

  LocalCluster(ClusterOptions options, ClusterEvents events, std::unique_ptr<OwnedFolder> folder);
  absl::Status StartAll(StopSignal& stop);
  absl::Status StartCoordinator();
  absl::Status StartWorkers();
  absl::Status StartNode();
  absl::Status StartChild(const std::string& name, const std::string& program, std::vector<std::string> args);
  // Of the process of that name, once it serves (a worker: once it has joined).
  absl::StatusOr<std::string> AwaitAddress(const std::string& name, absl::Time deadline, StopSignal& stop);
  absl::Status CheckNoneEnded() const;
  std::string LogFile(const std::string& name) const;
  void StopRange(size_t begin, size_t end, absl::Duration grace);
  void StopLeftWorkers();
  // Reports what the node has told, and every process whose end was not reported yet; gives how many still run, or will
  // again.
  size_t ReportEnds();
  void RestartEnded(absl::Time now);
  bool Restarted(const Child& child) const;

  const ClusterOptions options_;
  const ClusterEvents events_;
  const std::unique_ptr<OwnedFolder> folder_;
  std::string address_;
  std::vector<Child> children_;         // the coordinator is the first; with `keep` the node is the second and last
  std::optional<NodeWorkers> workers_;  // with `keep`
};

}  // namespace shardmesh
