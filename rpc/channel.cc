#include "rpc/channel.h"

#include <arpa/inet.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <climits>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "rpc/base/address.h"
#include "rpc/base/library_log.h"

namespace shardmesh {
namespace {

int Milliseconds(absl::Duration d) {
  return static_cast<int>(std::clamp<int64_t>(absl::ToInt64Milliseconds(d), 1, INT_MAX));
}

grpc::ChannelArguments Arguments(const ChannelOptions& options) {
  grpc::ChannelArguments args;
  const absl::Duration half = options.peer_timeout / 2;
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(half));
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, Milliseconds(half));
  args.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // no limit
  // "Min reconnect backoff" is in fact how long one attempt to connect may take.
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, Milliseconds(options.peer_timeout));
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  args.SetMaxReceiveMessageSize(-1);
  args.SetMaxSendMessageSize(-1);
  if (!options.measures_bandwidth) args.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  args.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  args.SetInt(GRPC_ARG_MAX_METADATA_SIZE, 16 << 10);
  return args;
}

// "localhost" is dialled as 127.0.0.1, where our servers bind it, without asking a name server.
std::string Target(const Address& address) {
  if (address.is_unix()) return address.ToString();
  if (address.host == "localhost") return absl::StrCat("ipv4:127.0.0.1:", address.port);
  in_addr v4;
  if (inet_pton(AF_INET, address.host.c_str(), &v4) == 1) return absl::StrCat("ipv4:", address.ToString());
  if (absl::StrContains(address.host, ':')) return absl::StrCat("ipv6:", address.ToString());
  return absl::StrCat("dns:///", address.ToString());
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> NewChannel(absl::string_view address_text, const TlsOptions& tls,
                                                          const ChannelOptions& options) {
  RouteLibraryLogs();
  ASSIGN_OR_RETURN(const Address address, ParseAddress(address_text));
  if (!address.is_unix() && address.port == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot dial ", address.ToString(), ": give the port of the server"));
  }
  if (options.peer_timeout < absl::Seconds(1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("peer time-out ", absl::FormatDuration(options.peer_timeout), " is too short; at least 1s"));
  }
  if (!address.is_local() && !tls.enabled()) {
    return absl::InvalidArgumentError(
        absl::StrCat(address.ToString(), " is not on this machine, so TLS is needed: ", HowToGiveTls(tls)));
  }
  grpc::ChannelArguments args = Arguments(options);
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (tls.enabled() && !address.is_unix()) {
    ASSIGN_OR_RETURN(credentials, NewChannelCredentials(tls));
    if (!tls.override_target_name.empty()) {
      args.SetSslTargetNameOverride(tls.override_target_name);
    } else if (address.host == "localhost") {
      args.SetSslTargetNameOverride("localhost");
    }
  }
  return grpc::CreateCustomChannel(Target(address), credentials, args);
}

}  // namespace shardmesh
