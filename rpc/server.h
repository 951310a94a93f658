// Server: the one builder of every gRPC server of the product. It adds to the distribution's gRPC what that lacks: caps
// on connections and descriptors (see acceptor.h), bounds on streams, memory, metadata and messages, deadlines for
// handshakes and idle connections, TLS with client certificates beyond the machine; grpc.health.v1 and server
// reflection are always on.
//
// Who is served: without TLS, processes of this process's user and of root, on this machine alone; the kernel says
// whose they are (rpc/connections/peer_user.h). A process of another user gets PERMISSION_DENIED for every method of
// every service, health and reflection among them: its connections go to a second gRPC server, which has no other
// answer. With TLS the certificate decides alone. docs/security.md has the whole picture.
//
// It does not demand a deadline on calls: rpc/base/unary.h does. A unary call whose body is not its message gets
// INVALID_ARGUMENT. Compressed messages are refused, since gRPC would expand them without a limit. A connection that
// sends bytes without a call is cut off (acceptor.h), but gRPC 1.51 has no limit for one that keeps a call open
// meanwhile: it may cost a core of processor time with padded headers, and a header that never ends takes four times
// its memory.
//
//   ASSIGN_OR_RETURN(auto server, Server::Start(options, {&service}));
//   spdlog::info("event=listening address={}", server->address());
//   ...
//   server->Drain(absl::Seconds(5));
//
// Thread-safe. Services must outlive the server.
#pragma once

#include <grpcpp/impl/codegen/service_type.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/sync.h"
#include "rpc/calls/call_guard.h"
#include "rpc/calls/reflection.h"
#include "rpc/calls/refusal.h"
#include "rpc/connections/acceptor.h"
#include "rpc/tls/tls.h"

namespace shardmesh {

struct ServerOptions {
  std::string listen = "127.0.0.1:0";  // --listen: see rpc/base/address.h; port 0 has one chosen
  TlsOptions tls;                      // needed unless `listen` is loopback or a UNIX socket; not used on UNIX sockets

  int max_connections = 1024;
  int max_connections_per_peer = 256;  // of one remote IP; loopback and UNIX peers count to the total only
  int reserved_descriptors = 64;       // kept free for files and the server's own calls

  int max_concurrent_streams = 256;        // per connection; one with 4 times as many calls is ended (call_guard.h)
  int64_t max_message_bytes = 8 << 20;     // of one received message; sent ones are not limited
  int64_t memory_quota_bytes = 256 << 20;  // gRPC's own buffers; calls and connections beyond it are cancelled
  int max_metadata_bytes = 16 << 10;       // headers of one call
  // What a TCP connection may send beyond one message while it has no call; then it is reset. gRPC shows a call that
  // takes a single message only when it has that. Within a message, too, if gRPC does not come to an end of it for a
  // second.
  int64_t most_bytes_without_call = 512 << 10;

  // Whether gRPC measures how much is under way on each connection, to widen its windows: it pings the peer for what it
  // receives. Bulk needs it; small messages on many connections cost twice as much with it.
  bool measures_bandwidth = true;

  // What gRPC reads of a connection at a time, while others wait for the thread; 0: as it likes, up to 4 MiB.
  int read_chunk_bytes = 0;

  // Whose processes may call where no certificate says who they are: on UNIX sockets, and on loopback without TLS.
  std::vector<uid_t> users = {geteuid(), 0};

  absl::Duration keepalive_time = absl::Seconds(20);     // a quiet client is pinged after this
  absl::Duration keepalive_timeout = absl::Seconds(10);  // and cut off when it does not answer for this
  absl::Duration max_connection_idle = absl::Minutes(10);
  absl::Duration handshake_timeout = absl::Seconds(10);  // until TLS is up and the first HTTP/2 settings are in
};

class Server {
 public:
  // Listens, and serves `services` when it returns. They must be of the callback API: synchronous ones are not bounded.
  //   InvalidArgument: `listen` is malformed, no address of this machine, or leaves it without TLS (--tls-cert,
  //   --tls-key,
  //   --tls-ca); an option is out of range (named). AlreadyExists: the port or socket is in use. Errors of reading TLS
  //   files: see rpc/tls/tls.h. Internal: gRPC did not start.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options,
                                                       const std::vector<grpc::Service*>& services);
  ~Server();  // Drain(0)
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // The port that clients dial; 0 for a UNIX socket.
  int port() const { return address_.port; }
  // What clients dial: "host:port" or "unix:/path". The host is the one of `listen`, so 0.0.0.0 stays as it is.
  std::string address() const { return address_.ToString(); }
  // Connections open now, as last seen (up to a second old).
  int connections() const { return acceptor_->connections(); }

  // What grpc.health.v1 answers for the whole server (""). True at the start; no effect after Drain.
  void SetServing(bool serving) ABSL_LOCKS_EXCLUDED(mu_);

  // Graceful end: health says NOT_SERVING, new connections and calls are refused, calls in flight get `grace` to end,
  // then are cancelled. Returns when every call has ended: a reactor that ignores its cancellation blocks this, so it
  // must not. Clients without a call are not waited for: gRPC's look at a quiet connection every five seconds only.
  // Idempotent: a second call waits for the first.
  void Drain(absl::Duration grace) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  Server() = default;
  void EndQuietConnections(const std::atomic<bool>& ended);

  Address address_;
  std::shared_ptr<CallGuard> call_guard_;
  ReflectionService reflection_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> to_grpc_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<RefusingServer> refusing_;  // null: a certificate decides
  std::unique_ptr<Acceptor> acceptor_;  // destroyed first: its thread uses to_grpc_

  Mutex mu_;
  bool drained_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace shardmesh
