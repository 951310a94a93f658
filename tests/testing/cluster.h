// Cluster: a coordinator and workers as real child processes on loopback, in a folder of their own. Ports are chosen by
// the system; processes are killed when the object goes. When the running test failed, the destructor prints all logs.
//
//   ASSERT_OK_AND_ASSIGN(auto cluster, Cluster::Start({.workers = 4}));
//   ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
//   cluster->worker("w2").Kill9();
//
// For one thread; Connect's result may be used anywhere.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "local/testing/temp_folder.h"
#include "rpc/tls/tls.h"
#include "tests/testing/system/process.h"

namespace shardmesh::testing {

struct ClusterOptions {
  int workers = 1;
  int threads = 1;  // of a step, in each worker
  int hosts = 1;    // as which the workers count, equally many on each: they share memory with those of theirs alone
  absl::Duration heartbeat_interval = absl::Milliseconds(100);
  absl::Duration heartbeat_timeout = absl::Seconds(5);
  std::string default_mesh;
  int descriptor_limit = 0;               // of every process; 0: the test's own
  std::vector<std::string> worker_flags;  // more of them
  // With certificates for 127.0.0.1: of the coordinator, of Connect, and of each worker that has none of its own. Not
  // enabled: no TLS.
  TlsOptions tls;
  std::map<std::string, TlsOptions> worker_tls;  // by name
  std::string worker_program = "worker/shardmesh-worker";
  // The workers are children of a shardmesh-node, one for each host, which keeps their memory and starts them again.
  // worker(), worker_address() and StartWorker() are not for them, but RetainedName(), PidOf() and node().
  bool retained = false;
  std::vector<std::string> coordinator_environment, worker_environment;  // ProcessSpec's; a node's workers have its own
};

class Cluster {
 public:
  // Returns when all workers have joined. Unavailable / DeadlineExceeded: a process did not start, with its log.
  static absl::StatusOr<std::unique_ptr<Cluster>> Start(ClusterOptions options);
  ~Cluster();

  // Workers are named w0, w1, ...; unknown names are a bug of the test.
  Process& worker(const std::string& name) { return *workers_.at(name).process; }
  const std::string& worker_address(const std::string& name) { return workers_.at(name).address; }
  // Of kept workers: w-0, w-1, ... of the only host; w0-0, w0-1, ... of the first of several.
  std::string RetainedName(int worker) const;
  // The process that is the worker now; 0: there is none.
  pid_t PidOf(const std::string& name) const;
  // PidOf, once it is another one than `before`. 0: there was none within `timeout`.
  pid_t AwaitNextIncarnation(const std::string& name, pid_t before, absl::Duration timeout) const;
  Process& node(int host = 0) { return *nodes_[host]; }
  // Starts the node again. REQUIRES: it ended.
  absl::Status StartNode(int host = 0);
  // The same, and waits until it has the memory of all workers, and they know of each other that they would come back.
  // REQUIRES: none of them is on its way to its next incarnation.
  absl::Status StartNodeAgain(absl::Duration timeout);  // of the only host
  // Kills the node first.
  absl::Status RestartNode(absl::Duration timeout);
  Process& coordinator() { return *coordinator_; }
  const std::string& coordinator_address() const { return coordinator_address_; }
  std::string StateFile() const { return folder_.File("state.db"); }
  const TempFolder& folder() const { return folder_; }

  // Starts a worker, or its next incarnation after it ended.
  absl::Status StartWorker(const std::string& name);
  // Starts the coordinator again with the same state file at the same port. REQUIRES: it ended.
  absl::Status RestartCoordinator();

  absl::StatusOr<Client> Connect(ClientOptions options = {}) const;

 private:
  struct WorkerProcess {
    std::unique_ptr<Process> process;
    std::string address;
    int incarnations = 0;
  };

  explicit Cluster(ClusterOptions options) : options_(std::move(options)) {}
  absl::Status StartCoordinator(const std::string& listen);
  absl::Status LaunchWorker(const std::string& name);
  absl::Status AwaitWorker(const std::string& name);
  std::string NodeFile(int host, const std::string& suffix) const;
  void PrintLogs() const;

  const ClusterOptions options_;
  const TempFolder folder_;
  int coordinator_starts_ = 0;
  std::string coordinator_address_;
  std::unique_ptr<Process> coordinator_;
  std::vector<std::unique_ptr<Process>> nodes_;  // by host
  std::map<std::string, WorkerProcess> workers_;
};

}  // namespace shardmesh::testing
