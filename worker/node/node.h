// Node: a host's workers as processes of a node: starts them, holds their memory, starts again what ends.
//
// A worker that ends by a signal, or with a status that is not 0, is started again: at once when that incarnation had
// served, else after longer and longer waits. The waits of a worker that had joined are shorter than the time for which
// the coordinator waits for it. A worker that ends with 0 has left, and stays away. Workers do not end with this
// process unless Stop is called: the next Node at the same socket takes over those that say hello within a moment
// (kAdopt; only after a Node that did not stop), and starts the others.
// Thread-safe.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/sync.h"
#include "local/process/child_process.h"
#include "local/process/restarts.h"
#include "worker/node/node_server.h"

namespace shardmesh {

inline constexpr absl::Duration kAdopt = absl::Seconds(2);

struct NodeOptions {
  std::string worker_binary;  // its path
  std::string prefix;         // workers are PREFIX-0, PREFIX-1, ...
  int num_workers = 1;
  std::string socket;                             // of the node
  std::string log_dir;                            // a NAME.log for every worker; unset: their logs go to standard error
  std::string address_dir;                        // each worker writes where it serves to NAME in it; unset: nowhere
  std::string events_file;                        // as Tell; unset: none
  std::vector<std::string> devices;               // of the workers, in turn; empty: as worker_args say
  std::vector<std::string> worker_args;           // of each worker, after --name NAME --node SOCKET
  std::function<void()> listening;                // called once the node's socket is there, before a worker starts
  absl::Duration stop_grace = absl::Seconds(10);  // from SIGTERM to SIGKILL
};

class Node {
 public:
  // `all_left`: called once, from a thread of the node, when every worker has left. Errors of NodeServer::Start;
  // NotFound: there is no such worker binary; PermissionDenied: it cannot be run.
  static absl::StatusOr<std::unique_ptr<Node>> Start(NodeOptions options, std::function<void()> all_left);
  // As Stop().
  ~Node();

  // Ends the workers: SIGTERM, and after the grace SIGKILL. Their memory is gone then. Idempotent.
  void Stop();

 private:
  struct Slot {
    ChildOptions options;
    std::unique_ptr<ChildProcess> child;  // null: it was started by an earlier node
    pid_t pid = 0;                        // 0: it does not run
    pid_t other = 0;                      // that came as this worker before the child did
    absl::Time started, again;            // when it was, and when it is to be
    bool lived = false, left = false;
    Restarts restarts;
  };

  Node(NodeOptions options, std::function<void()> all_left);
  void Supervise();
  void StartLocked(Slot& slot, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // A line for the events file: "started NAME pid PID", once the process runs, or "ended NAME pid PID signal KILL" (or
  // "status 3", or "status unknown" of a process that an earlier node started). Adopted workers are not told.
  void Tell(const std::string& line) const;
  Slot* SlotLocked(const std::string& worker) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Came(const std::string& worker, pid_t pid);
  void Ended(const WorkerEnd& end);
  void EndSlotLocked(Slot& slot, const WorkerEnd& end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SignalAll(int signal);
  bool AwaitNone(absl::Duration timeout);

  const NodeOptions options_;
  const std::function<void()> all_left_;
  std::unique_ptr<NodeServer> node_;
  Mutex mu_;
  CondVar changed_;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<Slot> slots_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace shardmesh
