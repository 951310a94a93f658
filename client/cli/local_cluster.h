// LocalCluster: a coordinator and its workers as child processes of this one. Not thread-safe. Every wait ends at a
// deadline or when `stop` is asked for.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "local/child_process.h"
#include "client/cli/owned_folder.h"
#include "local/restarts.h"
#include "rpc/main_support.h"
#include "rpc/tls.h"

namespace shardmesh {

struct ClusterOptions {
  std::string coordinator_binary, worker_binary;  // paths
  int num_workers = 1;
  std::string mesh;  // the default mesh of jobs; unset: none
  std::string listen = "127.0.0.1:7000";
  std::string state = ":memory:";
  std::string log_dir;  // a NAME.log for every process; unset: their logs go to standard error
  std::string log_level = "info";
  int threads = 1;                             // of a worker's step
  std::vector<std::string> devices = {"cpu"};  // of the workers, in turn: cpu or cuda:N
  int heartbeat_interval_ms = 500, heartbeat_timeout_ms = 3000;
  TlsOptions tls;  // of every process
  absl::Duration start_timeout = absl::Seconds(30);
  absl::Duration stop_grace = absl::Seconds(10);  // from SIGTERM to SIGKILL
  // Starts again what ended by itself, but for a coordinator whose state was in its memory.
  bool restart = false;
};

// What happens to a process, as it happens.
struct ClusterEvents {
  std::function<void(const ChildProcess&)> started;
  std::function<void(const ChildProcess&, int wait_status)> ended;
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
  absl::Status StartChild(const std::string& name, const std::string& program, std::vector<std::string> args);
  absl::StatusOr<std::string> AwaitAddress(const std::string& file, absl::Time deadline, StopSignal& stop);
  std::string LogFile(const std::string& name) const;
  void StopRange(size_t begin, size_t end);
  // Reports every process whose end was not reported yet; gives how many still run, or will again.
  size_t ReportEnds();
  void RestartEnded(absl::Time now);
  bool Restarted(const Child& child) const;

  const ClusterOptions options_;
  const ClusterEvents events_;
  const std::unique_ptr<OwnedFolder> folder_;
  std::string address_;
  std::vector<Child> children_;  // the coordinator is the first
};

}  // namespace shardmesh
