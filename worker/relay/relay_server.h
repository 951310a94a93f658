// RelayServer: where the workers of a host send heartbeats that the coordinator gets together: a UNIX socket, the relay
// behind it, and its call to the coordinator. Thread-safe.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "rpc/server.h"
#include "rpc/tls/tls.h"
#include "worker/relay/heartbeat_relay.h"

namespace shardmesh {

class RelayService;

class RelayServer {
 public:
  // Listens at `socket`, a path. Errors of Server::Start and of NewChannel to `coordinator` with `tls`.
  static absl::StatusOr<std::unique_ptr<RelayServer>> Start(const std::string& socket, const std::string& coordinator,
                                                            const TlsOptions& tls);
  // Calls that wait end with Unavailable.
  ~RelayServer();

  std::string address() const { return server_->address(); }  // "unix:PATH"

 private:
  explicit RelayServer(std::unique_ptr<HostsLink> link);

  HeartbeatRelay relay_;
  const std::unique_ptr<RelayService> service_;
  std::unique_ptr<Server> server_;
};

}  // namespace shardmesh
