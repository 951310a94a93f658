// CallGuard: counts the open calls of each connection and names the connection that has too many.
//
// Why: HTTP/2's limit of concurrent streams does not count a stream that its client reset, but gRPC keeps the call's
// memory (about 20 KiB) until its handler is through. A client that opens and resets streams as fast as it can thus
// holds any number. No honest client comes near four times the limit of streams: beyond that the connection is ended.
//
// UNIX sockets are not guarded: their peers have no names to tell them apart. They are open to the server's own user
// only. Knows nothing of gRPC: call_tracking.h is the adapter. Thread-safe.
#pragma once

#include <functional>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "absl/strings/string_view.h"
#include "core/base/sync.h"

namespace shardmesh {

class CallGuard {
 public:
  // `abort` is called with the connection's name when it has more than `max_open_calls`, and again at every further
  // call; on the thread of that call, without a lock held. It may be empty until SetAbort.
  explicit CallGuard(int max_open_calls) : max_open_calls_(max_open_calls) {}
  void SetAbort(std::function<void(const std::string& connection)> abort) ABSL_LOCKS_EXCLUDED(mu_);

  // A call goes through Created, then perhaps Started, then Ended. `call` is its identity between Created and Ended. A
  // call that was not Created is ignored by the other two.
  void Created(const void* call) ABSL_LOCKS_EXCLUDED(mu_);
  // `connection`: gRPC's name of the peer, "ipv4:10.0.0.1:4711" or "ipv6:%5B::1%5D:4711"; "unix:..." is not counted.
  void Started(const void* call, absl::string_view connection) ABSL_LOCKS_EXCLUDED(mu_);
  void Ended(const void* call) ABSL_LOCKS_EXCLUDED(mu_);

  // Whether that connection has a call open, or had one since the last TakeEnded.
  bool HasCall(const std::string& connection) const ABSL_LOCKS_EXCLUDED(mu_);
  // The connections, by name, whose last open call has ended since the last call of this. They may have one again.
  std::unordered_set<std::string> TakeEnded() ABSL_LOCKS_EXCLUDED(mu_);

  // Calls created and not ended.
  int open_calls() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  const int max_open_calls_;
  mutable Mutex mu_;
  std::function<void(const std::string&)> abort_ ABSL_GUARDED_BY(mu_);
  std::unordered_map<const void*, std::string> connection_of_call_
      ABSL_GUARDED_BY(mu_);                                                       // "" until started, or not counted
  std::unordered_map<std::string, int> open_by_connection_ ABSL_GUARDED_BY(mu_);  // no zero entries
  std::unordered_set<std::string> ended_ ABSL_GUARDED_BY(mu_);                    // a call of theirs, since TakeEnded
};

// The name a connection has here and in acceptor.h: gRPC's, with the brackets of IPv6 in plain; "" for UNIX sockets.
std::string ConnectionName(absl::string_view grpc_peer);

}  // namespace shardmesh
