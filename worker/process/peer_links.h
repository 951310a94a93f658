// PeerLinks: how a worker calls other workers, the members of its jobs. All calls to one address share one connection. It
// stays open between calls, so that none waits for another TLS handshake, and a network that loses packets has one
// connection to bring back, not one of each kind of call.
//
// A transfer of shards shares the connection with small calls. HTTP/2 takes their messages in turns, and the windows of
// flow control are of each call, so a small call waits for what is on the way and not for the end of the transfer.
//
// Thread-safe; calls run side by side.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/transport/shard_transport.h"
#include "core/base/sync.h"
#include "proto/shardmesh/v1/coordinator.pb.h"
#include "proto/shardmesh/v1/shard.pb.h"
#include "rpc/tls/tls.h"
#include "worker/move/reform.h"
#include "worker/move/shard_files.h"

namespace shardmesh {

class PeerLinks {
 public:
  explicit PeerLinks(TlsOptions tls) : tls_(std::move(tls)) {}

  // The calls of ShardTransport with these names, and their errors and those of Dial.
  absl::StatusOr<v1::MeetReply> Meet(const v1::Peer& lead, const v1::MeetRequest& request, absl::Duration timeout);
  absl::StatusOr<v1::TransferHeader> Transfer(const v1::Peer& from, const v1::TransferRequest& request,
                                              const TransferSink& sink, absl::Duration timeout);
  absl::StatusOr<v1::FileProgress> Copy(const v1::Peer& to, const v1::CopyRequest& request, const ReportProgress& told,
                                        absl::Duration timeout);

  // Hangs up on all other addresses: no job names them any more. A call that is under way goes on to its end. A later
  // call to such an address connects anew.
  void DropAllBut(const std::set<std::string>& addresses);

 private:
  absl::StatusOr<std::unique_ptr<ShardTransport>> LinkTo(const v1::Peer& peer);

  const TlsOptions tls_;
  Mutex mu_;
  std::map<std::string, std::unique_ptr<const ShardTransport>> links_ ABSL_GUARDED_BY(mu_);  // by address
};

}  // namespace shardmesh
