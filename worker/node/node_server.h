// NodeServer: the node's UNIX socket: answers the requests of node.proto from a NodeStore, and watches the
// processes of the workers.
//
// A connection that closes says nothing about its worker: that is over when its process has ended, which the kernel
// tells of any process of this user (pidfd), child or not. How a process ended it tells the parent alone: of others the
// end counts as a kill. Only processes of this user and of root are answered. Children are not reaped: the owner does
// that, when it was told of the end.
// One thread. Public functions are thread-safe.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/sync.h"
#include "local/descriptor/fd.h"
#include "local/socket/socket.h"
#include "worker/node/listener_watch.h"
#include "worker/node/node_store.h"

namespace shardmesh {

inline constexpr int kMaxNodeConnections = 1024;

struct WorkerEnd {
  std::string worker;
  pid_t pid = 0;
  std::optional<int> wait_status;  // as of waitpid; unset: the process was no child of this one
  bool served = false;             // it had said where it serves
  absl::Duration heartbeat_timeout;  // NodeStore::HeartbeatTimeout
};

// Called by the server's thread, with no lock held; each may call Watch and Signal. Set both.
struct NodeEvents {
  std::function<void(const std::string& worker, pid_t pid)> came;  // it said hello
  std::function<void(const WorkerEnd& end)> ended;
};

class NodeServer {
 public:
  // Errors of LocalListener::Listen; ResourceExhausted: no descriptor.
  static absl::StatusOr<std::unique_ptr<NodeServer>> Start(const std::string& path, NodeEvents events);
  // Forgets everything: memory that no process has any more is gone.
  ~NodeServer();

  const std::string& path() const { return listener_.path(); }

  // The end of this child is told even when it ends before it says hello. REQUIRES: it was not reaped.
  // ResourceExhausted: it cannot be watched.
  absl::Status Watch(const std::string& worker, pid_t pid);
  // To a process that is watched; nothing to others.
  void Signal(pid_t pid, int signal);

 private:
  struct Watched {
    UniqueFd pidfd;
    std::set<std::string> workers;
  };
  struct Connection {
    LocalSocket socket;
    pid_t pid;
    std::string worker;    // empty: no hello yet
    absl::Status refused;  // the answer to its first request: a peer that is told before it asks hears that it is cut
    bool over = false;
  };

  NodeServer(LocalListener listener, UniqueFd wake, NodeEvents events);
  void Wake();
  void Loop();
  void AwaitWork();
  void AcceptOne();
  void TellEnds();
  void TellEnd(pid_t pid, const Watched& watched);
  void AnswerOne(Connection& connection);
  absl::StatusOr<v1::NodeReply> Answer(Connection& connection, const v1::NodeRequest& request,
                                       std::vector<UniqueFd> descriptors, int& reply_fd);
  absl::StatusOr<v1::NodeReply> AnswerHello(Connection& connection, const v1::NodeHello& hello);

  const NodeEvents events_;
  LocalListener listener_;
  ListenerWatch reachable_{listener_, "node"};  // of the server's thread
  const UniqueFd wake_;
  std::atomic<bool> stop_{false};
  Mutex mu_;
  std::map<pid_t, Watched> watched_ ABSL_GUARDED_BY(mu_);
  // Of the server's thread.
  NodeStore store_;
  std::list<Connection> connections_;
  bool accepts_ = true;  // false for a while when there is no descriptor for a connection
  std::thread thread_;
};

}  // namespace shardmesh
