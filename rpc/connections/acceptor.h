// Acceptor: a thread that accepts connections and gives them away, within a cap on all, a cap per peer and a reserve
// of file descriptors. It knows nothing of gRPC.
//
//   accepting --(cap reached, reserve touched, or accept4 failed)--> paused --(every 25 ms: room again?)--> accepting
//
// While paused, clients wait in the kernel's queue and are served as soon as a connection closes; running out of
// descriptors is a pause, never an end. A peer over its own cap is accepted and closed at once, so that it cannot
// keep others waiting.
//
// Two guards may be set. `users`: of which users of this machine it takes connections; those of others, and of peers
// whose user the kernel does not tell, go to a sink of their own, a few at a time. `most_bytes_without_call`: a peer
// that sends more than so much without a call is cut off, by a second thread, and one that sends more than
// `slow_bytes_without_call` if reading it takes long. What it sends then is no request: a header without end, padded
// numbers, pings. Thread-safe.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "core/base/sync.h"
#include "rpc/connections/connection_table.h"
#include "rpc/connections/listener.h"

namespace shardmesh {

struct AcceptorLimits {
  int max_connections;
  int max_connections_per_peer;
  int reserved_descriptors;  // at most half of the soft limit is kept back, whatever this says
};

inline constexpr int kMaxForeignConnections = 8;  // open at once, of all users that are not served

struct AcceptorGuards {
  std::vector<uid_t> users;              // empty: all
  std::function<void(int fd)> foreign;   // as Sink, for connections of other users
  int64_t most_bytes_without_call = 0;   // 0: no limit
  int64_t slow_bytes_without_call = 0;   // FloodLimits::slow_bytes
  // Whether a peer, by its PeerName, has a call open, or had one since this was asked. Asked with a lock held: it must
  // not call the acceptor.
  std::function<std::function<bool(const std::string&)>()> calls;
};

class Acceptor {
 public:
  // Gets each accepted socket (non-blocking, close-on-exec, TCP_NODELAY) and owns it from then on. Called on the
  // acceptor's thread; must not block.
  using Sink = std::function<void(int fd)>;

  // Starts at once.
  Acceptor(std::unique_ptr<Listener> listener, AcceptorLimits limits, Sink sink, AcceptorGuards guards = {});
  ~Acceptor();  // Stop()
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  // Closes the listening socket: who waits in its queue or comes later is refused. The sink is not called any more when
  // this returns. Idempotent.
  void Stop() ABSL_LOCKS_EXCLUDED(stop_mu_);

  // Resets the connection whose PeerName this is (connection_table.h). False when there is none.
  bool Abort(const std::string& peer_name) ABSL_LOCKS_EXCLUDED(table_mu_);

  // Nothing more is read of any connection (connection_table.h). After Stop.
  void EndReading() ABSL_LOCKS_EXCLUDED(table_mu_);

  // Connections open at the last look; up to one second old.
  int connections() const { return connections_.load(); }
  // Connections closed at once because their peer was over its cap.
  int64_t refused() const { return refused_.load(); }

 private:
  void Run();
  void WatchListener();
  bool MayAccept() ABSL_LOCKS_EXCLUDED(table_mu_);
  bool AcceptSome();
  void Admit(int fd, const sockaddr_storage& peer) ABSL_LOCKS_EXCLUDED(table_mu_);
  bool Track(int fd, const sockaddr_storage& peer, bool foreign) ABSL_LOCKS_EXCLUDED(table_mu_);
  bool IsForeign(int fd, const sockaddr_storage& peer);
  void Guard() ABSL_LOCKS_EXCLUDED(table_mu_);

  const AcceptorLimits limits_;
  const Sink sink_;
  const AcceptorGuards guards_;
  const UniqueFd wake_;
  std::atomic<bool> stopping_{false};
  bool out_of_descriptors_ = false;  // the thread's: it has said so
  int64_t foreign_ = 0;              // the thread's: connections of other users so far
  absl::Time next_watch_ = absl::InfinitePast();  // the thread's, with the next
  std::string lost_;                              // why the socket's file cannot be made again, as said last
  std::atomic<int> connections_{0};
  std::atomic<int64_t> refused_{0};

  std::unique_ptr<Listener> listener_;  // the thread's until it is joined

  Mutex table_mu_;
  ConnectionTable table_ ABSL_GUARDED_BY(table_mu_);
  CondVar ended_;
  bool guard_ended_ ABSL_GUARDED_BY(table_mu_) = false;
  absl::Time foreign_until_ ABSL_GUARDED_BY(table_mu_) = absl::InfinitePast();  // none of other users before

  Mutex stop_mu_;
  std::thread thread_ ABSL_GUARDED_BY(stop_mu_);
  // Apart from the one that accepts: gRPC reads what a new connection has sent on the thread that gives it away, so
  // that a flood from the first byte holds that thread until it is cut off.
  std::thread guard_thread_ ABSL_GUARDED_BY(stop_mu_);
};

}  // namespace shardmesh
