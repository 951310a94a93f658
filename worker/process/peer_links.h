// PeerLinks: how a worker calls other workers, the members of its jobs. To each address it has two connections, one for
// small calls and one for transfers of shards. They stay open between calls, so that none waits for another TLS handshake,
// and a network that loses packets has few connections to bring back.
//
// Transfers have one of their own, because a small call would wait behind what is under way: on a link of 1 MB/s, for one
// to two seconds, where its caller waits for two at most.
//
// An address may outlast its worker: a worker of another job or cluster may get the port of one that ended. Its word is
// not that of the worker that was meant. If a call ends with an error that the caller would believe, PeerLinks asks the
// address who it is (Shard.GetStatus). It believes only the worker that was meant, or its next incarnation that took
// the job over from it (shardmesh-node). In place of anybody else's error the caller gets Unavailable, as of a dead
// worker, and asks again until the coordinator has noticed.
//
// A connection that does not come back is made anew, once a second at most: certificates are read again then.
//
// Thread-safe; calls run side by side.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

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

  // The calls of ShardTransport with these names, and their errors and those of Dial. Unavailable: also if the call
  // failed, and somebody else answers at the address, or does not say who it is.
  absl::StatusOr<v1::MeetReply> Meet(const v1::Peer& lead, const v1::MeetRequest& request, absl::Duration timeout);
  absl::StatusOr<v1::TransferHeader> Transfer(const v1::Peer& from, const v1::TransferRequest& request,
                                              const TransferSink& sink, absl::Duration timeout);
  absl::StatusOr<v1::FileProgress> Copy(const v1::Peer& to, const v1::CopyRequest& request, const ReportProgress& told,
                                        absl::Duration timeout);

  // Hangs up on all other addresses: no job names them any more. A call that is under way goes on to its end. A later
  // call to such an address connects anew.
  void DropAllBut(const std::set<std::string>& addresses);

 private:
  struct Connection {
    std::unique_ptr<const ShardTransport> transport;
    absl::Time dialed;
  };
  struct Link {
    Connection calls, transfers;
    std::string logged;  // of who answers there instead
  };

  // Over which of a Link's connections.
  absl::StatusOr<std::unique_ptr<ShardTransport>> ConnectionTo(const v1::Peer& peer, Connection Link::*which);
  // What `peer` was asked about `job`, if the answer is its own.
  template <class Reply>
  absl::StatusOr<Reply> OnlyOf(const v1::Peer& peer, const std::string& job, absl::StatusOr<Reply> reply);
  void Log(const v1::Peer& peer, const absl::Status& other);

  const TlsOptions tls_;
  Mutex mu_;
  std::map<std::string, Link> links_ ABSL_GUARDED_BY(mu_);  // by address
};

}  // namespace shardmesh
