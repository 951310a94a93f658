#include "worker/relay/relay_server.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "worker/relay/hosts_transport.h"
#include "worker/relay/relay_service.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kExchange = absl::Seconds(1);  // a worker that waits longer calls the coordinator itself
}  // namespace

RelayServer::RelayServer(std::unique_ptr<HostsLink> link)
    : relay_(std::move(link)), service_(std::make_unique<RelayService>(relay_)) {}

RelayServer::~RelayServer() {
  relay_.Stop();
  if (server_ != nullptr) server_->Drain(absl::ZeroDuration());
}

absl::StatusOr<std::unique_ptr<RelayServer>> RelayServer::Start(const std::string& socket,
                                                                const std::string& coordinator, const TlsOptions& tls) {
  ASSIGN_OR_RETURN(auto link, HostsTransport::Dial(coordinator, tls, kExchange));
  std::unique_ptr<RelayServer> relay(new RelayServer(std::move(link)));
  ServerOptions options;
  options.listen = absl::StrCat("unix:", socket);
  ASSIGN_OR_RETURN(relay->server_, Server::Start(options, {relay->service_.get()}));
  return relay;
}

}  // namespace shardmesh
