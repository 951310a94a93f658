// NewChannel: the one way the product dials a server. Thread-safe; the channel is shared and thread-safe too.
#pragma once

#include <grpcpp/channel.h>

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "rpc/tls/tls.h"

namespace shardmesh {

struct ChannelOptions {
  // A peer that is stopped, hung or cut off breaks the channel, and every call on it fails with UNAVAILABLE, about this
  // long after it was last heard: a ping is sent after half of it, and its answer awaited for the other half. A
  // connection attempt is given up after the same time. At least 1 s (the servers refuse pings more often than every
  // 100 ms).
  absl::Duration peer_timeout = absl::Seconds(10);
  bool measures_bandwidth = true;  // as in ServerOptions (rpc/server.h)
};

// `address`: see rpc/base/address.h; a name is looked up when the first call is made. Makes no connection by itself, so
// a server that is not there shows in the first call. Received messages are not limited (the caller chose the server).
// Every channel has connections of its own; proxies named in the environment are not used. gRPC's hidden retries are
// off: the callers repeat what is safe to repeat.
//   InvalidArgument: the address is malformed; has port 0; leaves the machine without TLS; a TLS file is unusable; or
//   peer_timeout < 1 s. Errors of reading TLS files: see rpc/tls/tls.h.
absl::StatusOr<std::shared_ptr<grpc::Channel>> NewChannel(absl::string_view address, const TlsOptions& tls = {},
                                                          const ChannelOptions& options = {});

}  // namespace shardmesh
